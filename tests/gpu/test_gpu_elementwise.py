"""GPU norms, rotary and activations against their formulas in float64, on fresh inputs and poisoned outputs."""

from __future__ import annotations

import math

import pytest
import torch
from ppkernels import activation, gpu, norms, rotary
from ppkernels.gpu import norms as gpu_norms
from torch import Tensor

# Triton's interpreter cuts bfloat16 off, where a GPU rounds to the nearest.
CUTS = not torch.cuda.is_available()
ROUNDING = {torch.float32: 2**-18, torch.float16: 2**-10, torch.bfloat16: 2**-6 if CUTS else 2**-7}
"""Bound on |actual - exact| / (|exact| + 1): two roundings of the type, or a few of float32."""

dtypes = pytest.mark.parametrize("dtype", ROUNDING, ids=str)


@pytest.fixture
def draw(device: torch.device) -> Draw:
    return Draw(device)


class Draw:
    """Normal numbers that differ in every run; the seed is printed where a test fails."""

    def __init__(self, device: torch.device) -> None:
        seed = torch.seed()
        print("seed", seed)
        self.device, self.generator = device, torch.Generator().manual_seed(seed)

    def __call__(self, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale
        return values.to(dtype).to(self.device)


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let new memory be NaN: what a kernel does not write is seen."""

    empty = torch.empty

    def poisoned(*shape: object, dtype: torch.dtype, device: torch.device) -> Tensor:
        return empty(*shape, dtype=dtype, device=device).fill_(float("nan"))

    monkeypatch.setattr(torch, "empty", poisoned)


def error(actual: Tensor, exact: Tensor) -> float:
    return float(((actual.double() - exact).abs() / (exact.abs() + 1)).nan_to_num(math.inf).max())


def check(actual: Tensor, exact: Tensor, slack: float = 1) -> None:
    """Compare, and then see that the comparison would have caught one wrong element."""
    bound = ROUNDING[actual.dtype] * slack
    assert actual.shape == exact.shape
    assert error(actual, exact) < bound
    planted = actual.clone()
    planted.view(-1)[planted.numel() // 2] += 3 * bound * (1 + planted.abs().max())
    assert error(planted, exact) > bound


def normed(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, centred: bool) -> Tensor:
    if centred:
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    x = x if weight is None else x * weight.double()
    return x if bias is None else x + bias.double()


@dtypes
@pytest.mark.parametrize(("rows", "width"), [(1, 4096), (5, 768), (33, 128), (3, 16384), (2, 5120), (7, 24)])
def test_rms_norm(draw: Draw, dtype: torch.dtype, rows: int, width: int) -> None:
    values, weight = draw(dtype, rows, width, scale=3), draw(dtype, width)
    check(norms.rms_norm(values, weight, 1e-3), normed(values.double(), weight, None, 1e-3, centred=False))


@dtypes
def test_rms_norm_of_heads_inside_a_fused_tensor(draw: Draw, dtype: torch.dtype) -> None:
    fused = draw(dtype, 9, 8, 128)
    heads = fused[:, 2:7]
    for weight in (draw(dtype, 128), draw(dtype, 5, 128)):
        check(norms.rms_norm(heads, weight, 1e-6), normed(heads.double(), weight, None, 1e-6, centred=False))


@dtypes
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("rows", "width"), [(1, 4096), (33, 100), (2, 9216)])
def test_layer_norm(draw: Draw, dtype: torch.dtype, affine: bool, rows: int, width: int) -> None:
    # Far from zero, so that a variance as a difference of squares would be lost.
    values = draw(dtype, rows, width) + 20
    weight, bias = (draw(dtype, width), draw(dtype, width)) if affine else (None, None)
    exact = normed(values.double(), weight, bias, 1e-5, centred=True)
    check(norms.layer_norm(values, weight, bias, 1e-5), exact, slack=8)


@dtypes
@pytest.mark.parametrize("centred", [True, False])
def test_norm_of_an_updated_residual_stream(draw: Draw, dtype: torch.dtype, centred: bool) -> None:
    before, update = draw(dtype, 6, 768), draw(dtype, 6, 768)
    weight, bias = draw(dtype, 768), draw(dtype, 768)
    residual = before.clone()
    if centred:
        output = norms.add_layer_norm(residual, update, weight, bias, 1e-5)
    else:
        output, bias = norms.add_rms_norm(residual, update, weight, 1e-5), None
    check(residual, before.double() + update.double())
    check(output, normed(residual.double(), weight, bias, 1e-5, centred=centred))


@pytest.mark.parametrize("dtype", [torch.float16] if CUTS else [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_rounded_as_by_the_reference(draw: Draw, dtype: torch.dtype) -> None:
    """Nearly all elements are the same bit by bit; a rounding left out would change every third one or so."""
    values, weight = draw(dtype, 8, 1024), draw(dtype, 1024)
    same = gpu_norms.rms_norm(values, weight, 1e-6) == norms.rms_norm_reference(values, weight, 1e-6)
    assert same.float().mean() > 0.97
    residual, update = draw(dtype, 8, 512), draw(dtype, 8, 512)
    expected = residual + update
    norms.add_rms_norm(residual, update, draw(dtype, 512), 1e-6)
    assert torch.equal(residual, expected), "the sum is rounded once, and the norm is of what is kept"
    both = draw(dtype, 8, 512)
    same = activation.silu_and_mul(both) == activation.silu_and_mul_reference(both)
    assert same.float().mean() > 0.97


@dtypes
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("heads", "count", "head_dim"), [(6, 4, 128), (41, 33, 64), (3, 2, 80)])
def test_rotary(draw: Draw, dtype: torch.dtype, index: torch.dtype, heads: int, count: int, head_dim: int) -> None:
    frequencies = 10000.0 ** -(torch.arange(head_dim // 2, device=draw.device) * 2 / head_dim)
    cos, sin = rotary.rotary_tables(frequencies, 64, 1.25, dtype)
    positions = torch.tensor([0, 3, 63, 17, 17], dtype=index, device=draw.device)
    fused = draw(dtype, 5, heads, head_dim)
    x = fused.double()
    rotary.rotate(fused, count, cos, sin, positions)
    half = head_dim // 2
    c, s = cos.double()[positions.long(), None, :half], -sin.double()[positions.long(), None, :half]
    first, second = x[:, :count, :half], x[:, :count, half:]
    check(fused[:, :count].contiguous(), torch.cat((first * c - second * s, second * c + first * s), -1))
    assert torch.equal(fused[:, count:].double(), x[:, count:]), "what is behind the rotated heads stays"


@dtypes
@pytest.mark.parametrize(("rows", "width"), [(1, 14336), (9, 100)])
def test_silu_and_mul(draw: Draw, dtype: torch.dtype, rows: int, width: int) -> None:
    both = draw(dtype, rows, 2 * width, scale=4)
    before = both.clone()
    gate, up = both[:, :width].double(), both[:, width:].double()
    check(activation.silu_and_mul(both), gate / (1 + (-gate).exp()) * up)
    assert torch.equal(both, before)


@dtypes
def test_linear_relu(draw: Draw, dtype: torch.dtype) -> None:
    inputs, weight, bias = draw(dtype, 8, 64, scale=0.1), draw(dtype, 32, 64), draw(dtype, 32)
    exact = (inputs.double() @ weight.double().t() + bias.double()).relu()
    check(activation.linear_relu(inputs, weight, bias), exact)


def test_no_rows_are_no_launch(draw: Draw) -> None:
    nothing = draw(torch.float32, 0, 64)
    assert norms.rms_norm(nothing, draw(torch.float32, 64), 1e-6).shape == (0, 64)
    assert activation.silu_and_mul(nothing).shape == (0, 32)
    rotary.rotate(nothing.view(0, 2, 32), 1, nothing, nothing, torch.zeros(0, dtype=torch.int64))
    assert gpu.serves(nothing)
