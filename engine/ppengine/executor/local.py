"""Stages as processes of this host, the default."""

from __future__ import annotations

from pathlib import Path

from ppengine.config import EngineConfig
from ppengine.executor.base import GENERATION
from ppengine.executor.process import Child, spawn, until
from ppengine.protocol.reports import ProcessInfo


class LocalExecutor:
    """One process a stage. `module` is the entry point."""

    def __init__(self, module: str = "ppengine.stage.worker") -> None:
        self._module = module
        self._children: list[Child] = []

    def start(self, config: EngineConfig) -> None:
        """Start every stage."""
        folder = Path(config.run_dir)
        for stage in range(config.stages):
            place = ["--stage", str(stage), "--rank", "0", "--generation", str(GENERATION)]
            args = ["--engine", str(folder / "engine.json"), *place]
            self._children.append(spawn(self._module, args, log=folder / f"stage{stage}.log"))

    def poll(self) -> list[ProcessInfo]:
        """Return all stages in order."""
        return [child.info("stage", stage, 0) for stage, child in enumerate(self._children)]

    def stop(self, timeout: float) -> None:
        """Wait for the stages, then kill what is left."""
        until(lambda: all(child.poll() is not None for child in self._children), timeout)
        for child in self._children:
            child.kill()
        for child in self._children:
            child.wait(1.0)
            child.close()
