"""Products with few rows on a GPU against float64, on fresh inputs and poisoned outputs, and the stream they add to."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from ppengine.models.layers import Linear
from ppengine.models.residual import Residual
from ppkernels import dispatch, few_rows
from ppkernels.activation_kind import Activation
from ppkernels.few_rows import few_rows_reference
from ppkernels.norms import Norm
from torch import Tensor, nn

# Triton's interpreter cuts bfloat16 off, where a GPU rounds to the nearest.
ROUNDING = {torch.float32: 2**-20, torch.float16: 2**-11, torch.bfloat16: 2**-8 if torch.cuda.is_available() else 2**-7}
"""Of one rounding of the type; float32 has some more of its own behind sums of thousands."""
Draw = Callable[..., Tensor]

dtypes = pytest.mark.parametrize("dtype", ROUNDING, ids=str)


@pytest.fixture
def draw(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Draw:
    """Normal numbers that differ in every run; the seed is printed where a test fails. New memory is NaN."""
    monkeypatch.setattr(dispatch, "MOST_ROWS", 2)
    seed = torch.seed()
    print("seed", seed)
    generator, empty = torch.Generator().manual_seed(seed), torch.empty

    def poisoned(*shape: object, dtype: torch.dtype, device: torch.device) -> Tensor:
        return empty(*shape, dtype=dtype, device=device).fill_(float("nan"))

    def drawn(dtype: torch.dtype, *shape: int, scale: float = 1.0, offset: float = 0.0) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64) * scale + offset
        return values.to(dtype).to(device)

    monkeypatch.setattr(torch, "empty", poisoned)
    return drawn


def check(actual: Tensor, exact: Tensor, slack: float = 1.0) -> None:
    """Compare, and then see that the comparison would have caught one wrong element."""
    bound = slack * ROUNDING[actual.dtype]

    def error(values: Tensor) -> float:
        return float(((values.double() - exact).abs() / (exact.abs() + 1)).nan_to_num(math.inf).max())

    assert actual.shape == exact.shape
    assert error(actual) < bound
    planted = actual.clone()
    planted.view(-1)[planted.numel() // 2] += 3 * bound * (1 + planted.abs().max())
    assert error(planted) > bound


def exactly(norm: Norm) -> Norm:
    parts = (part if part is None else part.double() for part in (norm.weight, norm.bias))
    return Norm(*parts, norm.eps, norm.centred)


@dtypes
@pytest.mark.parametrize(("rows", "width", "outputs"), [(1, 64, 9), (2, 100, 300), (1, 4096, 5), (1, 20000, 3)])
def test_product(draw: Draw, dtype: torch.dtype, rows: int, width: int, outputs: int) -> None:
    inputs, weight = draw(dtype, rows, width), draw(dtype, outputs, width, scale=width**-0.5)
    assert few_rows.serves(inputs, weight)
    exact = inputs.double() @ weight.double().t()
    check(few_rows.few_rows(inputs, weight), exact, slack=2 if dtype == torch.float32 else 1)


@dtypes
@pytest.mark.parametrize("activation", [None, *Activation])
def test_what_is_around_the_product(draw: Draw, dtype: torch.dtype, activation: Activation | None) -> None:
    rows, width, outputs = 2, 96, 40
    # Of a wider tensor, as attention leaves it.
    inputs = draw(dtype, rows, 2 * width)[:, width:]
    weight, bias = draw(dtype, outputs, width, scale=0.1), draw(dtype, outputs)
    residual = draw(dtype, rows, outputs // 2 if activation is Activation.SILU_AND_MUL else outputs)
    before = residual.clone()
    operands = (inputs.double(), weight.double(), bias.double())
    exact = few_rows_reference(*operands, activation, residual.double())
    slack = 8 if activation is Activation.GELU else 2  # torch computes it, from a rounded product, and rounds again
    check(few_rows.few_rows(inputs, weight, bias, activation, residual), exact, slack)
    assert torch.equal(residual, before)


def test_nan_is_no_zero(draw: Draw) -> None:
    """The finite check must see it."""
    inputs, weight = draw(torch.float32, 1, 64), draw(torch.float32, 8, 64)
    weight[3, 5] = math.nan
    found = few_rows.few_rows(inputs, weight, None, Activation.RELU)
    assert found[:, 3].isnan().all() and not found[:, :3].isnan().any()


def test_what_is_not_served(draw: Draw) -> None:
    weight = draw(torch.float32, 8, 64)
    assert not few_rows.serves(draw(torch.float32, 3, 64), weight)
    assert not few_rows.serves(draw(torch.float32, 0, 64), weight)
    assert not few_rows.serves(draw(torch.float64, 1, 64), weight.double())
    assert not few_rows.serves(draw(torch.float32, 1, 64), weight.half())
    assert not few_rows.serves(draw(torch.float32, 64, 1).t(), draw(torch.float32, 64, 8).t())


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("centred", [True, False])
def test_residual_stream(draw: Draw, rows: int, centred: bool) -> None:
    """Two parts of a layer added to the stream, with what is read between them, as one pass or as several."""
    dtype, width = torch.float32, 64

    def linear(outputs: int, inputs: int) -> Linear:
        weight, bias = draw(dtype, outputs, inputs, scale=inputs**-0.5), draw(dtype, outputs)
        return Linear(nn.Parameter(weight, False), nn.Parameter(bias, False))

    def plain(layer: Linear, inputs: Tensor) -> Tensor:
        return inputs @ layer.weight.double().t() + layer.bias.double()

    norm = Norm(draw(dtype, width), draw(dtype, width) if centred else None, 1e-5, centred)
    first, up, down = linear(width, width), linear(128, width), linear(width, 128)
    hidden = draw(dtype, rows, width)
    before = hidden.clone()
    residual = Residual(hidden)
    residual.add(first, residual.through(norm, first))
    inner = residual.through(norm, up, Activation.RELU)
    residual.add(down, inner)
    exact = hidden.double()
    exact = exact + plain(first, plain(first, exactly(norm)(exact)))
    exact_inner = plain(up, exactly(norm)(exact)).relu()
    check(inner, exact_inner, slack=16)
    check(residual.values, exact + plain(down, exact_inner), slack=16)
    residual.add(first, inner[:, :width])
    residual.replace(norm)
    exact = exact + plain(down, exact_inner)
    check(residual.values, exactly(norm)(exact + plain(first, exact_inner[:, :width])), slack=32)
    assert torch.equal(hidden, before), "what the stream was made of stays"
