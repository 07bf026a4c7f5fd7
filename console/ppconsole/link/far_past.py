"""The past of an engine on another host: what its gateway keeps, and copies of it for the readers of local files.

$XDG_STATE_HOME/ppconsole/remote/<key>/<id>/     0700; <key> distinguishes hosts by the key of their engines
    history/<milliseconds>.rec                   0600, as in the kept files of the engine
    incidents/<number>/
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
from ppengine.protocol.error_text import shown
from ppengine.protocol.incidents import FILE
from ppengine.protocol.kept_files import state_dir
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

from ppconsole.link.engine_link import EngineLink
from ppconsole.link.incident_source import Listed, is_near
from ppconsole.link.source import LinkLost, QueryFailed

FILE_MOST, ALL_MOST = 64 * 2**20, 256 * 2**20
"""Most bytes of one file, and of all files that are copied at once."""
FILES_MOST = 10_000
COPIES_KEPT = 5
"""Engines whose copies are kept, those that were used last."""
AT_ONCE = 3
"""Parts that are requested before the first has come: at 100 ms, one at a time would leave a link idle."""
_TRIES = 3
_PAUSE_S = 0.2
_BACK_S = 10.0
Progress = Callable[[int, int], None]
"""Called with the bytes so far, and those of all files."""


class Copied(NamedTuple):
    """The result of copying. `gone`: files that were removed meanwhile; `large`: those that do not fit."""

    folder: Path
    gone: int = 0
    large: int = 0

    @property
    def missing(self) -> str:
        """The missing files in words; empty: none are."""
        parts = [f"{self.gone} had gone meanwhile"] if self.gone else []
        parts += [f"{self.large} would exceed {ALL_MOST >> 20} MiB"] if self.large else []
        return f"recordings that are missing: {', '.join(parts)}" if parts else ""


class FarPast:
    """Lists and copies files by an attached link. A file is copied whole or not at all; one that is here is not again.

    Raises LinkLost, QueryFailed, and OSError where a copy cannot be written.
    """

    def __init__(self, link: EngineLink) -> None:
        self._link = link

    async def incidents(self) -> list[Listed]:
        """Return the incidents of the engine and of earlier ones of its name, the oldest first."""
        own = await self._list("")
        found = []
        for listed in [*[await self._list(engine) for engine in own.earlier], own]:
            record = msgspec.structs.replace(self._link.record, id=listed.engine, name=own.name)
            for info in listed.incidents:
                number = str(info.number) if listed is own else f"{listed.engine}/{info.number}"
                folder = self._folder(listed.engine) / "incidents" / str(info.number)
                found.append(Listed(number, record, info, folder))
        return sorted(found, key=lambda one: one.info.wall)

    async def copy_history(self, progress: Progress) -> Copied:
        """Copy the last hour; copies of minutes that its host has no more are removed."""
        listed = await self._list("")
        wanted = [file for file in listed.files if file.name.startswith("history/")]
        names = {Path(file.name).name for file in wanted}
        for path in (self._folder(listed.engine) / "history").glob("*.rec"):
            if path.name not in names:
                path.unlink(missing_ok=True)
        return await self._copy(listed.engine, wanted, progress)

    async def copy_incident(self, one: Listed, progress: Progress, *, minutes: bool = True) -> Copied:
        """Copy the record of an incident and, with `minutes`, the recordings around it."""
        engine = one.engine.id
        listed = await self._list(engine)
        own = f"incidents/{one.info.number}/"
        inside = [file for file in listed.files if file.name.startswith(own) and (minutes or file.name.endswith(FILE))]
        # A minute that is kept with the incident is, for an hour, in the history, too.
        names = {Path(file.name).name for file in inside}
        history = [path for file in listed.files if (path := Path(file.name)).parent.name == "history"]
        near = {str(path) for path in history if minutes and path.name not in names and is_near(one.info, path.stem)}
        wanted = [*inside, *(file for file in listed.files if file.name in near)]
        return await self._copy(engine, wanted, progress)

    async def _list(self, engine: str) -> PastListed:
        answer = await self._ask(ListPast(nonce=0, engine=engine))
        if not isinstance(answer, PastListed) or engine not in ("", answer.engine):
            raise QueryFailed("PROTOCOL", "the engine answered with another list than the one that was requested")
        # These become names of files here.
        wrong = [name for name in [answer.engine, *answer.earlier] if not is_engine_id(name)]
        wrong += [file.name for file in answer.files if not is_past_file(file.name) or file.size < 0]
        wrong += [str(info.number) for info in answer.incidents if info.number < 0]
        wrong += [] if len(answer.files) <= FILES_MOST else [f"{len(answer.files)} files"]
        if wrong:
            raise QueryFailed("PROTOCOL", f"the engine lists {shown(wrong[0])}, which is no file of the past")
        return answer

    async def _copy(self, engine: str, files: Sequence[PastFile], progress: Progress) -> Copied:
        folder = self._folder(engine)
        _make(folder)
        _prune(folder)
        # The newest first: they are what matters if the link breaks, or if not all fit.
        newest = sorted(files, key=lambda file: (file.name.endswith(".json"), Path(file.name).name), reverse=True)
        chosen, total = [], 0
        for file in newest:
            if file.size <= FILE_MOST and total + file.size <= ALL_MOST:
                chosen.append(file)
                total += file.size
        if large := next((file for file in newest if file.name.endswith(".json") and file not in chosen), None):
            text = f"{large.name} has {large.size} bytes, more than the {FILE_MOST} that are copied; see it on its host"
            raise QueryFailed("DOES_NOT_FIT", text)
        done = gone = 0
        for file in chosen:
            _make(folder / Path(file.name).parent)
            try:
                await self._copy_one(engine, file, partial(_add, progress, done, total))
            except QueryFailed as error:
                if error.code != "GONE" or file.name.endswith(".json"):
                    raise
                gone += 1
            done += file.size
            progress(done, total)
        return Copied(folder, gone, len(files) - len(chosen))

    async def _copy_one(self, engine: str, file: PastFile, progress: Callable[[int], None]) -> None:
        """Copy a file unless it is here; of a recording that has grown, the rest."""
        path = self._folder(engine) / file.name
        grows = path.suffix == ".rec"
        here = path.stat().st_size if grows and path.is_file() else 0
        if grows and here >= file.size:
            return
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            size = file.size
            for attempt in range(1, _TRIES + 1):
                with os.fdopen(os.open(draft, flags, 0o600), "wb") as out:
                    if here:
                        out.write(path.read_bytes())
                    changed = await self._read(engine, file.name, here, size, out, progress)
                if changed is None:
                    draft.replace(path)
                    return
                here, size = 0, changed
                if attempt == _TRIES or size > FILE_MOST:
                    raise QueryFailed("CONFLICT", f"{file.name} changes while it is read; try again in a moment")
        finally:
            draft.unlink(missing_ok=True)

    async def _read(
        self, engine: str, name: str, begin: int, end: int, out: BinaryIO, progress: Callable[[int], None]
    ) -> int | None:
        """Write the bytes from `begin` to `end`; return the new size of a file that was replaced meanwhile, else None.

        Parts are requested ahead, and written in order.
        """
        offsets, open_parts, mark = deque(range(begin, end, PART_BYTES)), deque[asyncio.Task[PastPart]](), None
        try:
            while offsets or open_parts:
                while offsets and len(open_parts) < AT_ONCE:
                    offset = offsets.popleft()
                    question = ReadPast(
                        nonce=0, engine=engine, file=name, offset=offset, size=min(PART_BYTES, end - offset)
                    )
                    open_parts.append(asyncio.create_task(self._part(question)))
                part = await open_parts.popleft()
                mark = part.mark if mark is None else mark
                wanted = min(PART_BYTES, end - part.offset)
                if part.mark != mark or len(part.data) != wanted:
                    return part.size
                out.write(part.data)
                progress(part.offset + wanted)
            return None
        finally:
            for task in open_parts:
                task.cancel()
            await asyncio.gather(*open_parts, return_exceptions=True)

    async def _part(self, question: ReadPast) -> PastPart:
        answer = await self._ask(question)
        if not isinstance(answer, PastPart) or answer.offset != question.offset:
            raise QueryFailed("PROTOCOL", "the engine answered with another part than the one that was requested")
        return answer

    async def _ask(self, question: ListPast | ReadPast) -> PastListed | PastPart:
        """Ask; at the limit of questions, again until there is room; after a break, again on the next link."""
        breaks = 0
        while True:
            try:
                return await self._link.ask_past(msgspec.structs.replace(question))
            except QueryFailed as error:
                if error.code != "RATE_LIMITED":
                    raise
                await asyncio.sleep(_PAUSE_S)
            except LinkLost:
                breaks += 1
                if breaks == _TRIES:
                    raise
                await self._link.attached(_BACK_S)

    def _folder(self, engine: str) -> Path:
        """Return the folder of the copies of an engine: two hosts may have engines of one id."""
        host = hashlib.sha256(self._link.record.server_key.encode()).hexdigest()[:12]
        return _root() / host / engine


def _add(progress: Progress, before: int, total: int, size: int) -> None:
    progress(before + size, total)


def _root() -> Path:
    return state_dir() / "remote"


def _make(folder: Path) -> None:
    """Make a folder of copies and those above it, 0700."""
    _root().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in [*reversed([one for one in folder.parents if _root() in (one, *one.parents)]), folder]:
        path.mkdir(mode=0o700, exist_ok=True)


def _prune(used: Path) -> None:
    """Remove the copies of engines that were not used for longest."""
    os.utime(used)
    with contextlib.suppress(OSError):
        others = [path for path in _root().glob("*/*") if path != used]
        for path in sorted(others, key=lambda each: each.stat().st_mtime)[: max(0, len(others) + 1 - COPIES_KEPT)]:
            shutil.rmtree(path, ignore_errors=True)
