"""The actor that is a stage: the same stage code, in the main thread of a Ray worker."""

from __future__ import annotations

import os
from pathlib import Path

from ppengine.common.config import EngineConfig


class StageActor:
    """Made by the driver, one per stage. Its `run` lasts as long as the stage, and so does its pending ObjectRef."""

    def pid(self) -> int:
        """Return the worker's process id."""
        return os.getpid()

    def run(self, engine: str, stage: int, generation: int) -> int:
        """Run the stage of the engine.json at `engine` until it leaves. Returns its exit code."""
        config = EngineConfig.load(Path(engine))
        log = Path(config.run_dir) / f"stage{stage}.log"
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        for standard in (1, 2):
            os.dup2(descriptor, standard)
        os.close(descriptor)
        from ppengine.stage.worker import run_stage

        return run_stage(config, stage, 0, generation)
