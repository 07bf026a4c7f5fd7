"""Sums of parts that have come already, on a GPU: those in rank order, on every rank the same bits."""

from __future__ import annotations

import pytest
import torch
from ppkernels.gpu.part_sums import sum_parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("rows", "width"), [(5, 50), (130, 64)])
def test_sums_are_in_rank_order(rows: int, width: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    parts = torch.randn(size, rows, width).to(dtype)
    total = torch.zeros(rows, width)
    for part in parts:
        total += part.float()
    there = parts.to(device)
    for rank in range(size):
        others = torch.cat([there[:rank], there[rank + 1 :]]).flatten(1)
        longer = torch.cat([others, torch.full((size - 1, 14), float("nan"), dtype=dtype, device=device)], 1)
        output = torch.full((rows + 1, width), 7.0, dtype=dtype, device=device)
        sum_parts(there[rank], longer, rank, output[:rows])
        assert torch.equal(output[:rows].cpu(), total.to(dtype))
        assert bool((output[rows] == 7).all())
