"""Keys and values go into exactly the slots that they are for."""

from __future__ import annotations

import pytest
import torch
from ppkernels.kv_layout import keys, values
from ppkernels.store_kv import store_kv, store_kv_reference

NAN = float("nan")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("store", [store_kv, store_kv_reference])
def test_each_token_goes_to_its_slot_and_nothing_else_changes(store, dtype: torch.dtype) -> None:
    blocks, block_size, kv_heads, width = 5, 8, 3, 4
    kv = torch.full((blocks, 2, kv_heads, block_size, width), NAN, dtype=dtype)
    slots = torch.tensor([0, 7, 8, 23, 39, 17])
    fused = torch.randn((len(slots), 2 + 2 * kv_heads, width), generator=torch.Generator().manual_seed(0)).to(dtype)
    store(kv, fused, slots)
    for token, slot in enumerate(slots.tolist()):
        assert torch.equal(keys(kv)[slot // 8, :, :, slot % 8], fused[token, 2:5])
        assert torch.equal(values(kv)[slot // 8, :, slot % 8], fused[token, 5:])
    assert int((~kv.isnan()).sum()) == len(slots) * 2 * kv_heads * width


@pytest.mark.parametrize("store", [store_kv, store_kv_reference])
@pytest.mark.parametrize("slot", [16, 17, 4000])
def test_a_slot_beyond_the_cache_is_refused(store, slot: int) -> None:
    kv = torch.zeros((2, 2, 1, 8, 4))
    with pytest.raises(IndexError):
        store(kv, torch.ones((1, 2, 4)), torch.tensor([slot]))
    assert not kv.any()


def test_a_negative_slot_is_refused_by_the_kernel() -> None:
    with pytest.raises(IndexError, match="slots -1 to 3 reach out of a cache of 16"):
        store_kv(torch.zeros((2, 2, 1, 8, 4)), torch.ones((2, 2, 4)), torch.tensor([3, -1]))
