"""Stages as processes of this host, the default. A fork server loads what they need once, and forks them."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

from ppengine.common.child_process import Child, until
from ppengine.common.config import EngineConfig
from ppengine.protocol.place import Place
from ppengine.protocol.reports import ProcessInfo
from ppengine.protocol.stage_lifecycle import FIRST_GENERATION
from ppengine.supervisor.launch.forkserver_client import ForkServer
from ppengine.supervisor.launch.launcher import ExecutorError

AGAIN_S = 10.0
"""Seconds between two fork servers that replace others: one that keeps ending has a reason."""
END_S = 2.0
"""Seconds a killed stage gets to be gone; one that hangs in the kernel must not block its successor."""


class _Process(NamedTuple):
    """The newest process of one place, if any, and the generation it was started for."""

    generation: int
    child: Child | None = None
    replaced: bool = False
    """The launcher ended it for its successor: its end is no fault."""
    failed: ProcessInfo | None = None
    """The report while there is no process: it could not be made, or was not ordered yet."""

    def info(self, place: Place) -> ProcessInfo | None:
        """Return the report of this place, None until there is one."""
        if self.child is None:
            return self.failed
        info = self.child.info("stage", *place)
        info.generation = self.generation
        if self.replaced:
            info.exit_code, info.detail, info.replaced = None, "", True
        return info


class LocalExecutor:
    """One process a place. `module` is the entry point."""

    def __init__(self, module: str = "ppengine.stage.worker") -> None:
        self._module = module
        self._folder = Path()
        self._server: ForkServer | None = None
        self._processes: dict[Place, _Process] = {}
        self._wanted: dict[Place, int] = {}
        """The generation of each place's newest order."""
        self._ordered: deque[tuple[Place, int]] = deque()
        """Places that were ordered and not yet forked, with their generations."""
        self._again_at = 0.0
        """Time from which a fork server that ends is replaced at once."""
        self._old: list[Child] = []
        """Replaced processes that did not end in time."""

    def start(self, config: EngineConfig) -> None:
        """Order every stage."""
        self._folder = Path(config.run_dir)
        places = config.groups.places
        self._processes = {place: _Process(FIRST_GENERATION) for place in places}
        self._wanted = dict.fromkeys(places, FIRST_GENERATION)
        for place in places:
            self._order(place)

    def resume(self, config: EngineConfig) -> None:
        """Load what stages need; the core orders each, since only it knows the generation."""
        self._folder = Path(config.run_dir)
        places = config.groups.places
        self._processes = {
            place: _Process(
                0, failed=ProcessInfo(role="stage", stage=place.stage, rank=place.rank, pid=0, generation=0)
            )
            for place in places
        }
        self._wanted = dict.fromkeys(places, 0)
        self._server = ForkServer(self._module, self._folder)

    def poll(self) -> list[ProcessInfo]:
        """Return the reports of all stages, forked or failed, in order, and once that of a fork server's end."""
        ended = self._replace_server()
        self._take_forked()
        infos = (process.info(place) for place, process in self._processes.items())
        return [*(info for info in infos if info is not None), *ended]

    def restart(self, place: Place, generation: int) -> None:
        """Kill the process if it still runs, stopped or not, and order another; the old one is reported until then."""
        process = self._processes[place]
        if process.child is not None:
            self._processes[place] = process._replace(replaced=process.replaced or process.child.poll() is None)
            self._end(process.child)
        self._wanted[place] = generation
        try:
            self._order(place)
        except (OSError, ExecutorError) as error:
            self._fail(place, 0 if process.child is None else process.child.pid, f"could not be started: {error}")

    def stop(self, timeout: float) -> None:
        """Wait for the stages, then kill the rest."""
        if self._server is not None:
            # A stage that is still forked after this loses its lifeline and leaves.
            self._take_forked()
            self._server.close()
            self._server = None
            self._ordered.clear()
        children = [process.child for process in self._processes.values() if process.child is not None]
        until(lambda: all(child.poll() is not None for child in children), timeout)
        children += self._old
        for child in children:
            child.kill()
        for child in children:
            child.wait(1.0)
            child.close()

    def _order(self, place: Place) -> None:
        # Open orders of a fork server that has ended are not those of its successor.
        self._take_forked()
        if self._server is not None and not self._ordered and (self._server.exit_text() or self._server.cramped):
            self._server.close()
            self._server = None
        if self._server is None:
            self._server = ForkServer(self._module, self._folder)
        generation = self._wanted[place]
        args = ["--engine", str(self._folder / "engine.json"), "--stage", str(place.stage), "--rank", str(place.rank)]
        self._server.order(self._module, [*args, "--generation", str(generation)], self._folder / place.log_name)
        self._ordered.append((place, generation))

    def _replace_server(self) -> list[ProcessInfo]:
        """Start another fork server for one that has ended, so that it has loaded when a stage is needed."""
        if self._server is None or self._ordered or not self._server.exit_text():
            return []
        info = self._server.info()
        self._server.close()
        self._server = None
        if time.monotonic() >= self._again_at:
            self._again_at = time.monotonic() + AGAIN_S
            with contextlib.suppress(OSError, ExecutorError):  # The next order tries again.
                self._server = ForkServer(self._module, self._folder)
        return [info]

    def _take_forked(self) -> None:
        """Take the stages that were forked; if the fork server is gone, report the others as failed."""
        while self._server is not None and self._ordered:
            child = self._server.take()
            if child is None:
                if reason := self._server.exit_text():
                    self._give_up(reason)
                return
            place, generation = self._ordered.popleft()
            if generation == self._wanted[place]:
                self._processes[place] = _Process(generation, child)
            else:  # A newer order replaced this one.
                self._end(child)

    def _give_up(self, reason: str) -> None:
        while self._ordered:
            place, generation = self._ordered.popleft()
            if generation == self._wanted[place] and self._server is not None:
                self._fail(place, self._server.pid, f"the fork server ended: {reason}")

    def _fail(self, place: Place, pid: int, text: str) -> None:
        generation = self._wanted[place]
        info = ProcessInfo(
            role="stage", stage=place.stage, rank=place.rank, pid=pid, exit_code=1, detail=text, generation=generation
        )  # fmt: skip
        self._processes[place] = _Process(generation, failed=info)

    def _end(self, child: Child) -> None:
        child.kill()
        if child.wait(END_S) is None:
            self._old.append(child)
        else:
            child.close()
