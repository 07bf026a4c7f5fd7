"""Prefixes that rows with one token share: found on the host, laid out as integers for a GPU.

Rows of one prefix form tiles. Attention reads the prefix once for a tile, in place of once for each
row (Hydragen, Juravsky et al. 2024, arXiv 2402.05099).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ppkernels.cpu.shared_rows import find_tiles

Ints = NDArray[np.int64]

TILE_ROWS = 16
"""Most rows of a tile."""
LEAST_TOKENS = 256
"""Tokens of the shortest prefix that counts."""
LEAST_SAVED_BYTES = 80 << 20
"""Keys and values of a layer that a step must not read again: a launch more takes as long as some 20 MiB, and rows that
share read the rest of their contexts less well. Measured on an H200, whose cache of 50 MiB serves short prefixes.
"""
_HEADER = 1
"""Words before the lengths: the number of tiles."""


@dataclass(frozen=True)
class SharedPrefixes:
    """Tiles of up to TILE_ROWS rows that share the first tokens of their context."""

    used: Tensor
    """[1] tiles in use."""
    lengths: Tensor
    """[T] tokens that the rows of a tile share, whole blocks."""
    members: Tensor
    """[T * TILE_ROWS] rows of each tile; -1 behind its last."""
    places: Tensor
    """[B] place of each row in `members`; -1 if it shares nothing."""


def most_tiles(rows: int) -> int:
    """Return T, the most tiles of a step with `rows`: small groups leave some tiles half empty."""
    return -(-rows // (TILE_ROWS // 2))


def words_of(rows: int) -> int:
    """Return the number of integers for a step with `rows`."""
    return _HEADER + most_tiles(rows) * (1 + TILE_ROWS) + rows


def parts_of(words: Any, rows: int) -> tuple[Any, Any, Any, Any]:
    """Return views `used`, `lengths`, `members`, `places` of `words` [words_of(rows)], an array or a tensor."""
    tiles = most_tiles(rows)
    members = _HEADER + tiles
    places = members + tiles * TILE_ROWS
    return words[:1], words[_HEADER:members], words[members:places], words[places : places + rows]


def on_device(words: Tensor, rows: int) -> SharedPrefixes:
    """Return the prefixes in `words` [words_of(rows)], on a device."""
    return SharedPrefixes(*parts_of(words, rows))


def least_saved(kv: Tensor) -> int:
    """Return the tokens that a step must not read again to be worth the launches, by a layer's cache."""
    _, _, block_size, _, _ = kv.shape
    return LEAST_SAVED_BYTES * block_size // (kv[0].numel() * kv.element_size())


def find_shared(tables: Ints, ends: Ints, counts: Ints, block_size: int, worth: int) -> Ints | None:
    """Return the words [words_of(B)] of a step; None if its rows share too little to save `worth` tokens.

    `tables` [B, M] are block tables, `ends` [B] visible tokens, `counts` [B] tokens of each row.
    """
    words: Ints = np.zeros(words_of(len(ends)), np.int64)
    least = max(LEAST_TOKENS // block_size, 1)
    saved = find_tiles(tables, ends, counts, block_size, least, *parts_of(words, len(ends)))
    return words if saved >= max(worth, 1) else None


def pad_words(words: Ints | None, rows: int, padded: Any, size: int) -> None:
    """Write the words of a step with `rows`, None if they share nothing, to the array `padded` [at least
    words_of(size)], as those of a step with `size` rows. The rows behind share nothing.
    """
    parts = parts_of(padded, size)
    parts[0][:], parts[3][:] = 0, -1
    if words is not None:
        for part, wide in zip(parts_of(words, rows), parts, strict=True):
            wide[: len(part)] = part
