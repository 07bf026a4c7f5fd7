"""Descriptors of the engine's processes and free space of its folders, once a second: the gateway looks itself."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from ppengine.common import procfs
from ppengine.common.config import EngineConfig
from ppengine.common.open_files import FILES_LEFT, OpenFiles, open_files
from ppengine.diagnosis.evidence import Shortage
from ppengine.gateway.audit import KEEP_VARIABLE
from ppengine.protocol import kept_files
from ppengine.protocol.place import Place
from ppengine.protocol.reports import ProcessInfo

LOOK_S = 1.0
DISK_LEFT = 256 * 1024
"""A folder with fewer free bytes is full: records and logs still come in pieces of this size."""


class ShortageWatch:
    """Remembers since when each thing is short."""

    def __init__(self, config: EngineConfig) -> None:
        self._folders = {
            "run folder": Path(config.run_dir),
            "folder of rings": Path(config.ring_dir),
            "folder of kept files": kept_files.engine_folder(config.id),
        }
        if folder := os.environ.get(KEEP_VARIABLE):
            self._folders["folder of the audit log"] = Path(folder)
        self._groups = config.groups
        self._since: dict[str, float] = {}
        self._due = 0.0
        self.present: tuple[Shortage, ...] = ()
        """Shortages of the newest look."""

    def look(self, listed: Iterable[ProcessInfo]) -> tuple[Shortage, ...]:
        """Look again if a second has passed; return the present shortages. `listed`: the engine's processes."""
        now = time.monotonic()
        if now < self._due:
            return self.present
        self._due = now + LOOK_S
        found = [*self._of_files(listed), *self._of_disks()]
        self._since = {short.where: self._since.get(short.where, now) for short in found}
        self.present = tuple(
            Shortage(
                kind=short.kind, where=short.where, figure=short.figure, stage=short.stage, rank=short.rank,
                pid=short.pid,
                since_s=now - self._since[short.where],
            )
            for short in found
        )  # fmt: skip
        return self.present

    def _of_files(self, listed: Iterable[ProcessInfo]) -> Iterator[Shortage]:
        here = (each for each in listed if each.pid and not each.node)
        running = {each.pid: each for each in here if each.exit_code is None and not each.replaced}
        for pid, process in running.items():
            files = open_files(pid)
            if files is not None and _out(files):
                place = None if process.stage is None else Place(process.stage, process.rank or 0)
                name = process.role if place is None else self._groups.text(place)
                rank = place.rank if place is not None and self._groups.tensor > 1 else None
                yield Shortage(kind="files", where=name, figure=files.text, stage=process.stage, rank=rank, pid=pid)
        for pid, (parent, module) in procfs.children(running).items():
            files = open_files(pid)
            if files is not None and _out(files):
                where = f"{module.rpartition('.')[2]} (child of the {running[parent].role})"
                yield Shortage(kind="files", where=where, figure=files.text, stage=None, pid=pid)

    def _of_disks(self) -> Iterator[Shortage]:
        seen = set[int]()
        for name, folder in self._folders.items():
            try:
                stat, device = os.statvfs(folder), folder.stat().st_dev
            except OSError:
                continue
            free, inodes = stat.f_bavail * stat.f_frsize, stat.f_favail if stat.f_files else 1
            if device in seen or (free >= DISK_LEFT and inodes > 0):
                continue
            seen.add(device)
            size = f"{free:,} B free of {stat.f_blocks * stat.f_frsize:,} B"
            figure = size if free < DISK_LEFT else f"0 of {stat.f_files:,} inodes free"
            yield Shortage(kind="disk", where=f"{folder} ({name})", figure=figure)


def _out(files: OpenFiles) -> bool:
    return files.limit - files.used < FILES_LEFT
