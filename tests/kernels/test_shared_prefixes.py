"""Tiles of rows that share the first blocks of their contexts, against a search written plainly."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ppkernels import shared_prefixes
from ppkernels.cpu.shared_rows import find_tiles
from ppkernels.shared_prefixes import (
    LEAST_SAVED_BYTES,
    TILE_ROWS,
    find_shared,
    least_saved,
    most_tiles,
    pad_words,
    parts_of,
    words_of,
)

BLOCK, LEAST = 4, 2
Rows = list[tuple[list[int], int, int]]
"""The path of each row through a tree of prefixes, its own tokens behind it, and its count. A path that begins with -1
has a first block of its own, and then those of the others: their blocks were cached behind another copy of the first.
"""


def tables_of(rows: Rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return block tables, visible tokens and counts; equal paths have equal blocks, all else has blocks of its own."""
    known: dict[tuple[int, ...], int] = {}
    ends = np.array([len(path) * BLOCK + own for path, own, _ in rows])
    tables = np.zeros((len(rows), int(-(-ends.max() // BLOCK))), np.int64)
    fresh = iter(range(1000, 100_000))
    for row, (path, _, _) in enumerate(rows):
        for index in range(-(-int(ends[row]) // BLOCK)):
            key = tuple(max(step, 0) for step in path[: index + 1])
            own = index >= len(path) or path[index] < 0
            tables[row, index] = next(fresh) if own else known.setdefault(key, len(known) + 1)
    return tables, ends, np.array([count for _, _, count in rows])


paths = st.lists(st.sampled_from([0, 0, 0, 1, -1]), min_size=0, max_size=6)
steps = st.lists(st.tuples(paths, st.integers(1, 9), st.sampled_from([1, 1, 1, 2])), min_size=1, max_size=60)


@pytest.fixture(autouse=True, scope="module")
def short() -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr(shared_prefixes, "LEAST_TOKENS", LEAST * BLOCK)
    yield
    patch.undo()


@settings(deadline=None)  # the first call compiles
@given(steps)
def test_tiles_share_their_first_blocks(rows: Rows) -> None:
    tables, ends, counts = tables_of(rows)
    words = find_shared(tables, ends, counts, BLOCK, 1)
    most = 0
    for row in range(len(rows)):
        others = [other for other in range(len(rows)) if other != row and counts[row] == counts[other] == 1]
        both = [other for other in others if min(ends[row], ends[other]) > LEAST * BLOCK]
        most = max([most, *((tables[row, :LEAST] == tables[other, :LEAST]).all() for other in both)])
    assert (words is not None) == most, "two decodes with the first blocks in common"
    if words is None:
        return
    used, lengths, members, places = parts_of(words, len(rows))
    seen: set[int] = set()
    for tile in range(int(used[0])):
        own = [int(row) for row in members[tile * TILE_ROWS : (tile + 1) * TILE_ROWS] if row >= 0]
        assert len(own) > 1 and not seen & set(own)
        seen |= set(own)
        blocks = int(lengths[tile]) // BLOCK
        assert blocks >= LEAST and lengths[tile] % BLOCK == 0
        for at, row in enumerate(own):
            assert counts[row] == 1 and places[row] == tile * TILE_ROWS + at
            assert (tables[row, :blocks] == tables[own[0], :blocks]).all()
            assert lengths[tile] < ends[row], "the newest token's block is the row's own"
    assert {row for row in range(len(rows)) if places[row] >= 0} == seen


@pytest.mark.parametrize("count", [2, 16, 17, 40, 250])
def test_a_prefix_of_many_rows_is_read_once_a_tile(count: int) -> None:
    rows = [([0] * 5, 1 + n % 7, 1) for n in range(count)] + [([1] * 5, 3, 1), ([], 2, 1), ([0] * 5, 1, 2)]
    random.Random(count).shuffle(rows)
    words = find_shared(*tables_of(rows), BLOCK, 1)
    assert words is not None
    used, lengths, members, _ = parts_of(words, len(rows))
    full, left = divmod(count, TILE_ROWS)
    tiles = full + (left > 1)
    assert used[0] == tiles and set(lengths[:tiles]) == {5 * BLOCK}
    assert (members >= 0).sum() == count - (left == 1)


def test_longer_prefixes_come_together() -> None:
    rows = [([0, 0, 0, 0, 0, 0] if n % 2 else [0, 0, 0, 1], 1, 1) for n in range(2 * TILE_ROWS)]
    words = find_shared(*tables_of(rows), BLOCK, 1)
    assert words is not None
    assert parts_of(words, len(rows))[1][:2].tolist() == [6 * BLOCK, 4 * BLOCK]


def tiles_of(rows: Rows) -> list[tuple[int, int]]:
    """Return rows and shared tokens of each tile, sorted."""
    words = find_shared(*tables_of(rows), BLOCK, 1)
    assert words is not None
    used, lengths, members, _ = parts_of(words, len(rows))
    counts = (members.reshape(-1, TILE_ROWS) >= 0).sum(1)
    return sorted(zip(counts[: used[0]].tolist(), lengths[: used[0]].tolist(), strict=True))


def test_more_groups_than_tiles_leave_out_those_that_save_least() -> None:
    pairs: Rows = [([n // 2, n // 2], 1, 1) for n in range(16)]
    assert tiles_of([*pairs, *[([9] * 50, 1, 1)] * 20])[-2:] == [(4, 200), (16, 200)]
    assert len(tiles_of(pairs)) == most_tiles(16) < 8


def test_an_odd_row_spoils_no_tile() -> None:
    rows: Rows = [([0] * 9, 1, 1)] * 10
    for odd in ([-1, *[0] * 8], [-1, *[0] * 20], [1, 1]):
        assert tiles_of([*rows[:5], (odd, 5, 1), *rows[5:]]) == [(10, 9 * BLOCK)]


def test_documents_behind_one_prompt_are_read_whole() -> None:
    rows: Rows = [([0, 0, 0, document, *[0] * 30], 1, 1) for document in range(4) for _ in range(TILE_ROWS)]
    random.Random(4).shuffle(rows)
    assert tiles_of(rows) == [(TILE_ROWS, 34 * BLOCK)] * 4


def partitions(rows: list[int]) -> Iterator[list[list[int]]]:
    """Yield all ways to part rows into sets."""
    if not rows:
        yield []
        return
    for parts in partitions(rows[1:]):
        yield [[rows[0]], *parts]
        for at, part in enumerate(parts):
            yield [*parts[:at], [rows[0], *part], *parts[at + 1 :]]


@settings(deadline=None)
@given(st.lists(st.tuples(paths, st.integers(1, 9), st.just(1)), min_size=1, max_size=6))
def test_other_tiles_would_hardly_save_more(rows: Rows) -> None:
    tables, ends, counts = tables_of(rows)
    full = (ends - 1) // BLOCK
    lengths, members, places, used = (np.zeros(size, np.int64) for size in (6, 6 * TILE_ROWS, len(rows), 1))
    saved = find_tiles(tables, ends, counts, BLOCK, LEAST, used, lengths, members, places)

    def saves(part: list[int]) -> int:
        most = min(int(full[row]) for row in part)
        alike = (tables[part, :most] == tables[part[0], :most]).all(0)
        blocks = most if alike.all() else int(alike.argmin())
        return (len(part) - 1) * blocks * BLOCK if blocks >= LEAST else 0

    best = max(sum(map(saves, parts)) for parts in partitions(list(range(len(rows)))))
    # One row may have to join tiles that are not beside it.
    assert 0.8 * best <= saved <= best


def test_little_that_is_shared_is_left_alone() -> None:
    step = tables_of([([0] * 5, 1, 1)] * 3)
    assert find_shared(*step, BLOCK, 2 * 5 * BLOCK) is not None
    assert find_shared(*step, BLOCK, 2 * 5 * BLOCK + 1) is None


def test_a_smaller_share_of_a_model_must_save_more_tokens() -> None:
    whole, half = (torch.empty(3, 2, 16, heads, 128, dtype=torch.bfloat16) for heads in (8, 4))
    assert 2 * least_saved(whole) == least_saved(half) == LEAST_SAVED_BYTES // (2 * 4 * 128 * 2)


def test_padding_moves_the_parts() -> None:
    rows: Rows = [([0] * 5, 1, 1)] * 19
    words = find_shared(*tables_of(rows), BLOCK, 1)
    assert words is not None
    padded = np.full(words_of(64) + 7, 10**6)
    pad_words(words, 19, padded, 64)
    for part, wide in zip(parts_of(words, 19), parts_of(padded, 64), strict=True):
        assert wide[: len(part)].tolist() == part.tolist()
    assert set(parts_of(padded, 64)[3][19:]) == {-1}
