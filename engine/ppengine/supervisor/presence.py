"""The engine as consoles find it: its record, and the folders with its sockets and rings."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ppengine.common import cluster
from ppengine.common.config import EngineConfig
from ppengine.protocol import discovery, keys
from ppengine.protocol.frames import PROTOCOL
from ppengine.supervisor import claims
from ppengine.supervisor.announcements import announce, tell

LOOK_S = 1.0
_SOCKETS = ("state", "control", "bulk")


class Presence:
    """Publishes the record of one engine, and keeps its folders while the engine runs."""

    def __init__(self, config: EngineConfig) -> None:
        self._config, self._folder = config, Path(config.run_dir)
        self.published = False
        """Consoles can find it."""
        self._look_at = 0.0
        """Time of the next look at the folders."""
        self._keys: dict[str, bytes] = {}
        """Keys for other nodes, by name of the file: sockets and nodes keep theirs if the folder is removed."""
        self._trouble = ""
        """Why they could not be made again."""

    def keep_record(self) -> None:
        """Make the folder of the files that outlive the engine; without room there is none."""
        try:
            discovery.keep_record(self._record())
        except OSError as error:
            tell(f"note: no logs and no incidents are kept: {error.filename}: {error.strerror}")

    def publish(self) -> bool:
        """Write the record as soon as the gateway's sockets are there; return whether it is written."""
        if not self.published and all((self._folder / socket).exists() for socket in _SOCKETS):
            discovery.write_record(self._record())
            self.published = True
            self._keys = cluster.read_keys(self._folder)
            announce("started", id=self._config.id, name=self._config.name, run_dir=self._config.run_dir)
        return self.published

    def keep_folders(self) -> None:
        """Make folders and record again if something has removed them: processes bind their sockets again by that."""
        now = time.monotonic()
        if not self.published or now < self._look_at:
            return
        self._look_at = now + LOOK_S
        name = f"{self._config.name} ({self._config.id})"
        try:
            if claims.make(self._config):
                cluster.write_keys(self._folder, self._keys)
                tell(f"{name}: {self._folder} or {self._config.ring_dir} was removed; it is made again")
            if not (discovery.runtime_dir() / f"{self._config.id}.json").exists() and keys.public_key(self._folder):
                discovery.write_record(self._record())
        except (OSError, keys.KeyFileError, discovery.RuntimeDirError) as error:
            if str(error) != self._trouble:
                tell(f"{name}: its folders are gone and cannot be made again: {error}; it is tried again")
            self._trouble = str(error)

    def _record(self) -> discovery.EngineRecord:
        config, pid = self._config, os.getpid()
        return discovery.EngineRecord(
            id=config.id,
            name=config.name,
            epoch=config.epoch,
            pid=pid,
            pid_start=discovery.process_start(pid) or 0,
            state_endpoint=config.endpoint("state"),
            control_endpoint=config.endpoint("control"),
            bulk_endpoint=config.endpoint("bulk"),
            proto=PROTOCOL,
            model=Path(config.model_path).name,
            pipeline_parallel_size=config.stages,
            run_dir=config.run_dir,
            started_wall=config.started_wall,
            server_key=keys.public_key(self._folder),
            address=config.profile.console.listen or "",
            keeper=config.keeper,
        )
