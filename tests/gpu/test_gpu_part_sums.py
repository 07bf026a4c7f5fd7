"""Sums of parts that have come already, on a GPU: those in rank order, on every rank the same bits."""

from __future__ import annotations

import pytest
import torch
from ppkernels.gpu.collectives import NormOf
from ppkernels.gpu.part_sums import add_parts, add_parts_norm, sum_parts
from ppkernels.norms import Norm

ROWS, WIDTH = 5, 50
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)


def inbox_of(parts: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the parts of the others as an inbox has them, each at the begin of a longer row."""
    others = torch.cat([parts[:rank], parts[rank + 1 :]]).flatten(1)
    return torch.cat([others, torch.full((len(others), 7), float("nan"), dtype=parts.dtype, device=parts.device)], 1)


@dtypes
@pytest.mark.parametrize("size", [2, 4])
def test_sums_are_added_in_rank_order(size: int, dtype: torch.dtype, device: torch.device) -> None:
    parts = torch.randn(size, ROWS, WIDTH).to(dtype)
    wide = torch.randn(ROWS, 2 * WIDTH).to(dtype)
    total = torch.zeros(ROWS, WIDTH)
    for part in parts:
        total += part.float()
    expected = (total + wide[:, :WIDTH].float()).to(dtype)
    there = parts.to(device)
    for rank in range(size):
        whole = wide.clone().to(device)
        add_parts(there[rank], inbox_of(there, rank), rank, whole[:, :WIDTH])
        assert torch.equal(whole[:, :WIDTH].cpu(), expected)
        assert torch.equal(whole[:, WIDTH:].cpu(), wide[:, WIDTH:])


@dtypes
@pytest.mark.parametrize("centred", [False, True])
def test_the_norm_is_that_of_the_rounded_sum(centred: bool, dtype: torch.dtype, device: torch.device) -> None:
    parts, residual = torch.randn(2, ROWS, WIDTH).to(dtype).to(device), torch.randn(ROWS, WIDTH).to(dtype).to(device)
    weight, bias = torch.linspace(0.5, 2, WIDTH).to(dtype).to(device), torch.linspace(-1, 1, WIDTH).to(dtype).to(device)
    norm = Norm(weight, bias if centred else None, 1e-5, centred)
    found = add_parts_norm(parts[1], inbox_of(parts, 1), 1, residual, NormOf(norm.weight, norm.bias, 1e-5, centred))
    torch.testing.assert_close(found, norm(residual), atol=2e-3, rtol=2e-3)


@dtypes
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("rows", "width"), [(5, 50), (130, 64)])
def test_sums_of_shares_are_in_rank_order(
    rows: int, width: int, size: int, dtype: torch.dtype, device: torch.device
) -> None:
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
