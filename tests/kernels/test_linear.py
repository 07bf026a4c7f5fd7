"""Products with packed weights, in every number of rows and in the sizes that are cut differently."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from ppkernels.cpu.linear import DEPTH, ROWS, can_pack, linear, linear_added, pack, rows_of
from ppkernels.cpu.vectors import lanes
from torch import Tensor

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-4}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
NAN = float("nan")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def draw(dtype: torch.dtype, *shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@dtypes
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8, 9, 12, 13, 16, 17, 33, ROWS - 1, ROWS, ROWS + 1, 2 * ROWS + 7])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 12), (48, DEPTH), (16, DEPTH + 4)])
def test_equals_the_plain_product(dtype: torch.dtype, rows: int, outputs: int, inputs: int) -> None:
    x, weight, bias = draw(dtype, rows, inputs), draw(dtype, outputs, inputs, seed=2), draw(dtype, outputs, seed=3)
    expected = x.double() @ weight.double().T
    packed = pack(weight.clone())
    for actual, wanted in [
        (linear(x, packed), expected),
        (linear(x, packed, bias), expected + bias.double()),
    ]:
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), wanted, rtol=0, atol=TOLERANCE[dtype])
    output = draw(dtype, rows, outputs, seed=4)
    wanted = output.double() + expected + bias.double()
    linear_added(output, x, packed, bias)
    torch.testing.assert_close(output.double(), wanted, rtol=0, atol=TOLERANCE[dtype])


@dtypes
def test_packing_stays_in_place_and_moves_no_row_out_of_its_run(dtype: torch.dtype) -> None:
    weight = draw(dtype, 64, 12)
    width = lanes(weight)
    held = weight.clone()
    packed = pack(held)
    assert packed.data_ptr() == held.data_ptr() and packed.shape == (64 // width, 12, width)
    assert torch.equal(rows_of(packed, torch.arange(64)), weight)
    for first in range(0, 64, width):
        run = slice(first, first + width)
        assert torch.equal(held[run].flatten().sort().values, weight[run].flatten().sort().values)


@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_what_is_not_finite_stays_in_its_row_or_column(bad: float) -> None:
    for rows in (3, 16, 40):
        x, weight = draw(torch.float32, rows, 24), draw(torch.float32, 32, 24, seed=2)
        x[1, 5] = weight[7, 2] = bad
        expected = x @ weight.T
        actual = linear(x, pack(weight))
        assert torch.equal(expected.isfinite(), actual.isfinite())
        assert not actual[1].isfinite().any() and not actual[:, 7].isfinite().any()
        assert torch.equal(expected.isnan(), actual.isnan())


def test_what_the_kernel_cannot_take_is_not_packed() -> None:
    assert can_pack(torch.empty(32, 8))
    assert not can_pack(torch.empty(32, 6))
    assert not can_pack(torch.empty(33, 8))
    assert not can_pack(torch.empty(32, 8, dtype=torch.bfloat16))
    torch.set_num_threads(2)
    assert not can_pack(torch.empty(32, 8))
