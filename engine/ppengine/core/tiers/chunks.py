"""Chunks: the unit that backends keep, of whole blocks, named by the digest of its last block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

CHUNK_TOKENS = 256
"""Tokens of a chunk; blocks of more tokens are a chunk each."""


class Chunk(NamedTuple):
    """A chunk of a prompt. The digest of its last block chains all tokens before it."""

    key: bytes
    digests: tuple[bytes, ...]
    """Digests of its blocks, in order."""


def chunk_blocks(block_size: int) -> int:
    """Return the number of blocks in a chunk."""
    return max(1, CHUNK_TOKENS // block_size)


def chunks_of(digests: Sequence[bytes], blocks: int) -> list[Chunk]:
    """Return the whole chunks of a prefix whose blocks have `digests`. `blocks`: blocks of a chunk."""
    ends = range(blocks, len(digests) + 1, blocks)
    return [Chunk(digests[end - 1], tuple(digests[end - blocks : end])) for end in ends]
