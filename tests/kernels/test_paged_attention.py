"""Paged attention against attention written plainly in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from batches import Paged, make_paged, plain_attention
from ppkernels import paged_attention as module
from ppkernels.paged_attention import paged_attention, plan_attention
from torch import Tensor

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
STEPS = {
    "decodes": [(4, 1), (0, 1), (31, 1), (7, 1), (8, 1), (99, 1)],
    "one decode": [(40, 1)],
    "equal decodes": [(15, 1), (15, 1)],
    "whole prompts": [(0, 9), (0, 2), (0, 64)],
    "chunks": [(16, 16), (3, 5), (40, 2)],
    "mixed": [(4, 1), (0, 11), (31, 1), (5, 7), (99, 1)],
}


def run(paged: Paged, query: Tensor) -> Tensor:
    kv_heads, width = paged.kv.shape[3:]
    plan = plan_attention(paged.batch, query.shape[1], kv_heads, width, query.dtype)
    return paged_attention(query, paged.kv, plan)


def queries(paged: Paged, heads: int, seed: int = 1) -> Tensor:
    """[T, heads, head_dim], a slice of something wider as in a fused projection."""
    width = paged.kv.shape[4]
    shape = (len(paged.batch.positions), heads + 3, width)
    wide = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return wide.to(paged.kv.dtype)[:, :heads]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 4, 8), (6, 2, 16), (5, 1, 8)])
def test_equals_plain_attention(dtype: torch.dtype, step: str, heads: int, kv_heads: int, width: int) -> None:
    paged = make_paged(STEPS[step], kv_heads, width, dtype)
    query = queries(paged, heads)
    output = run(paged, query)
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), plain_attention(paged, query), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("step", ["decodes", "mixed"])
def test_small_gathers_give_the_same(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    paged = make_paged(STEPS[step], 2, 8, torch.float64)
    query = queries(paged, 4)
    whole = run(paged, query)
    monkeypatch.setattr(module, "GATHER_BYTES", 2 * 2 * 8 * 8 * 35)
    plan = plan_attention(paged.batch, 4, 2, 8, torch.float64)
    assert len(plan.decodes) > 1
    torch.testing.assert_close(paged_attention(query, paged.kv, plan), whole, rtol=0, atol=1e-14)


def test_a_row_does_not_depend_on_the_others() -> None:
    alone = make_paged([(20, 1)], 2, 8, torch.float64, seed=3)
    query = queries(alone, 4)
    together = make_paged([(20, 1), (63, 1), (2, 1)], 2, 8, torch.float64, seed=3)
    for position in range(21):  # the same sequence in other blocks
        block = together.batch.block_tables[0, position // 8]
        together.kv[block, 0, position % 8] = alone.keys[0][position]
        together.kv[block, 1, position % 8] = alone.values[0][position]
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
    difference = (wrong - plain_attention(paged, query)).abs()
    assert not difference[-1].max() < 1e-3
    assert difference[0].max() < 1e-12
