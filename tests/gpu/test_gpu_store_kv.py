"""Keys and values go into exactly the slots that they are for, on a GPU."""

from __future__ import annotations

import pytest
import torch
from ppkernels.kv_layout import cache_shape, keys, values
from ppkernels.store_kv import store_kv, store_kv_reference

NAN = float("nan")


@pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("store", [store_kv, store_kv_reference])
@pytest.mark.parametrize(("kv_heads", "width"), [(3, 4), (2, 80), (32, 128)])
def test_each_token_goes_to_its_slot_and_nothing_else_changes(
    store, dtype: torch.dtype, kv_heads: int, width: int, integers: torch.dtype, device: torch.device
) -> None:
    blocks, block_size = 5, 16
    kv = torch.full(cache_shape(blocks, block_size, kv_heads, width, device), NAN, dtype=dtype, device=device)
    slots = torch.tensor([0, 15, 16, 47, 79, 33], dtype=integers, device=device)
    fused = torch.randn((len(slots), 2 + 2 * kv_heads, width), device=device).to(dtype)
    store(kv, fused, slots)
    for token, slot in enumerate(slots.tolist()):
        assert torch.equal(keys(kv)[slot // 16, :, :, slot % 16], fused[token, 2 : 2 + kv_heads])
        assert torch.equal(values(kv)[slot // 16, :, slot % 16], fused[token, 2 + kv_heads :])
    assert int((~kv.isnan()).sum()) == len(slots) * 2 * kv_heads * width


def test_a_slot_outside_of_the_cache_is_left_out(device: torch.device) -> None:
    """Graphs pad batches with slot -1."""
    memory = torch.zeros(cache_shape(4, 16, 1, 8, device), device=device)
    fused = torch.ones((4, 4, 8), device=device)
    store_kv(memory[1:3], fused, torch.tensor([-1, 32, 31, -16], device=device))
    assert memory.sum() == 16
    assert torch.equal(keys(memory)[2, 0, :, 15], fused[0, 0])
    assert torch.equal(values(memory)[2, 0, 15], fused[0, 0])
