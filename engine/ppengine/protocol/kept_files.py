"""Files of an engine that outlive it: its history and incidents, and once it has ended, its logs and its end.

$XDG_STATE_HOME/ppconsole/engines/<id>/    (or ~/.local/state/... where the variable is not set), 0700
    record.json                            the EngineRecord of discovery
    history/<milliseconds>.rec             the last hour, one recording a minute
    incidents/<number>/                    incident.json and the recordings around it
    *.log, audit.jsonl, engine.json        copied from the run folder when the engine has ended
    end.json                               EngineEnd
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgspec

from ppengine.protocol.json_files import read_json_file

LOG_BYTES_MOST = 4 * 1024 * 1024
"""Bytes kept of each file of a run folder, from its end."""
_KEPT = ("*.log", "*.stack", "audit.jsonl", "engine.json", "stacks.txt")


class EngineEnd(msgspec.Struct, kw_only=True):
    """The end of an engine. `wall`: Unix seconds; of an end that no process noted, the last sign of life."""

    wall: float
    reason: str
    clean: bool
    """The engine was stopped on request."""
    code: int | None = None
    """Exit code of its supervisor."""
    by: str = ""
    """Operator who stopped it; empty: none did, or it is not known."""
    noted: bool = True
    """A process of the engine wrote this; otherwise all ended at once."""


def state_dir() -> Path:
    """Return the user's folder of files that outlive a process; it may be missing."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "ppconsole"


def engine_folder(engine_id: str) -> Path:
    """Return the folder of one engine's kept files."""
    return state_dir() / "engines" / engine_id


def write_file(path: Path, data: bytes) -> None:
    """Write a 0600 file at once or not at all. Raises OSError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def write_end(engine_id: str, end: EngineEnd) -> None:
    """Note the end of an engine. The first note counts, but a failure replaces an end on request.

    The one with an operator counts of two ends on request: gateway and supervisor note them at once.
    """
    folder, before = engine_folder(engine_id), read_end(engine_id)
    with contextlib.suppress(OSError):
        better = before is None or (before.clean and (not end.clean or (end.by != "" and not before.by)))
        if folder.is_dir() and better:
            write_file(folder / "end.json", msgspec.json.encode(end))


def read_end(engine_id: str) -> EngineEnd | None:
    """Return the noted end; None if there is none, or if its file is damaged."""
    try:
        return read_json_file(engine_folder(engine_id) / "end.json", EngineEnd)
    except (OSError, ValueError):
        return None


def keep(engine_id: str, run_dir: Path) -> None:
    """Copy logs and audit log of an ended engine from its run folder; note its end if no process has.

    An engine without a folder of kept files keeps none. A file that cannot be copied is left out: clearing away
    what an engine left must not fail.
    """
    folder = engine_folder(engine_id)
    if not (folder / "record.json").is_file():
        return
    seen = (folder / "record.json").stat().st_mtime
    for pattern in _KEPT:
        for path in sorted(run_dir.glob(pattern)):
            with contextlib.suppress(OSError):
                seen = max(seen, path.stat().st_mtime)
                write_file(folder / path.name, _tail(path))
    for path in (folder / "history").glob("*.rec"):
        with contextlib.suppress(OSError):
            seen = max(seen, path.stat().st_mtime)
    if read_end(engine_id) is None:
        write_end(engine_id, EngineEnd(wall=seen, reason=_unnoted(seen), clean=False, noted=False))


def _tail(path: Path) -> bytes:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LOG_BYTES_MOST))
        return file.read(LOG_BYTES_MOST)


def _unnoted(seen: float) -> str:
    """Return the reason of an end that no process noted."""
    with contextlib.suppress(OSError, ValueError):
        booted = time.time() - float(Path("/proc/uptime").read_text().split()[0])
        if booted > seen:
            return "the host was restarted"
    return "all its processes ended at once and noted no reason: SIGKILL, or the container stopped"
