"""The bytes of a shard and of a marker. Both are read as data from outside: lengths and sums come first.

A shard is a header of 64 bytes, the blocks of one chunk in order, and zeros up to a multiple of a page. Its checksum is
of all of that. A marker has its own checksum in front.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import msgspec
from xxhash import xxh3_128_digest

from ppengine.protocol.place import Place
from ppengine.protocol.store_messages import Marker
from ppengine.store.backend import PAGE

VERSION = 1
HEADER_BYTES = 64
SUM_BYTES = 16
_SHARD = struct.Struct("<8sHHHxxIxxxxQ16s16s")
_SHARD_MAGIC = b"PPKVSHRD"
_MARKER = struct.Struct("<8sHxxI16s")
_MARKER_MAGIC = b"PPKVMARK"
_decoder = msgspec.msgpack.Decoder(Marker)


class CorruptError(Exception):
    """The bytes of an object are not those that were written, in one line."""


@dataclass(frozen=True)
class ShardLabel:
    """The header of a shard: it belongs to one chunk of one place, and has one shape."""

    namespace: bytes
    key: bytes
    place: Place
    blocks: int
    slot_bytes: int

    @property
    def payload_bytes(self) -> int:
        """Bytes of the blocks."""
        return self.blocks * self.slot_bytes

    @property
    def object_bytes(self) -> int:
        """Bytes of all of it, a multiple of a page."""
        return pages(HEADER_BYTES + self.payload_bytes)

    def header(self) -> bytes:
        """Return its first 64 bytes."""
        names = xxh3_128_digest(self.namespace), xxh3_128_digest(self.key)
        return _SHARD.pack(_SHARD_MAGIC, VERSION, *self.place, self.blocks, self.slot_bytes, *names)


assert _SHARD.size == HEADER_BYTES


def pages(size: int) -> int:
    """Return `size`, rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


def seal(shard: memoryview, label: ShardLabel) -> bytes:
    """Write header and padding around the blocks in `shard`, and return its checksum."""
    shard[:HEADER_BYTES] = label.header()
    end = HEADER_BYTES + label.payload_bytes
    shard[end:] = bytes(len(shard) - end)
    return xxh3_128_digest(shard)


def check(shard: memoryview, length: int, label: ShardLabel, expected: bytes) -> None:
    """Raise CorruptError unless the object of `length` bytes in `shard` is the one of `label` and checksum."""
    if length != label.object_bytes or len(shard) != length:
        raise CorruptError(f"the shard has {length} bytes, {label.object_bytes} belong")
    if shard[:HEADER_BYTES] != label.header():
        raise CorruptError("the header of the shard is another one")
    if xxh3_128_digest(shard) != expected:
        raise CorruptError("the checksum of the shard is another one")


def marker_bytes(places: int) -> int:
    """Return the most bytes of a marker, in whole pages."""
    return pages(_MARKER.size + 32 + 32 * places)


def pack_marker(marker: Marker) -> bytes:
    """Return the bytes of a marker."""
    body = msgspec.msgpack.encode(marker)
    return _marker_header(body) + body


def unpack_marker(data: memoryview, length: int, places: int) -> Marker:
    """Return the marker of an engine of `places`. Raises CorruptError."""
    if not _MARKER.size < length <= len(data):
        raise CorruptError(f"the marker has {length} bytes")
    body = data[_MARKER.size : length]
    if data[: _MARKER.size] != _marker_header(body):
        raise CorruptError("the marker has another header or checksum")
    try:
        marker = _decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise CorruptError(f"the marker is none: {error}") from None
    if len(marker.lengths) != places or len(marker.sums) != places or marker.blocks < 1:
        raise CorruptError(f"the marker has {len(marker.sums)} places, the engine {places}")
    # They become names of objects.
    if any(len(checksum) != SUM_BYTES for checksum in marker.sums):
        raise CorruptError("the marker has a checksum of another length")
    return marker


def _marker_header(body: bytes | memoryview) -> bytes:
    return _MARKER.pack(_MARKER_MAGIC, VERSION, len(body), xxh3_128_digest(body))
