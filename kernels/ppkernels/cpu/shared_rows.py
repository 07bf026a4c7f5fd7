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
    those of `SharedPrefixes`; tiles that do not fit are left out. The block of a row's newest
    token is its own.
    """
    members[:] = -1
    places[:] = -1
    size = len(members) // max(len(lengths), 1)
    full = np.where(counts == 1, (ends - 1) // block_size, 0)
    found = np.flatnonzero(full >= least)
    keys = np.empty(len(found), np.int64)
    for at in range(len(found)):
        keys[at] = tables[found[at], least - 1]
    order = found[np.argsort(keys, kind="mergesort")]
    tiles = saved = first = 0
    while first < len(order):
        last = first + 1
        while last < len(order) and tables[order[last], least - 1] == tables[order[first], least - 1]:
            last += 1
        group = order[first:last]
        common = blocks_in_common(tables, full, group)
        longest_first = np.argsort(-common, kind="mergesort")
        for begin in range(0, len(group), size):
            end = min(begin + size, len(group))
            blocks = common[longest_first[end - 1]]
            if tiles == len(lengths) or end - begin == 1 or blocks < least:
                break
            lengths[tiles] = blocks * block_size
            for at in range(begin, end):
                place = tiles * size + at - begin
                members[place] = group[longest_first[at]]
                places[members[place]] = place
            saved += (end - begin - 1) * blocks * block_size
            tiles += 1
        first = last
    used[0] = tiles
    return saved


@jit.compiled
def blocks_in_common(tables: Any, full: Any, group: Any) -> Any:
    """Return how many blocks each row of `group` [n] shares with its longest row, which shares all of
    its own `full` blocks.
    """
    longest = group[0]
    for row in group:
        if full[row] > full[longest]:
            longest = row
    common = np.zeros(len(group), np.int64)
    for at in range(len(group)):
        row, same = group[at], 0
        while same < full[row] and tables[row, same] == tables[longest, same]:
            same += 1
        common[at] = same
    return common
