"""Stages as processes of this host, the default."""

from __future__ import annotations

from pathlib import Path

from ppengine.config import EngineConfig
from ppengine.executor.process import Child, spawn, until
from ppengine.protocol.reports import ProcessInfo
from ppengine.protocol.steps import FIRST_GENERATION

END_S = 2.0
"""What a killed stage gets to be gone; a stage that hangs in the kernel must not hold up the next one."""


class LocalExecutor:
    """One process a stage. `module` is the entry point."""

    def __init__(self, module: str = "ppengine.stage.worker") -> None:
        self._module = module
        self._folder = Path()
        self._children: list[Child] = []
        self._generations: list[int] = []
        self._failed: dict[int, str] = {}
        """Why the newest process of a stage could not be started."""
        self._old: list[Child] = []
        """Processes that were replaced and would not end."""

    def start(self, config: EngineConfig) -> None:
        """Start every stage."""
        self._folder = Path(config.run_dir)
        for stage in range(config.stages):
            self._children.append(self._spawn(stage, FIRST_GENERATION))
            self._generations.append(FIRST_GENERATION)

    def poll(self) -> list[ProcessInfo]:
        """Return all stages in order."""
        infos = []
        for stage, child in enumerate(self._children):
            info = child.info("stage", stage, 0)
            info.generation = self._generations[stage]
            if stage in self._failed:
                info.exit_code, info.detail = 1, self._failed[stage]
            infos.append(info)
        return infos

    def restart(self, stage: int, generation: int) -> None:
        """Kill the stage if it still runs, stopped or not, and start it anew."""
        child = self._children[stage]
        child.kill()
        if child.wait(END_S) is None:
            self._old.append(child)
        else:
            child.close()
        self._generations[stage] = generation
        self._failed.pop(stage, None)
        try:
            self._children[stage] = self._spawn(stage, generation)
        except OSError as error:
            self._failed[stage] = f"could not be started: {error}"

    def stop(self, timeout: float) -> None:
        """Wait for the stages, then kill what is left."""
        until(lambda: all(child.poll() is not None for child in self._children), timeout)
        children = [*self._old, *self._children]
        for child in children:
            child.kill()
        for child in children:
            child.wait(1.0)
            child.close()

    def _spawn(self, stage: int, generation: int) -> Child:
        place = ["--stage", str(stage), "--rank", "0", "--generation", str(generation)]
        args = ["--engine", str(self._folder / "engine.json"), *place]
        return spawn(self._module, args, log=self._folder / f"stage{stage}.log")
