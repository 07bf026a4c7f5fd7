"""Norms, rotary embedding and activations against their formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch
from ppkernels.activation import silu_and_mul
from ppkernels.norms import layer_norm, rms_norm
from ppkernels.rotary import rotary_tables, rotate, rotate_reference
from torch import Tensor

TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 1e-2, torch.bfloat16: 6e-2}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def draw(dtype: torch.dtype, *shape: int, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=TOLERANCE[dtype])


@dtypes
def test_rms_norm(dtype: torch.dtype) -> None:
    values, weight = draw(dtype, 9, 24), draw(dtype, 24, seed=6)
    wide = values.double()
    expected = wide / (wide.square().sum(-1, keepdim=True) / 24 + 1e-3).sqrt() * weight.double()
    near(rms_norm(values, weight, 1e-3), expected, dtype)


@dtypes
def test_rms_norm_of_heads_takes_a_weight_a_head(dtype: torch.dtype) -> None:
    values, weight = draw(dtype, 9, 5, 8)[:, 1:4], draw(dtype, 3, 8, seed=6)
    wide = values.double()
    expected = wide / (wide.square().sum(-1, keepdim=True) / 8 + 1e-6).sqrt() * weight.double()
    near(rms_norm(values, weight, 1e-6), expected, dtype)


@dtypes
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm(dtype: torch.dtype, affine: bool) -> None:
    values = draw(dtype, 9, 24)
    weight, bias = (draw(dtype, 24, seed=6), draw(dtype, 24, seed=7)) if affine else (None, None)
    wide = values.double()
    centred = wide - wide.sum(-1, keepdim=True) / 24
    expected = centred / (centred.square().sum(-1, keepdim=True) / 24 + 1e-5).sqrt()
    if weight is not None and bias is not None:
        expected = expected * weight.double() + bias.double()
    near(layer_norm(values, weight, bias, 1e-5), expected, dtype)


@dtypes
def test_rotary_turns_each_pair_by_position_times_frequency(dtype: torch.dtype) -> None:
    frequencies = torch.tensor([1.0, 0.25, 0.01, 0.002])
    cos, sin = rotary_tables(frequencies, 64, 1.25, dtype)
    positions = torch.tensor([0, 3, 63, 17, 17])
    fused = draw(dtype, 5, 6, 8)
    before = fused.clone().double()
    again = fused.clone()
    rotate(fused, 4, cos, sin, positions)
    rotate_reference(again, 4, cos, sin, positions)
    torch.testing.assert_close(fused, again, rtol=0, atol=TOLERANCE[dtype])
    assert torch.equal(fused[:, 4:].double(), before[:, 4:]), "what is behind the rotated heads stays"
    expected = torch.empty(5, 4, 8, dtype=torch.float64)
    for token, position in enumerate(positions.tolist()):
        for pair, frequency in enumerate(frequencies.tolist()):
            c, s = math.cos(position * frequency) * 1.25, math.sin(position * frequency) * 1.25
            x, y = before[token, :4, pair], before[token, :4, pair + 4]
            expected[token, :, pair] = x * c - y * s
            expected[token, :, pair + 4] = y * c + x * s
    # Angles are float32 in every dtype, on purpose.
    torch.testing.assert_close(fused[:, :4].double(), expected, rtol=0, atol=max(TOLERANCE[dtype], 2e-5))


@dtypes
def test_silu_and_mul(dtype: torch.dtype) -> None:
    both = draw(dtype, 9, 32)
    before = both.clone()
    gate, up = both[:, :16].double(), both[:, 16:].double()
    near(silu_and_mul(both), gate / (1 + (-gate).exp()) * up, dtype)
    assert torch.equal(both, before)
