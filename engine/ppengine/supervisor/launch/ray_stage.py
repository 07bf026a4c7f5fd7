"""The actor that is a stage: the same stage code, in the main thread of a Ray worker."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

import msgspec

from ppengine.common.config import EngineConfig
from ppengine.protocol.discovery import process_start
from ppengine.protocol.place import Place


class StageActor:
    """Made by the driver, one a place. Its `run` lasts as long as the stage, and so does its pending ObjectRef."""

    def place(self) -> tuple[int, int, str, str]:
        """Return the worker's process id, its start time, the id of its node, and the version of this package."""
        import ray

        node = str(ray.get_runtime_context().get_node_id())
        return os.getpid(), process_start(os.getpid()) or 0, node, metadata.version("ppconsole")

    def run(self, config: bytes, stage: int, rank: int, generation: int) -> int:
        """Run the stage of an engine until it leaves, in the folder of its node. Returns its exit code."""
        from ppengine.supervisor.claims import note_stage
        from ppengine.supervisor.launch.ray_node import local_config

        mine = msgspec.json.decode(config, type=EngineConfig)
        if mine.node:
            # The node's actor has made its folder, and guards what is noted there.
            mine = local_config(mine)
            note_stage(Path(mine.run_dir), Place(stage, rank))
        log = Path(mine.run_dir) / Place(stage, rank).log_name
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        for standard in (1, 2):
            os.dup2(descriptor, standard)
        os.close(descriptor)
        from ppengine.stage.worker import run_stage

        return run_stage(mine, stage, rank, generation)
