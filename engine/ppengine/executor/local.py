"""Stages as processes of this host, the default. A nursery loads once what they all need, and forks them."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import NamedTuple

from ppengine.config import EngineConfig
from ppengine.executor.base import ExecutorError
from ppengine.executor.nursery import Nursery
from ppengine.executor.process import Child, until
from ppengine.protocol.reports import ProcessInfo
from ppengine.protocol.steps import FIRST_GENERATION

END_S = 2.0
"""What a killed stage gets to be gone; a stage that hangs in the kernel must not hold up the next one."""


class _Place(NamedTuple):
    """Of one stage: the generation that its newest process was begun for, and that process once it is there."""

    generation: int
    child: Child | None = None
    failed: ProcessInfo | None = None
    """What is told where there will be none."""


class LocalExecutor:
    """One process a stage. `module` is the entry point."""

    def __init__(self, module: str = "ppengine.stage.worker") -> None:
        self._module = module
        self._folder = Path()
        self._nursery: Nursery | None = None
        self._places: list[_Place] = []
        self._ordered: deque[tuple[int, int]] = deque()
        """Stages that the nursery was asked for and that are not there yet, with their generations."""
        self._old: list[Child] = []
        """Processes that were replaced and would not end."""

    def start(self, config: EngineConfig) -> None:
        """Order every stage."""
        self._folder = Path(config.run_dir)
        self._places = [_Place(FIRST_GENERATION) for _ in range(config.stages)]
        for stage in range(config.stages):
            self._order(stage)

    def poll(self) -> list[ProcessInfo]:
        """Return all stages that are there, or could not be made, in order."""
        self._take_born()
        infos = []
        for stage, place in enumerate(self._places):
            info = place.child.info("stage", stage, 0) if place.child is not None else place.failed
            if info is not None:
                info.generation = place.generation
                infos.append(info)
        return infos

    def restart(self, stage: int, generation: int) -> None:
        """Kill the stage if it still runs, stopped or not, and order it anew."""
        child = self._places[stage].child
        if child is not None:
            self._end(child)
        self._places[stage] = _Place(generation)
        try:
            self._order(stage)
        except (OSError, ExecutorError) as error:
            self._fail(stage, 0 if child is None else child.pid, f"could not be started: {error}")

    def stop(self, timeout: float) -> None:
        """Wait for the stages, then kill what is left."""
        if self._nursery is not None:
            # None of those that were ordered is to come any more.
            self._take_born()
            self._nursery.close()
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
        generation = self._places[stage].generation
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
            if generation == self._places[stage].generation:
                self._places[stage] = _Place(generation, child)
            else:  # It was ordered again meanwhile.
                self._end(child)

    def _give_up(self, reason: str) -> None:
        while self._ordered:
            stage, generation = self._ordered.popleft()
            if generation == self._places[stage].generation and self._nursery is not None:
                self._fail(stage, self._nursery.pid, f"the process that makes stages ended: {reason}")

    def _fail(self, stage: int, pid: int, text: str) -> None:
        info = ProcessInfo(role="stage", stage=stage, rank=0, pid=pid, exit_code=1, detail=text)
        self._places[stage] = _Place(self._places[stage].generation, failed=info)

    def _end(self, child: Child) -> None:
        child.kill()
        if child.wait(END_S) is None:
            self._old.append(child)
        else:
            child.close()
