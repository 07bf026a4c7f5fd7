"""Recordings: updates of a link in a file.

A file is `MAGIC`, then frames: four bytes of length (big-endian) and that many bytes of msgpack. The first frame is
a `RecordingHeader`, every other one a `Recorded`: an update, or a detail that a fault left behind. One that was packed
by gzip is read as it is.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import io
import os
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Annotated, BinaryIO, Literal, NamedTuple

import msgspec

from ppengine.protocol.control import InspectWhat
from ppengine.protocol.frames import MAX_FRAME_BYTES, ProtocolError, decode_as, encode
from ppengine.protocol.snapshot import SCHEMA, Event, Snapshot
from ppengine.protocol.verb_table import Role

LinkStateName = Literal["connecting", "live", "stale", "lost", "new-epoch", "recorded", "ended"]
MAGIC = b"ppconsole recording 1\n"
_GZIP = b"\x1f\x8b"
_WALL_MOST = 1e11
"""Seconds: three thousand years."""
FRAMES_MOST = 1_000_000
"""Updates of one recording that are read: 27 hours of ten snapshots a second."""
UNPACKED_MOST = 1024**3
"""Bytes that are unpacked of one file."""
_PIECE = 2**20
"""Most bytes that are unpacked at once."""
_KINDS = ("link", "snapshot", "event", "detail")


class LinkState(msgspec.Struct, frozen=True, kw_only=True):
    """How fresh the picture is. `age_s`: seconds since the last snapshot, None before the first.

    `stale`: attached, but no snapshot for 2 s. `lost`: no engine answers; the link tries again in `retry_in_s`.
    `new-epoch`: the engine restarted; its requests are gone, `live` follows. `recorded`: a past that does not move
    and does not age. `ended`: the engine has ended, `text` says when and why; a link goes on looking for a successor of
    its name.
    """

    state: LinkStateName
    age_s: float | None = None
    retry_in_s: float | None = None
    text: str = ""
    role: Role | None = None
    """Rights of the console's key; null if they are as before, or if the record has none."""


Update = LinkState | Snapshot | Event


class RecordingError(Exception):
    """A file that is no recording, or one that was cut short. One line with the path and the place."""


class RecordingHeader(msgspec.Struct, kw_only=True):
    """Engine and time of a recording (`recorded_at`: Unix seconds). `schema` is that of the snapshots."""

    schema: int
    recorded_at: Annotated[float, msgspec.Meta(ge=0, le=_WALL_MOST)]
    engine: str
    name: str


class KeptDetail(msgspec.Struct, kw_only=True):
    """A detail as it was at that time; `data` depends on `what`, as on the wire."""

    what: InspectWhat
    data: msgspec.Raw


class Recorded(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One update or detail, `at_s` seconds after the recording began. Exactly one of the four is set."""

    at_s: Annotated[float, msgspec.Meta(ge=0, le=_WALL_MOST)]
    link: LinkState | None = None
    snapshot: Snapshot | None = None
    event: Event | None = None
    detail: KeptDetail | None = None

    @property
    def update(self) -> Update | None:
        """The update; None with a detail, and in a frame that a newer version wrote and we do not know."""
        return self.link or self.snapshot or self.event


class _Outline(msgspec.Struct):
    """A frame of a `Recorded` whose parts are not decoded."""

    at_s: Annotated[float, msgspec.Meta(ge=0, le=_WALL_MOST)]
    link: msgspec.Raw = msgspec.Raw()
    snapshot: msgspec.Raw = msgspec.Raw()
    event: msgspec.Raw = msgspec.Raw()
    detail: msgspec.Raw = msgspec.Raw()


class Outline(NamedTuple):
    """Time, kind and place of one frame. `kind`: link, snapshot, event, detail; empty: one of a newer version."""

    at_s: Annotated[float, msgspec.Meta(ge=0, le=_WALL_MOST)]
    kind: str
    place: int


class Recorder:
    """Writes updates to a new file; give `write` to `Source.start`. Raises RecordingError when it cannot be made.

    `packed`: by gzip; `flush` then lets a reader see every update so far.
    """

    def __init__(
        self, path: Path, *, engine: str, name: str, packed: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise RecordingError(f"{path} exists; name a new file, or remove it first") from None
        except OSError as error:
            raise RecordingError(f"{path} cannot be written: {error.strerror}") from None
        self._raw = os.fdopen(descriptor, "wb")
        self._file: BinaryIO = self._raw
        if packed:
            self._file = gzip.GzipFile(fileobj=self._raw, mode="wb", compresslevel=1)  # type: ignore[assignment]
        self._clock = clock
        self._begun = clock()
        self.updates = 0
        self.bytes = self._file.write(MAGIC)
        self._frame(RecordingHeader(schema=SCHEMA, recorded_at=time.time(), engine=engine, name=name))

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, update: Update) -> None:
        """Append one update. Raises OSError when the disk is full."""
        recorded = Recorded(at_s=self._clock() - self._begun)
        if isinstance(update, LinkState):
            recorded.link = update
        elif isinstance(update, Snapshot):
            recorded.snapshot = update
        else:
            recorded.event = update
        self._frame(recorded)
        self.updates += 1

    def write_detail(self, what: InspectWhat, detail: msgspec.Struct) -> None:
        """Append a detail as it is now. Raises OSError when the disk is full."""
        kept = KeptDetail(what=what, data=msgspec.Raw(encode(detail)))
        self._frame(Recorded(at_s=self._clock() - self._begun, detail=kept))

    def flush(self) -> None:
        """Let readers see everything so far. Raises OSError when the disk is full."""
        self._file.flush()
        self._raw.flush()

    def close(self) -> None:
        """Finish the file. Raises OSError when the disk is full; the file is closed all the same."""
        try:
            self._file.close()
        finally:
            self._raw.close()

    def _frame(self, message: msgspec.Struct) -> None:
        body = encode(message)
        self.bytes += self._file.write(len(body).to_bytes(4, "big") + body)


class Recording:
    """A recording that was opened and has a good header. Iterate `frames` for its updates with their times."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: BinaryIO = _open(path)
        except OSError as error:
            raise RecordingError(f"{path} cannot be read: {error.strerror}") from None
        try:
            self.header = self._read_header()
            self._begin = self._file.tell()
        except BaseException:
            self._file.close()
            raise

    def frames(self) -> Iterator[Recorded]:
        """Yield every frame once. Raises RecordingError if the file is cut short or malformed."""
        for number, body in enumerate(self.bodies(), 1):
            try:
                yield decode_as(Recorded, body)
            except ProtocolError as error:
                raise RecordingError(f"{self.path}: update {number} is {error}") from None

    def bodies(self) -> Iterator[bytes]:
        """Yield every frame once as bytes of msgpack. Raises RecordingError if the file is cut short."""
        with self._file:
            while (body := self._frame()) is not None:
                yield body

    def unpacked(self, most: int) -> Recording:
        """Return this recording with all of it in memory: steps back in a packed file would unpack it again.

        One that is not packed, or has more than `most` bytes, is returned as it is. A cut or damaged one ends there.
        """
        if not isinstance(self._file, gzip.GzipFile):
            return self
        parts, size = [], 0
        with contextlib.suppress(OSError, EOFError, zlib.error):
            self._file.seek(0)
            while size <= most and (part := self._file.read1(_PIECE)):
                parts.append(part)
                size += len(part)
        if size > most:
            return self
        made = copy.copy(self)
        made._file = io.BytesIO(b"".join(parts))
        return made

    @property
    def bytes_held(self) -> int:
        """Bytes in memory; 0: it is read on disk."""
        return self._file.getbuffer().nbytes if isinstance(self._file, io.BytesIO) else 0

    def outlines(self) -> Iterator[Outline]:
        """Yield where every frame is, for `read`. Raises RecordingError if the file is cut short or malformed."""
        number, place = 0, self._begin
        self._seek(place)
        while (body := self._frame()) is not None:
            number += 1
            if number > FRAMES_MOST:
                raise RecordingError(f"{self.path} has more than {FRAMES_MOST} updates, the most that are read")
            try:
                found = decode_as(_Outline, body)
            except ProtocolError as error:
                raise RecordingError(f"{self.path}: update {number} is {error}") from None
            yield Outline(found.at_s, next((name for name in _KINDS if bytes(getattr(found, name))), ""), place)
            place = self._file.tell()

    def read(self, place: int) -> Recorded:
        """Return the frame at `place`. Raises RecordingError."""
        self._seek(place)
        try:
            return decode_as(Recorded, self._frame() or b"")
        except ProtocolError as error:
            raise RecordingError(f"{self.path}: the update at byte {place} is {error}") from None

    def _seek(self, place: int) -> None:
        """Go to a byte. Raises RecordingError."""
        try:
            self._file.seek(place)
        except (OSError, EOFError, zlib.error) as error:
            raise RecordingError(f"{self.path} is damaged: {error}") from None

    def close(self) -> None:
        """Close the file; harmless when `frames` already has."""
        self._file.close()

    def _read_header(self) -> RecordingHeader:
        if self._read(len(MAGIC)) != MAGIC:
            raise RecordingError(f"{self.path} is not a recording of ppconsole; `ppconsole record FILE` makes one")
        body = self._frame()
        if body is None:
            raise RecordingError(f"{self.path} is cut short: it ends before its header")
        try:
            header = decode_as(RecordingHeader, body)
        except ProtocolError as error:
            raise RecordingError(f"{self.path}: its header is {error}") from None
        if header.schema != SCHEMA:
            text = f"{self.path} has snapshots of schema {header.schema}; this version reads schema {SCHEMA}"
            raise RecordingError(text)
        return header

    def _read(self, size: int) -> bytes:
        """Return up to `size` bytes; a packed file that is cut short or damaged ends there."""
        try:
            return self._file.read(size)
        except EOFError:
            raise RecordingError(f"{self.path} is cut short: it ends inside its packed data") from None
        except (OSError, zlib.error) as error:
            raise RecordingError(f"{self.path} is damaged: {error}") from None

    def _frame(self) -> bytes | None:
        """Return the next body; None at a clean end."""
        place = self._file.tell()
        if place > UNPACKED_MOST and isinstance(self._file, gzip.GzipFile):
            raise RecordingError(f"{self.path} unpacks to more than {UNPACKED_MOST} bytes; unpack it by gunzip first")
        prefix = self._read(4)
        if not prefix:
            return None
        length = int.from_bytes(prefix, "big")
        if len(prefix) == 4 and length > MAX_FRAME_BYTES:
            raise RecordingError(f"{self.path} is damaged: a frame of {length} bytes at byte {place}")
        body = self._read(length) if len(prefix) == 4 else b""
        if len(prefix) < 4 or len(body) < length:
            raise RecordingError(f"{self.path} is cut short: it ends inside the frame at byte {place}")
        return body


def _open(path: Path) -> BinaryIO:
    """Open a recording, packed or not. Raises OSError."""
    file = path.open("rb")
    packed = file.read(len(_GZIP)) == _GZIP
    file.seek(0)
    if not packed:
        return file
    file.close()
    return gzip.open(path, "rb")  # type: ignore[return-value]
