"""Masks of a step as messages have them: words of zeros are left out where that is shorter."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Bytes = tuple[bytes, bytes]
"""Words and places of a `TokenMask`."""


def fold(masks: NDArray[np.int32]) -> tuple[list[int], list[Bytes]]:
    """Return the number of tokens that each mask [R, W] allows, and its words and places.

    All masks go through numpy at once: a call for each takes several times longer than its work.
    """
    rows, words = masks.shape
    flat = masks.reshape(-1)
    there = np.flatnonzero(flat != 0)  # Of truth values, it takes a quarter of the time.
    values = flat[there]
    ends = np.searchsorted(there, np.arange(rows + 1) * words)
    # Of a negative number, numpy counts the bits of its absolute value.
    bits = np.bitwise_count(values.view(np.uint32))
    totals = np.concatenate(([0], np.cumsum(bits, dtype=np.int64)))
    places = (there - np.repeat(np.arange(rows) * words, np.diff(ends))).astype("<i4").tobytes()
    content = values.astype("<i4", copy=False).tobytes()
    folded: list[Bytes] = []
    for row, (first, end) in enumerate(pairwise(ends.tolist())):
        if 2 * (end - first) >= words:
            folded.append((masks[row].astype("<i4", copy=False).tobytes(), b""))
        else:
            folded.append((content[4 * first : 4 * end], places[4 * first : 4 * end]))
    return np.diff(totals[ends]).tolist(), folded
