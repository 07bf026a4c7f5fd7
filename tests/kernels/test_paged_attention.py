"""Paged attention against attention written plainly in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from batches import NAN, Paged, make_paged, plain_attention, put
from ppkernels import paged_attention as module
from ppkernels.attention_plan import AttentionPlan
from ppkernels.paged_attention import paged_attention, paged_attention_reference
from torch import Tensor

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
EXTRA = 3
STEPS = {
    "decodes": [(4, 1), (0, 1), (31, 1), (7, 1), (8, 1), (99, 1)],
    "one decode": [(40, 1)],
    "equal decodes": [(15, 1), (15, 1)],
    "whole prompts": [(0, 9), (0, 2), (0, 64)],
    "chunks": [(16, 16), (3, 5), (40, 2)],
    "mixed": [(4, 1), (0, 11), (31, 1), (5, 7), (99, 1)],
}


def run(paged: Paged, query: Tensor) -> Tensor:
    plan = AttentionPlan(paged.batch, query.shape[1] - EXTRA, query.dtype)
    output = paged_attention(query, paged.kv, plan)
    reference = paged_attention_reference(query, paged.kv, plan)
    torch.testing.assert_close(output, reference, rtol=0, atol=TOLERANCE[query.dtype], equal_nan=True)
    return output


def queries(paged: Paged, heads: int, seed: int = 1) -> Tensor:
    """[T, heads + EXTRA, head_dim]: wider than the queries, as a fused projection is."""
    shape = (len(paged.batch.positions), heads + EXTRA, paged.kv.shape[4])
    wide = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return wide.to(paged.kv.dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "block_size"),
    [(4, 4, 8, 8), (6, 2, 16, 8), (5, 1, 8, 8), (6, 2, 32, 16), (9, 1, 16, 32)],
)
def test_equals_plain_attention(
    dtype: torch.dtype, step: str, heads: int, kv_heads: int, width: int, block_size: int
) -> None:
    paged = make_paged(STEPS[step], kv_heads, width, dtype, block_size=block_size)
    query = queries(paged, heads)
    output = run(paged, query)
    assert output.dtype == dtype
    torch.testing.assert_close(
        output.double(), plain_attention(paged, query[:, :-EXTRA]), rtol=0, atol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("step", ["decodes", "mixed"])
def test_small_gathers_give_the_same(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    paged = make_paged(STEPS[step], 2, 8, torch.float64)
    query = queries(paged, 4)
    whole = run(paged, query)
    monkeypatch.setattr(module, "GATHER_BYTES", 1)
    plan = AttentionPlan(paged.batch, 4, torch.float64)
    torch.testing.assert_close(paged_attention_reference(query, paged.kv, plan), whole, rtol=0, atol=1e-14)


@pytest.mark.parametrize("block", [-1, 50])
def test_a_block_outside_of_the_cache_is_refused(block: int) -> None:
    paged = make_paged([(20, 1), (9, 1)], 2, 8, torch.float64)
    query = queries(paged, 4)
    assert block not in range(len(paged.kv))
    paged.batch.block_tables[1, 0] = block
    with pytest.raises(IndexError, match="row 1 has a block outside of the cache"):
        run(paged, query)


@pytest.mark.parametrize("step", sorted(STEPS))
def test_more_threads_give_the_same(step: str) -> None:
    """Chunks are torch's then."""
    paged = make_paged(STEPS[step], 2, 16, torch.float32, block_size=16)
    query = queries(paged, 6)
    before = torch.get_num_threads()
    outputs = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        outputs.append(run(paged, query))
    torch.set_num_threads(before)
    torch.testing.assert_close(*outputs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("bad", [NAN, float("inf"), float("-inf")])
def test_a_bad_key_shows_in_its_row_alone(bad: float) -> None:
    paged = make_paged(STEPS["decodes"], 2, 16, torch.float32, block_size=16)
    paged.kv[paged.batch.block_tables[2, 0], 0, :, 0, 3] = bad
    output = run(paged, queries(paged, 6))
    assert not output[2].isfinite().all()
    assert output[[0, 1, 3, 4, 5]].isfinite().all()


def test_a_row_does_not_depend_on_the_others() -> None:
    alone = make_paged([(20, 1)], 2, 8, torch.float64, seed=3)
    query = queries(alone, 4)
    together = make_paged([(20, 1), (63, 1), (2, 1)], 2, 8, torch.float64, seed=3)
    for position in range(21):  # the same sequence in other blocks
        block = int(together.batch.block_tables[0, position // 8])
        put(together.kv, block, position % 8, alone.keys[0][position], alone.values[0][position])
    more = torch.cat((query, queries(together, 4)[1:]))
    torch.testing.assert_close(run(together, more)[0], run(alone, query)[0], rtol=0, atol=1e-14)


@pytest.mark.parametrize("step", ["decodes", "chunks", "mixed"])
def test_a_stale_block_shows(step: str) -> None:
    """Whoever reads a block that is another's, or not written, gets another result: the test above can fail."""
    paged = make_paged(STEPS[step], 2, 8, torch.float64)
    query = queries(paged, 4)
    tables = paged.batch.block_tables.clone()
    tables[-1, 0] = tables[0, 0]
    wrong = run(replace(paged, batch=replace(paged.batch, block_tables=tables)), query)
    difference = (wrong - plain_attention(paged, query[:, :-EXTRA])).abs()
    assert not difference[-1].max() < 1e-3
    assert difference[0].max() < 1e-12
