"""Hands out the files of the past: a list of them, and parts of each, from this engine and earlier ones of its name."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ppengine.protocol.control import ErrorCode, Failed
from ppengine.protocol.discovery import EngineRecord
from ppengine.protocol.error_text import shown
from ppengine.protocol.incidents import FILE, incident_folders, read_info
from ppengine.protocol.json_files import read_json_file
from ppengine.protocol.past_files import (
    PART_BYTES,
    ListPast,
    PastFile,
    PastListed,
    PastPart,
    ReadPast,
    is_engine_id,
    is_past_file,
)
from ppengine.protocol.snapshot import IncidentInfo

LIST_BYTES = 512 * 1024
"""Bytes that a list counts for at the limit of a key: it looks at some hundred files."""
_PLACES = ("history/*", "incidents/*/*")


class PastDesk:
    """Reads below the folders of kept files. It opens no link, no file of another name and no other engine's folder."""

    def __init__(self, folder: Path, engine: str, name: str) -> None:
        """`folder`: of this engine's kept files; those of other engines lie beside it."""
        self._folder, self._engine, self._name = folder, engine, name
        self._infos: dict[Path, tuple[int, IncidentInfo]] = {}
        """Summaries by the time of their file: a record is large, and does not change once it is over."""

    def answer(self, question: ListPast | ReadPast) -> PastListed | PastPart | Failed:
        """Return the list, or a part of a file."""
        engine = question.engine or self._engine
        if engine != self._engine and engine not in self._earlier():
            text = f"no files of an engine {shown(engine)} with the name {self._name} are kept here"
            return _failed(question.nonce, "NOT_FOUND", text)
        try:
            if isinstance(question, ListPast):
                return self._list(question.nonce, engine)
            return self._read(question, self._folder.parent / engine)
        except FileNotFoundError:
            return _failed(question.nonce, "GONE", f"{_shown(question)} is gone: newer ones have taken its place")
        except OSError as error:
            return _failed(question.nonce, "FAILED", f"{_shown(question)} cannot be read: {error.strerror}")

    def _list(self, nonce: int, engine: str) -> PastListed:
        folder = self._folder.parent / engine
        earlier = self._earlier() if engine == self._engine else []
        files = sorted(_files(folder), key=lambda one: one.name)
        return PastListed(
            nonce=nonce, engine=engine, name=self._name, files=files, incidents=self._incidents(folder), earlier=earlier
        )

    def _incidents(self, folder: Path) -> list[IncidentInfo]:
        found = []
        for path in incident_folders(folder):
            # A file that cannot be read is left out, as in a list on this host.
            with contextlib.suppress(OSError, ValueError):
                changed, known = (path / FILE).stat().st_mtime_ns, self._infos.get(path)
                if known is None or known[0] != changed:
                    known = self._infos[path] = changed, read_info(path)
                found.append(known[1])
        for path in [path for path in self._infos if path.parent.parent == folder and not path.is_dir()]:
            del self._infos[path]
        return found

    def _read(self, question: ReadPast, folder: Path) -> PastPart | Failed:
        if not is_past_file(question.file):
            text = f"{_shown(question)} is no file of the past; it must be a recording or an incident"
            return _failed(question.nonce, "NOT_FOUND", text)
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with os.fdopen(os.open(folder / question.file, flags), "rb", buffering=0) as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode):
                return _failed(question.nonce, "NOT_FOUND", f"{_shown(question)} is no regular file")
            if not 0 <= question.offset <= info.st_size or not 0 < question.size <= PART_BYTES:
                text = (
                    f"{question.size} bytes from {question.offset} on; they must be 1 to {PART_BYTES} from 0 to"
                    f" {info.st_size} on"
                )
                return _failed(question.nonce, "INVALID", text)
            data = os.pread(file.fileno(), question.size, question.offset)
        # A recording grows at its end; an incident is written again as another file.
        mark = info.st_ino if question.file.endswith(".rec") else info.st_mtime_ns
        return PastPart(nonce=question.nonce, offset=question.offset, data=data, size=info.st_size, mark=mark)

    def _earlier(self) -> list[str]:
        """Return the ids of the other engines of this name whose files are kept, the oldest first."""
        found = []
        for path in self._folder.parent.glob("*/record.json"):
            with contextlib.suppress(OSError, ValueError):
                record = read_json_file(path, EngineRecord)
                own = record.id == path.parent.name and is_engine_id(record.id)
                if own and record.name == self._name and record.id != self._engine:
                    found.append((record.started_wall, record.id))
        return [identity for _, identity in sorted(found)]


def _files(folder: Path) -> Iterator[PastFile]:
    for place in _PLACES:
        for path in folder.glob(place):
            name = str(path.relative_to(folder))
            with contextlib.suppress(OSError):
                info = path.lstat()
                if is_past_file(name) and stat.S_ISREG(info.st_mode):
                    yield PastFile(name, info.st_size)


def _shown(question: ListPast | ReadPast) -> str:
    return shown(question.file) if isinstance(question, ReadPast) else "the list of files"


def _failed(nonce: int, code: ErrorCode, text: str) -> Failed:
    return Failed(nonce=nonce, code=code, text=text)
