"""Engines on this host: a live one has a 0600 JSON record in a 0700 folder of the user.

$XDG_RUNTIME_DIR/ppconsole/            (or /tmp/ppconsole-<uid>/ where the variable is not set)
    <id>.json                          EngineRecord
    <id>/                              sockets, logs, audit log: the run folder
/dev/shm/ppconsole-<uid>-<id>/         recorder rings

An engine that ended is found by its kept files (`kept_files.py`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from pathlib import Path
from typing import NamedTuple

import msgspec

from ppengine.protocol import kept_files
from ppengine.protocol.json_files import read_json_file

SOCKET_PATH_MOST = 107
"""Bytes of the path of a Unix socket; see unix(7)."""

ENDED_MOST, NEWEST_KEPT = 10, 3
"""Ended engines whose files are kept: the newest ones anyway, and of the others those with a fault stay longest."""


class EngineRecord(msgspec.Struct, kw_only=True):
    """Everything a console needs to attach. `pid` is the supervisor's; `pid_start` guards against a reused pid."""

    id: str
    name: str
    epoch: str
    pid: int
    pid_start: int
    state_endpoint: str
    control_endpoint: str
    bulk_endpoint: str
    proto: int
    model: str
    pipeline_parallel_size: int
    run_dir: str
    started_wall: float
    server_key: str = ""
    """Public key of the engine's sockets."""
    address: str = ""
    """Its `tcp://HOST:PORT` if it listens; of a record without a pid, the engine is on another host."""
    keeper: tuple[int, int] | None = None
    """Pid and start time of the process that starts another supervisor if this one is killed."""

    @property
    def remote(self) -> bool:
        """Whether the engine is reached by TCP alone: its files and processes are not here."""
        return self.pid == 0

    @property
    def label(self) -> str:
        """Words for it in a message."""
        return f"engine {self.id} ({self.name})" if self.id else f"engine {self.name}"


class RuntimeDirError(Exception):
    """The runtime folder cannot be trusted; the text says why and what to do."""


def runtime_dir() -> Path:
    """Return the user's folder of engines, made 0700 if missing. Raises RuntimeDirError."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(base) / "ppconsole" if base else Path(f"/tmp/ppconsole-{os.getuid()}")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.lstat()
    except OSError as error:
        raise RuntimeDirError(f"{path}: {error.strerror}; set XDG_RUNTIME_DIR to a folder of yours") from None
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise RuntimeDirError(f"{path} is not a folder owned by uid {os.getuid()}; set XDG_RUNTIME_DIR to one")
    if stat.S_IMODE(info.st_mode) & 0o077:
        path.chmod(0o700)
    return path


def ring_dir(engine_id: str) -> Path:
    """Return the folder of the recorder rings of one engine."""
    return Path("/dev/shm") / f"ppconsole-{os.getuid()}-{engine_id}"


def process_start(pid: int) -> int | None:
    """Return the start time of a live process in clock ticks since boot; None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()  # its name may be cut inside a character
    except OSError:
        return None
    fields = text.rpartition(b")")[2].split()
    return None if fields[0] == b"Z" else int(fields[19])


def alive(record: EngineRecord) -> bool:
    """Return whether an engine goes on: its supervisor runs, or the process that starts another one.

    An engine elsewhere goes on as far as is known here.
    """
    return record.remote or process_start(record.pid) == record.pid_start or runs(record.keeper)


def runs(process: tuple[int, int] | None) -> bool:
    """Return whether the process with this pid and start time runs."""
    return process is not None and process_start(process[0]) == process[1]


def write_record(record: EngineRecord) -> None:
    """Publish `record` atomically with mode 0600."""
    kept_files.write_file(runtime_dir() / f"{record.id}.json", msgspec.json.encode(record))


def keep_record(record: EngineRecord) -> None:
    """Make the folder of the files that outlive the engine, with its record. Raises OSError."""
    folder = kept_files.engine_folder(record.id)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept_files.write_file(folder / "record.json", msgspec.json.encode(record))


def remove_engine(engine_id: str) -> None:
    """Remove the record, the run folder and the rings of one engine; missing ones are fine.

    Its logs and its end are kept, and the kept files of the oldest ended engines go.
    """
    folder = runtime_dir()
    (folder / f"{engine_id}.json").unlink(missing_ok=True)
    kept_files.keep(engine_id, folder / engine_id)
    shutil.rmtree(folder / engine_id, ignore_errors=True)
    shutil.rmtree(ring_dir(engine_id), ignore_errors=True)
    ended = ended_engines()
    for surplus in sorted(ended[NEWEST_KEPT:], key=_worth)[: max(0, len(ended) - ENDED_MOST)]:
        shutil.rmtree(surplus.folder, ignore_errors=True)


def list_engines() -> list[EngineRecord]:
    """Return the live engines of this user, oldest first, and remove what dead ones left behind."""
    found = []
    for path in sorted(runtime_dir().glob("*.json")):
        # What is no record of ours is left alone: a name inside it must not choose which folder is removed.
        with contextlib.suppress(OSError, ValueError):
            record = read_json_file(path, EngineRecord)
            if record.id != path.stem:
                continue
            if alive(record):
                found.append(record)
            else:
                remove_engine(record.id)
    return sorted(found, key=lambda record: record.started_wall)


class EndedEngine(NamedTuple):
    """An engine that has ended and the folder of its kept files."""

    record: EngineRecord
    end: kept_files.EngineEnd
    folder: Path


def ended_engines() -> list[EndedEngine]:
    """Return the ended engines whose files are kept, the newest first."""
    found = []
    for folder in kept_files.state_dir().glob("engines/*"):
        with contextlib.suppress(OSError, ValueError):
            record = read_json_file(folder / "record.json", EngineRecord)
            if record.id != folder.name:
                continue
            gone, run_dir = not alive(record), Path(record.run_dir)
            if gone and not run_dir.exists():
                kept_files.keep(record.id, run_dir)  # The host was restarted: nothing was left to clear away.
            end = kept_files.read_end(record.id)
            # A supervisor that has noted the end and cannot be attached to any more is still clearing away.
            if end is not None and (gone or not (runtime_dir() / f"{record.id}.json").exists()):
                found.append(EndedEngine(record, end, folder))
    return sorted(found, key=lambda engine: engine.end.wall, reverse=True)


def _worth(engine: EndedEngine) -> tuple[bool, float]:
    """Return the order in which kept files go: engines that ended on request and without an incident first."""
    return not engine.end.clean or any((engine.folder / "incidents").glob("*")), engine.end.wall
