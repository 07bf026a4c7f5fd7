"""The arrays of a `Batch`, computed on the CPU from the rows of a step and the block tables."""

from __future__ import annotations

from typing import Any

import numpy as np

from ppkernels.cpu import jit


@jit.compiled
def lay_out(rows: Any, tables: Any, block_size: int) -> Any:
    """Return positions [T], slot mapping [T], first tokens [B + 1] and block tables [B, M] of a
    step; all int64.

    `rows` [B, 3 or more] begins with slot, first position and count; `tables` [S, most] has each
    slot's blocks. Blocks beyond a row's own are stale: the result has the null block there, which
    is always mapped. Slots must be in `tables`. If a row is longer than a table, the block tables
    are empty.
    """
    tokens = width = 0
    for row in range(len(rows)):
        tokens += rows[row, 2]
        width = max(width, (rows[row, 1] + rows[row, 2] + block_size - 1) // block_size)
    positions, mapping = np.empty(tokens, np.int64), np.empty(tokens, np.int64)
    starts = np.zeros(len(rows) + 1, np.int64)
    if width > tables.shape[1]:
        return positions, mapping, starts, np.zeros((0, width), np.int64)
    blocks = np.zeros((len(rows), width), np.int64)
    token = 0
    for row in range(len(rows)):
        slot, start, count = rows[row, 0], rows[row, 1], rows[row, 2]
        for index in range((start + count + block_size - 1) // block_size):
            blocks[row, index] = tables[slot, index]
        for position in range(start, start + count):
            positions[token] = position
            mapping[token] = tables[slot, position // block_size] * block_size + position % block_size
            token += 1
        starts[row + 1] = token
    return positions, mapping, starts, blocks
