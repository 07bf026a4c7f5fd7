"""The namespace of chunks: a hash of everything that gives the bytes of a shard their meaning."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

FORMAT = 1
"""Version of shards and markers."""


class Shape(msgspec.Struct, frozen=True, array_like=True):
    """The engine as far as bytes of KV blocks depend on it."""

    weights: bytes
    """Hash of the weight files."""
    model_type: str
    dtype: str
    block_size: int
    chunk_blocks: int
    layers: list[tuple[int, int]]
    """Layers of each stage."""
    ranks: int
    layouts: list[str]
    """Name of the order of a slot's bytes, one a place in the order of `Groups`."""
    slot_bytes: list[int]
    """Bytes of a slot, one a place."""
    format: int = FORMAT


def namespace_of(shape: Shape) -> bytes:
    """Return the namespace of an engine: two engines share chunks if, and only if, it is the same."""
    return blake2b(msgspec.msgpack.encode(shape), digest_size=16).digest()
