"""How an engine on this host is found: one 0600 JSON record in a 0700 folder of the user.

$XDG_RUNTIME_DIR/ppconsole/            (or /tmp/ppconsole-<uid>/ where the variable is not set)
    <id>.json                          EngineRecord
    <id>/                              sockets, logs, audit log: the run folder
/dev/shm/ppconsole-<uid>-<id>/         recorder rings
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from pathlib import Path

import msgspec


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
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])


def write_record(record: EngineRecord) -> None:
    """Publish `record` atomically with mode 0600."""
    path = runtime_dir() / f"{record.id}.json"
    draft = path.with_suffix(".tmp")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(record))
    draft.replace(path)


def remove_engine(engine_id: str) -> None:
    """Remove the record, the run folder and the rings of one engine; missing ones are fine."""
    folder = runtime_dir()
    (folder / f"{engine_id}.json").unlink(missing_ok=True)
    shutil.rmtree(folder / engine_id, ignore_errors=True)
    shutil.rmtree(ring_dir(engine_id), ignore_errors=True)


def list_engines() -> list[EngineRecord]:
    """Return the live engines of this user, oldest first, and remove what dead ones left behind."""
    found = []
    for path in sorted(runtime_dir().glob("*.json")):
        # What is no record of ours is left alone: a name inside it must not choose which folder is removed.
        with contextlib.suppress(OSError, msgspec.MsgspecError, ValueError, RecursionError):
            record = msgspec.json.decode(path.read_bytes(), type=EngineRecord)
            if record.id != path.stem:
                continue
            if process_start(record.pid) == record.pid_start:
                found.append(record)
            else:
                remove_engine(record.id)
    return sorted(found, key=lambda record: record.started_wall)
