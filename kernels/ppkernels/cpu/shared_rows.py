"""Search for rows whose block tables begin alike."""

from __future__ import annotations

from typing import Any

import numpy as np

from ppkernels.cpu import jit


@jit.compiled
def find_tiles(
    tables: Any, ends: Any, counts: Any, block_size: int, least: int, used: Any, lengths: Any, members: Any, places: Any
) -> int:
    """Fill in tiles of rows with one token that share at least `least` blocks; return the tokens
    that need not be read again.

    `tables` [B, M], `ends` [B] visible tokens, `counts` [B] tokens of each row. The results are
    those of `SharedPrefixes`. If tiles are too many, those that save least are left out. The block
    of a row's newest token is its own.
    """
    members[:] = -1
    places[:] = -1
    size = len(members) // max(len(lengths), 1)
    full = np.where(counts == 1, (ends - 1) // block_size, 0)
    order = np.flatnonzero(full >= least)
    if len(order) < 2:
        used[0] = 0
        return 0
    common = sort_alike(tables, full, order)
    firsts, blocks, savings = cut_tiles(common, size, least)
    kept = np.argsort(-savings, kind="mergesort")[: len(lengths)]
    tiles = saved = 0
    for tile in kept:
        if savings[tile] == 0:
            break
        lengths[tiles] = blocks[tile] * block_size
        saved += savings[tile] * block_size
        for at in range(savings[tile] // blocks[tile] + 1):
            place = tiles * size + at
            members[place] = order[firsts[tile] + at]
            places[members[place]] = place
        tiles += 1
    used[0] = tiles
    return saved


@jit.compiled
def sort_alike(tables: Any, full: Any, order: Any) -> Any:
    """Sort the rows `order` [n >= 1] so that those with the most first blocks in common are neighbours.

    Return how many each shares with the row before it [n], of its `full` blocks. A shared block is
    read once a row.
    """
    common = np.zeros(len(order), np.int64)
    groups = [(0, len(order), 0)]
    while len(groups) > 0:
        begin, end, depth = groups.pop()
        first, same = order[begin], full[order[begin]]
        for row in order[begin + 1 : end]:
            at, most = depth, min(same, full[row])
            while at < most and tables[row, at] == tables[first, at]:
                at += 1
            same = at
        common[begin + 1 : end] = same
        keys = np.full(end - begin, -1, np.int64)
        for at in range(begin, end):
            if full[order[at]] > same:
                keys[at - begin] = tables[order[at], same]
        keys[alone(keys)] = -1  # those that share no more are neighbours, too
        by_key = np.argsort(keys, kind="mergesort")
        order[begin:end] = order[begin:end][by_key]
        keys = keys[by_key]
        first = 0
        for at in range(1, end - begin + 1):
            if at == end - begin or keys[at] != keys[first]:
                if keys[first] >= 0:
                    groups.append((begin + first, begin + at, same))
                first = at
    return common


@jit.compiled
def alone(keys: Any) -> Any:
    """Return which of `keys` [n] occur once."""
    by_key = np.argsort(keys, kind="mergesort")
    once = np.ones(len(keys), np.bool_)
    for at in range(1, len(keys)):
        if keys[by_key[at]] == keys[by_key[at - 1]]:
            once[by_key[at]] = once[by_key[at - 1]] = False
    return once


@jit.compiled
def cut_tiles(common: Any, size: int, least: int) -> Any:
    """Cut sorted rows into tiles of at most `size` so that the fewest blocks are read.

    Return by tile its first row, the blocks that its rows share, and the blocks that need not be
    read again: those of all rows but one. `common` [n] is from `sort_alike`.
    """
    best, length = np.zeros(len(common) + 1, np.int64), np.ones(len(common) + 1, np.int64)
    shared = np.zeros(len(common) + 1, np.int64)
    for end in range(1, len(common) + 1):
        best[end] = best[end - 1]
        blocks = 1 << 60
        for rows in range(2, min(size, end) + 1):
            blocks = min(blocks, common[end - rows + 1])
            if blocks < least:
                break
            if best[end - rows] + (rows - 1) * blocks > best[end]:
                best[end], length[end], shared[end] = best[end - rows] + (rows - 1) * blocks, rows, blocks
    firsts, tiles, end = np.zeros_like(length), 0, len(common)
    savings, blocks_of = np.zeros_like(length), np.zeros_like(length)
    while end > 0:
        firsts[tiles], blocks_of[tiles] = end - length[end], shared[end]
        savings[tiles] = (length[end] - 1) * shared[end]
        tiles += length[end] > 1
        end -= length[end]
    return firsts[:tiles], blocks_of[:tiles], savings[:tiles]
