"""An export: one zip of JSON files with the present state of an engine, to send or to read later.

A zip, because every system opens one, its parts can be read with any tool, and the standard library checks its sums.
Without `with_text` there is neither prompt nor output in it: no token, no log line, no detail of a request.
"""

from __future__ import annotations

import os
import re
import struct
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from ppengine.protocol.control import InspectWhat
from ppengine.protocol.error_text import one_line, shown
from ppengine.protocol.inspection import AboutDetail, AuditDetail, FaultDetail, OpRecord, RingsDetail
from ppengine.protocol.json_files import BYTES_MOST, decode_json
from ppengine.protocol.recording import LinkState, Update
from ppengine.protocol.snapshot import Event, Snapshot

from ppconsole.link.past import PastSource
from ppconsole.link.source import DETAILS, Detail, LinkLost, QueryFailed, Source
from ppconsole.model.safe import clean

FORMAT = "ppconsole export 1"
STEPS = 64
_AUDIT_LINES, _LOG_LINES, _REQUESTS_MOST = 10_000, 2000, 200
_PARTS: tuple[InspectWhat, ...] = ("about", "rings", "fault", "findings", "audit", "stacks")
"""Stacks last: taking them stops a stage for a moment, and the rings should not show that."""
_FIELDS = OpRecord.__struct_fields__
_TOKEN = re.compile(r"\b(token|gives|chooses|two:|and) \d+")
_README = """This is a ppconsole export: the state of an engine, its last operations and its commands. Read it with

    ppconsole replay FILE.zip

or with any program that opens a zip:

    manifest.json   the parts in it, and the missing parts with the reason
    snapshot.json   the output of `ppconsole status --json`
    rings.json      the last operations of every thread, in monotonic nanoseconds; done_ns is missing while one is open
    fault.json      the same at the newest fault, with its verdict
    stacks.json     call stacks
    events.jsonl    events
    audit.jsonl     commands
    about.json      versions and profile
"""


class ExportError(Exception):
    """A file that cannot be written, or that is no export. One line with the path."""


async def gather(
    source: Source, snapshot: Snapshot, events: Sequence[Event], *, with_text: bool = False, program: str = ""
) -> dict[str, bytes]:
    """Return the files of an export by name. The manifest names missing parts, with the reason."""
    details: dict[InspectWhat, Detail] = {}
    missing: dict[str, str] = {}
    parts: tuple[InspectWhat, ...] = (*_PARTS, "logs") if with_text else _PARTS
    for what in parts:
        lines = {"rings": STEPS, "audit": _AUDIT_LINES, "logs": _LOG_LINES}.get(what, 200)
        try:
            details[what] = await source.inspect(what, lines=lines)
        except (LinkLost, QueryFailed) as error:
            missing[what] = str(error)
    files: dict[str, bytes] = {}
    hide: Callable[[Any], Any] = _as_it_is if with_text else _without_tokens
    files["snapshot.json"] = _json(hide(msgspec.to_builtins(snapshot)))
    files["events.jsonl"] = _lines(hide([msgspec.to_builtins(event) for event in events]))
    for what, detail in details.items():
        if isinstance(detail, AuditDetail):
            files["audit.jsonl"] = "".join(f"{line}\n" for line in detail.lines).encode()
        else:
            files[f"{what}.json"] = _json(hide(_plain(detail)))
    if with_text:
        files["requests.jsonl"] = await _requests(source, snapshot, missing)
    about = details.get("about")
    manifest = {
        "format": FORMAT,
        "made_at": time.time(),
        "made_by": program,
        "engine": snapshot.engine.id,
        "name": snapshot.engine.name,
        "epoch": snapshot.engine.epoch,
        "with_text": with_text,
        "versions": about.versions if isinstance(about, AboutDetail) else {},
        "files": sorted(files),
        "missing": missing,
    }
    return {"README.txt": _README.encode(), "manifest.json": _json(manifest), **files}


async def _requests(source: Source, snapshot: Snapshot, missing: dict[str, str]) -> bytes:
    found = []
    for request in snapshot.requests[:_REQUESTS_MOST]:
        try:
            found.append(msgspec.to_builtins(await source.inspect("request", request=request.id)))
        except (LinkLost, QueryFailed) as error:
            missing[f"request {request.id}"] = str(error)
    return _lines(found)


async def export_into(folder: Path, source: Source, snapshot: Snapshot, events: Sequence[Event]) -> tuple[Path, int]:
    """Write an export into `folder`, named by engine and time; return path and size in bytes. Raises ExportError."""
    files = await gather(source, snapshot, events, program="ppconsole")
    name = "".join(letter if letter.isalnum() else "-" for letter in clean(snapshot.engine.name))[:40]
    path = folder / f"ppconsole-{name}-{time.strftime('%Y%m%d-%H%M%S')}.zip"
    return path, write(path, files)


def write(path: Path, files: Mapping[str, bytes], *, force: bool = False) -> int:
    """Write an export that only its owner can read; return its bytes. Raises ExportError, and then leaves no half."""
    if path.exists() and not force:
        raise ExportError(f"{path} exists; name a new file, or say --force")
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise ExportError(f"{path} cannot be written: {error.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                for part, data in files.items():
                    archive.writestr(part, data)
            size = file.tell()
        if force:
            Path(name).replace(path)
        else:
            os.link(name, path)  # fails where somebody has made that file meanwhile
            Path(name).unlink()
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise ExportError(f"{path} cannot be written: {error.strerror}") from None
    return size


class Manifest(msgspec.Struct):
    """The parts of a manifest that are read."""

    format: str = ""
    name: str = ""
    engine: str = ""


class Export:
    """An export that was read. Raises ExportError for anything else."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                self._files = _read_parts(archive)
        except (OSError, zipfile.BadZipFile, *_DAMAGES) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise ExportError(f"{path} cannot be read as an export: {one_line(why)}") from None
        self.manifest: Manifest = self._decode("manifest.json", Manifest)
        if self.manifest.format != FORMAT:
            raise ExportError(f"{path} is no export of ppconsole: its format is {shown(self.manifest.format)}")
        self.snapshot: Snapshot = self._decode("snapshot.json", Snapshot)
        self.events: list[Event] = [
            self._convert("events.jsonl", line, Event) for line in self._files.get("events.jsonl", b"").splitlines()
        ]

    def detail(self, what: InspectWhat) -> Detail | None:
        """Return a detail that is in it."""
        if what == "audit" and "audit.jsonl" in self._files:
            return AuditDetail(lines=self._files["audit.jsonl"].decode("utf-8", "replace").splitlines())
        if f"{what}.json" not in self._files:
            return None
        value = self._convert(f"{what}.json", self._files[f"{what}.json"], Any)
        try:
            detail: Detail = msgspec.convert(_packed(value, what), DETAILS[what])
        except (msgspec.ValidationError, TypeError, KeyError, AttributeError) as error:
            raise ExportError(f"{self.path}: {what}.json: {error}") from None
        return detail

    def _decode(self, name: str, kind: Any) -> Any:
        if name not in self._files:
            raise ExportError(f"{self.path} is no export of ppconsole: it has no {name}")
        return self._convert(name, self._files[name], kind)

    def _convert(self, name: str, data: bytes, kind: Any) -> Any:
        try:
            return decode_json(data, kind)
        except ValueError as error:
            raise ExportError(f"{self.path}: {name}: {error}") from None


_READ = ("manifest.json", "snapshot.json", "events.jsonl", "audit.jsonl", *(f"{what}.json" for what in DETAILS))
"""Members that are read; the others are for people."""
_ALL_MOST = 4 * BYTES_MOST
_DAMAGES = (zlib.error, EOFError, RuntimeError, NotImplementedError, ValueError, struct.error)
"""Errors of `zipfile` for damaged members, beside its own."""


def _read_parts(archive: zipfile.ZipFile) -> dict[str, bytes]:
    """Return the members that are read. Raises ValueError for one that is too large or packed in another way."""
    parts: dict[str, bytes] = {}
    for info in archive.infolist():
        if info.filename not in _READ:
            continue
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{info.filename} is packed by method {info.compress_type}; an export is deflated")
        if info.file_size > BYTES_MOST or sum(map(len, parts.values())) + info.file_size > _ALL_MOST:
            raise ValueError(
                f"{info.filename} has {info.file_size} bytes; at most {BYTES_MOST} are read, and {_ALL_MOST} of all"
            )
        parts[info.filename] = archive.read(info)
    return parts


# --- JSON ---------------------------------------------------------------------------------------------------


def _json(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1)


def _lines(values: Sequence[Any]) -> bytes:
    return b"".join(msgspec.json.encode(value) + b"\n" for value in values)


def _plain(detail: Detail) -> Any:
    """Return a detail as plain data, its ring records with the names of their fields."""
    value = msgspec.to_builtins(detail)
    rings = value if isinstance(detail, RingsDetail) else value["rings"] if isinstance(detail, FaultDetail) else None
    _each_thread(rings, lambda record: dict(zip(_FIELDS, record, strict=True)))
    return value


def _packed(value: Any, what: InspectWhat) -> Any:
    """Return plain data as the wire has it: the opposite of `_plain`."""
    rings = value if what == "rings" else value.get("rings") if what == "fault" else None
    _each_thread(rings, lambda record: [record.get(name) for name in _FIELDS])
    return value


def _each_thread(rings: Any, change: Callable[[Any], Any]) -> None:
    for stage in (rings or {}).get("stages", []):
        for thread in stage["threads"]:
            thread["records"] = [change(record) for record in thread["records"]]


def _as_it_is(value: Any) -> Any:
    return value


def _without_tokens(value: Any) -> Any:
    """Return plain data without the token ids that a comparison with the reference names."""
    if isinstance(value, dict):
        return {key: _without_tokens(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_tokens(each) for each in value]
    if isinstance(value, str) and ("the reference" in value or "one stage" in value or "its best two" in value):
        return _TOKEN.sub(r"\1 (left out)", value)
    return value


class ExportSource(PastSource):
    """A `Source` on an export: one picture, which does not move, and the details that are in the file."""

    kind = "export"

    def __init__(self, path: Path) -> None:
        """Read the file. Raises ExportError."""
        self.export = Export(path)

    def kept(self, what: InspectWhat) -> Detail | None:
        """Return a detail that is in the file. Raises QueryFailed for one that is damaged."""
        try:
            return self.export.detail(what)
        except ExportError as error:
            raise QueryFailed("FAILED", str(error)) from None

    async def start(self, on_update: Callable[[Update], None]) -> None:
        """Deliver everything at once."""
        on_update(LinkState(state="recorded", text="an export"))
        on_update(self.export.snapshot)
        for event in self.export.events:
            on_update(event)

    async def close(self) -> None:
        """Nothing is open."""
