"""Stages as processes of this host, the default. A nursery loads once what they all need, and forks them."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import NamedTuple

from ppengine.common.child_process import Child, until
from ppengine.common.config import EngineConfig
from ppengine.protocol.reports import ProcessInfo
from ppengine.protocol.steps import FIRST_GENERATION
from ppengine.supervisor.launch.forkserver_client import Nursery
from ppengine.supervisor.launch.launcher import ExecutorError

END_S = 2.0
"""What a killed stage gets to be gone; a stage that hangs in the kernel must not hold up the next one."""


class _Place(NamedTuple):
    """Of one stage: its newest process that is there, if any, and the generation that it was begun for."""

    generation: int
    child: Child | None = None
    replaced: bool = False
    """It was ended here, to make room: its end is no fault."""
    failed: ProcessInfo | None = None
    """What is told where there will be none."""

    def info(self, stage: int) -> ProcessInfo | None:
        """Return what a report says of it; None: nothing yet."""
        if self.child is None:
            return self.failed
        info = self.child.info("stage", stage, 0)
        info.generation = self.generation
        if self.replaced:
            info.exit_code, info.detail, info.replaced = None, "", True
        return info


class LocalExecutor:
    """One process a stage. `module` is the entry point."""

    def __init__(self, module: str = "ppengine.stage.worker") -> None:
        self._module = module
        self._folder = Path()
        self._nursery: Nursery | None = None
        self._places: list[_Place] = []
        self._wanted: list[int] = []
        """The generation of each stage's newest order."""
        self._ordered: deque[tuple[int, int]] = deque()
        """Stages that the nursery was asked for and that are not there yet, with their generations."""
        self._old: list[Child] = []
        """Processes that were replaced and would not end."""

    def start(self, config: EngineConfig) -> None:
        """Order every stage."""
        self._folder = Path(config.run_dir)
        self._places = [_Place(FIRST_GENERATION) for _ in range(config.stages)]
        self._wanted = [FIRST_GENERATION] * config.stages
        for stage in range(config.stages):
            self._order(stage)

    def poll(self) -> list[ProcessInfo]:
        """Return all stages that are there, or could not be made, in order."""
        self._take_born()
        infos = (place.info(stage) for stage, place in enumerate(self._places))
        return [info for info in infos if info is not None]

    def restart(self, stage: int, generation: int) -> None:
        """Kill the stage if it still runs, stopped or not, and order it anew; the old one is told of until then."""
        place = self._places[stage]
        if place.child is not None:
            self._places[stage] = place._replace(replaced=place.replaced or place.child.poll() is None)
            self._end(place.child)
        self._wanted[stage] = generation
        try:
            self._order(stage)
        except (OSError, ExecutorError) as error:
            self._fail(stage, 0 if place.child is None else place.child.pid, f"could not be started: {error}")

    def stop(self, timeout: float) -> None:
        """Wait for the stages, then kill what is left."""
        if self._nursery is not None:
            # None of those that were ordered is to come any more; one that comes yet has lost its lifeline.
            self._take_born()
            self._nursery.close()
            self._nursery = None
            self._ordered.clear()
        children = [place.child for place in self._places if place.child is not None]
        until(lambda: all(child.poll() is not None for child in children), timeout)
        children += self._old
        for child in children:
            child.kill()
        for child in children:
            child.wait(1.0)
            child.close()

    def _order(self, stage: int) -> None:
        if self._nursery is not None and self._nursery.lost():
            self._nursery.close()
            self._nursery = None
        if self._nursery is None:
            self._nursery = Nursery(self._module, self._folder)
        generation = self._wanted[stage]
        place = ["--stage", str(stage), "--rank", "0", "--generation", str(generation)]
        args = ["--engine", str(self._folder / "engine.json"), *place]
        self._nursery.order(self._module, args, self._folder / f"stage{stage}.log")
        self._ordered.append((stage, generation))

    def _take_born(self) -> None:
        """Give the stages that have come their places; where the nursery is gone, say so in those of the others."""
        while self._nursery is not None and self._ordered:
            child = self._nursery.born()
            if child is None:
                if reason := self._nursery.lost():
                    self._give_up(reason)
                return
            stage, generation = self._ordered.popleft()
            if generation == self._wanted[stage]:
                self._places[stage] = _Place(generation, child)
            else:  # It was ordered again meanwhile.
                self._end(child)

    def _give_up(self, reason: str) -> None:
        while self._ordered:
            stage, generation = self._ordered.popleft()
            if generation == self._wanted[stage] and self._nursery is not None:
                self._fail(stage, self._nursery.pid, f"the process that makes stages ended: {reason}")

    def _fail(self, stage: int, pid: int, text: str) -> None:
        generation = self._wanted[stage]
        info = ProcessInfo(
            role="stage", stage=stage, rank=0, pid=pid, exit_code=1, detail=text, generation=generation
        )  # fmt: skip
        self._places[stage] = _Place(generation, failed=info)

    def _end(self, child: Child) -> None:
        child.kill()
        if child.wait(END_S) is None:
            self._old.append(child)
        else:
            child.close()
