"""Queries are rotated in place, keys and values go rotated and as they are into exactly their slots."""

from __future__ import annotations

import pytest
import torch
from ppkernels.kv_layout import cache_shape, keys, values
from ppkernels.rotary import rotary_tables, rotate_reference
from ppkernels.rotate_and_store import rotate_and_store
from ppkernels.store_kv import store_kv_reference

ERROR = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SLOTS = [0, 15, -1, 47, 80, 33]
"""Of a cache of 80 slots: one is padding, one is beyond the cache."""


def off(output: torch.Tensor, plain: torch.Tensor) -> float:
    """Return ||output - plain|| / ||plain||; NaN is inf."""
    error = (output.double() - plain).norm() / plain.norm()
    return float(error.nan_to_num(torch.inf))


@pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(3, 3, 64), (9, 3, 80), (32, 8, 128)])
def test_equals_the_steps_in_float64(
    heads: int, kv_heads: int, width: int, dtype: torch.dtype, integers: torch.dtype, device: torch.device
) -> None:
    tables = rotary_tables(10000.0 ** (-torch.arange(0, width, 2, device=device) / width), 100, 1.0, dtype)
    kv = torch.full(cache_shape(5, 16, kv_heads, width, device), torch.nan, dtype=dtype, device=device)
    fused = torch.randn((len(SLOTS), heads + 2 * kv_heads, width), device=device).to(dtype)
    positions = torch.tensor([0, 99, 3, 50, 7, 64], dtype=integers, device=device)
    plain = fused.double()
    rotate_reference(plain, heads + kv_heads, *(table.double() for table in tables), positions)

    rotate_and_store(kv, fused, heads, *tables, positions, torch.tensor(SLOTS, dtype=integers, device=device))
    assert off(fused[:, :heads], plain[:, :heads]) < ERROR[dtype]
    stored = [token for token, slot in enumerate(SLOTS) if 0 <= slot < 80]
    blocks, offsets = (torch.tensor([SLOTS[token] for token in stored], device=device) // 16,
                       torch.tensor([SLOTS[token] for token in stored], device=device) % 16)  # fmt: skip
    assert off(keys(kv)[blocks, :, :, offsets], plain[stored, heads : heads + kv_heads]) < ERROR[dtype]
    assert torch.equal(values(kv)[blocks, :, offsets].double(), plain[stored, heads + kv_heads :])
    assert int((~kv.isnan()).sum()) == len(stored) * 2 * kv_heads * width


@pytest.mark.parametrize("error", ["a position too far", "a slot too far"])
def test_planted_errors_show(error: str, device: torch.device) -> None:
    tables = rotary_tables(10000.0 ** (-torch.arange(0, 64, 2, device=device) / 64), 100, 1.0, torch.float32)
    fused = torch.randn((1, 4, 64), device=device)
    positions, slots = torch.tensor([20], device=device), torch.tensor([5], device=device)
    caches = [torch.zeros(cache_shape(1, 16, 1, 64, device), device=device) for _ in range(2)]
    rotated = fused.clone()
    rotate_reference(rotated, (2 + fused.shape[1]) // 2, *tables, positions)
    store_kv_reference(caches[0], rotated, slots)
    wrong = positions + (error == "a position too far"), slots + (error == "a slot too far")
    rotate_and_store(caches[1], fused.clone(), 2, *tables, *wrong)
    assert off(caches[1], caches[0].double()) > 10 * ERROR[torch.float32]
