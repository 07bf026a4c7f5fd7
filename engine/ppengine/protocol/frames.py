"""Framing: one message is exactly two frames, `[header][body]`; the state socket puts the topic in front.

The header is decoded first and alone. Decoding any input raises `ProtocolError` and nothing else:
msgspec lets `RecursionError` and `UnicodeDecodeError` through on hostile input, so both are caught here.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from ppengine.protocol.error_text import one_line
from ppengine.protocol.token_ids import from_wire, to_wire

PROTOCOL_MIN = 1
PROTOCOL = 2
"""2: leases and overrides. A console of 1 gets no error code that it does not know."""
READABLE_FROM = 1
"""Least version that reads the messages of this one. It changes if a field goes or gets another type."""
MAX_FRAME_BYTES = 16 * 1024 * 1024
"""Cap on one frame (ZMQ_MAXMSGSIZE); the frame count is checked by `split`."""

TOPIC_SNAPSHOT = b"snap"
TOPIC_SNAPSHOT_SLOW = b"snap1"
TOPIC_SNAPSHOT_PACKED = b"packed"
"""The slow topic, compressed to about a tenth, for consoles on other hosts; since version 2."""
TOPIC_EVENT = b"event"
TOPIC_HEARTBEAT = b"hugz"

_PACK_LEVEL = 1
"""Fastest: the next ones take twice the time for a tenth less."""
T = TypeVar("T")


class ProtocolError(Exception):
    """A peer sent what this protocol does not allow. The text is safe to log."""


class NotUtf8(ValueError):
    """A text of ours cannot be sent, for it is not UTF-8; the error says which text, and where in it."""


class Header(msgspec.Struct, array_like=True, frozen=True):
    """Header of every message. Append-only: new fields go last and have defaults.

    `proto` is the least version that reads the message.
    `seq` counts per topic from 1 within an epoch; 0 on messages that are not sequenced.
    `mono_ns` compares only with clocks of the same host; `wall` is Unix seconds.
    """

    proto: int
    engine: str
    epoch: str
    topic: str
    seq: int
    mono_ns: int
    wall: float


_encoder = msgspec.msgpack.Encoder(enc_hook=to_wire)
_header_decoder = msgspec.msgpack.Decoder(Header)


def header(engine: str, epoch: str, topic: str = "", seq: int = 0) -> Header:
    """Return a header stamped with this process's clocks."""
    return Header(READABLE_FROM, engine, epoch, topic, seq, time.monotonic_ns(), time.time())


def encode(message: msgspec.Struct) -> bytes:
    """Return the msgpack form of one message. Raises NotUtf8 for a text that no peer could read."""
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:
        # msgspec does not say which text it was. Rare: bytes that Python took from a shell, or halves of characters.
        _check_all(type(message).__name__, message)
        raise


def check_utf8(what: str, text: str) -> None:
    """Raise NotUtf8 unless `text` can be sent; `what` names it in the error."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        # Python reads a byte that is not UTF-8 from the command line as U+DC00 plus the byte.
        wrong = f"byte 0x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"U+{code:04X}, half a character"
        raise NotUtf8(f"{what} is not UTF-8 at offset {error.start}: {wrong}") from None


def _check_all(what: str, value: object) -> None:
    """Call `check_utf8` for each text in `value`, named by its field, or by its place in the list."""
    parts: Iterable[tuple[str, object]] = ()
    if isinstance(value, str):
        check_utf8(what, value)
    elif isinstance(value, msgspec.Struct):
        parts = ((name, getattr(value, name)) for name in value.__struct_fields__)
    elif isinstance(value, dict):
        parts = ((f"{what}[{key!r}]", inner) for key, inner in value.items())
    elif isinstance(value, list | tuple):
        parts = ((f"{what}[{index}]", inner) for index, inner in enumerate(value))
    for name, inner in parts:
        _check_all(name, inner)


def _said(error: Exception) -> str:
    """Return a decoder's error as one printable line: it may quote a name that the peer chose."""
    return one_line(f"{type(error).__name__}: {error}")


class Codec:
    """Decoder of one union of message types; the only door by which bytes become messages."""

    def __init__(self, union: object) -> None:
        self._decoder: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(union, dec_hook=from_wire)

    def decode(self, body: bytes | memoryview) -> object:
        """Return the message in `body`. Raises ProtocolError for anything else."""
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, ValueError) as error:
            raise ProtocolError(f"not a message of this protocol: {_said(error)}") from None


def decode_as(kind: type[T], body: bytes | memoryview) -> T:
    """Return `body` decoded as `kind`. Raises ProtocolError."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise ProtocolError(f"not a {kind.__name__}: {_said(error)}") from None


def decode_header(frame: bytes | memoryview) -> Header:
    """Return the header in `frame`. Raises ProtocolError, also for a protocol version we do not speak."""
    try:
        head = _header_decoder.decode(frame)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise ProtocolError(f"not a header: {_said(error)}") from None
    if not PROTOCOL_MIN <= head.proto <= PROTOCOL:
        raise ProtocolError(f"protocol {head.proto} is not spoken here: {PROTOCOL_MIN} to {PROTOCOL} are")
    return head


def pack(body: bytes) -> bytes:
    """Return the body of a message on the packed topic."""
    return zlib.compress(body, _PACK_LEVEL)


def unpack(packed: bytes) -> bytes:
    """Return the body in a message of the packed topic. Raises ProtocolError, also for one above the cap of a frame."""
    opened = zlib.decompressobj()
    try:
        body = opened.decompress(packed, MAX_FRAME_BYTES)
    except zlib.error as error:
        raise ProtocolError(f"not a packed message: {_said(error)}") from None
    if not opened.eof:
        raise ProtocolError(f"a packed message is cut off, or has more than {MAX_FRAME_BYTES} bytes")
    return body


def split(frames: Sequence[bytes], count: int = 2) -> Sequence[bytes]:
    """Return `frames` if there are exactly `count`, none longer than the cap. Raises ProtocolError."""
    if len(frames) != count:
        raise ProtocolError(f"{len(frames)} frames where {count} belong")
    for frame in frames:
        if len(frame) > MAX_FRAME_BYTES:
            raise ProtocolError(f"a frame of {len(frame)} bytes; at most {MAX_FRAME_BYTES}")
    return frames
