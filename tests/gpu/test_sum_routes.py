"""The ways of sums that a rank on a card reports are those that its kernels take, also of the sums that it times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="needs Triton, which has no macOS build")
pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings (extra gpu)")

from ppengine.stage.backends.cuda.card_group import LEAST_BYTES, MOST_BYTES
from ppengine.stage.backends.cuda.one_shot_sums import OneShotSums
from ppengine.stage.backends.cuda.sum_ways import (
    COPIES,
    ONE_SHOT,
    TWO_SHOTS,
    StepRows,
    SumToTime,
    routes,
    sums_to_time,
)
from ppengine.stage.backends.cuda.two_shot_sums import TwoShotSums
from ppkernels.gpu import collectives


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("kib", [8, 512, 520, 1016, 1024, 1032, 16376, 16384, 65536])
def test_the_first_way_that_a_part_fits_is_taken(size: int, kib: int) -> None:
    part = torch.empty(kib, 512, dtype=torch.bfloat16, device="meta")
    way = next(each.way for each in routes(size) if each.most_bytes is None or part.nbytes <= each.most_bytes)
    assert ("own flag" in way) == (part.nbytes <= collectives.WORD_BYTES)
    assert way.startswith("one shot") != collectives.in_two_shots(part, size)
    assert [each.most_bytes for each in routes(size)][-2:] == [None, None]
    assert f"above {2048 * size:,} tokens, from 16.0 MiB on" in routes(size)[-2].way


def plan(rank: int, size: int, rows: StepRows) -> tuple[list[SumToTime], int, int]:
    """Return the sums that a rank times, and room for a part and for a piece."""
    part_bytes = rows.most * rows.row_bytes
    lanes: Any = SimpleNamespace(
        rank=rank, size=size, compute=SimpleNamespace(buffer=lambda *args: None),
        allocate=lambda each, slots: [torch.empty(each, dtype=torch.uint8, device="meta")] * slots,
    )  # fmt: skip
    copies = (OneShotSums if size == 2 else TwoShotSums)(lanes, part_bytes)
    group: Any = SimpleNamespace(size=size, pieces=copies.pieces)
    room = 1 << (min(max(part_bytes, LEAST_BYTES), MOST_BYTES * 2 // size).bit_length() - 1)
    return sums_to_time(group, rows, room), room, copies.piece_bytes


@given(
    st.integers(2, 8), st.integers(1, 2**14), st.sampled_from([torch.bfloat16, torch.float32]), st.integers(1, 2**15)
)  # fmt: skip
def test_all_ranks_time_the_same_few_sums_each_of_which_fits(
    size: int, width: int, dtype: torch.dtype, most: int
) -> None:
    rows = StepRows(width, dtype, most)
    plans = [plan(rank, size, rows) for rank in range(size)]
    found, room, piece_bytes = plans[0]
    assert all(each[0] == found for each in plans[1:])
    assert 1 <= len(found) <= 5 and sum(one.calls + 1 for one in found) <= 85
    assert [one.bytes for one in found] == sorted({one.bytes for one in found})
    for one in found:
        ends = [0, *(piece.stop for piece in one.pieces)]
        assert [piece.start for piece in one.pieces] == ends[:-1] and ends[-1] <= most
        assert one.bytes == ends[-1] * rows.row_bytes
        largest = max(piece.stop - piece.start for piece in one.pieces) * rows.row_bytes
        assert largest <= (room if len(one.pieces) == 1 else min(room, piece_bytes))
        part = torch.empty(ends[-1], width, dtype=dtype, device="meta")
        two_shots = TWO_SHOTS if collectives.in_two_shots(part, size) else ONE_SHOT
        assert one.way == (COPIES if len(one.pieces) > 1 else two_shots)


@pytest.mark.parametrize(
    ("size", "width", "most", "wanted"),
    [
        (2, 4096, 16384, [(8, ONE_SHOT), (1024, ONE_SHOT), (4096, ONE_SHOT), (16384, TWO_SHOTS), (32776, COPIES)]),
        (4, 4096, 16384, [(8, ONE_SHOT), (1024, TWO_SHOTS), (4096, TWO_SHOTS), (16384, TWO_SHOTS)]),
        (2, 8192, 4096, [(16, ONE_SHOT), (1024, ONE_SHOT), (4096, ONE_SHOT), (16384, TWO_SHOTS)]),
        (2, 4096, 512, [(8, ONE_SHOT), (1024, ONE_SHOT), (4096, ONE_SHOT)]),
        (2, 256, 8, [(4, ONE_SHOT)]),
    ],
)
def test_each_way_that_steps_go_has_a_size(size: int, width: int, most: int, wanted: list[tuple[int, str]]) -> None:
    found, _, _ = plan(0, size, StepRows(width, torch.bfloat16, most))
    assert [(one.bytes // 1024, one.way) for one in found] == wanted
