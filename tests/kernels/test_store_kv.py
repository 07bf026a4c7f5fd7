"""Keys and values arrive in their slots and nowhere else."""

from __future__ import annotations

import pytest
import torch
from ppkernels.store_kv import kv_rows, store_kv


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block_size", [8, 16])
def test_slots_are_written_and_nothing_else(dtype: torch.dtype, block_size: int) -> None:
    generator = torch.Generator().manual_seed(4)
    kv = torch.full((7, 2, block_size, 3, 4), float("nan"), dtype=dtype)
    slots = (torch.randperm(6 * block_size, generator=generator) + block_size)[:19]
    fused = torch.randn((19, 11, 4), generator=generator, dtype=torch.float64).to(dtype)
    new = fused[:, 5:].view(19, 2, 3, 4)
    store_kv(kv, new, kv_rows(slots, block_size))
    for token, slot in enumerate(slots.tolist()):
        for which in range(2):
            cell = kv[slot // block_size, which, slot % block_size]
            assert torch.equal(cell, new[token, which])
            cell.fill_(float("nan"))
    assert bool(kv.isnan().all())


def test_a_slot_beyond_the_cache_raises() -> None:
    kv = torch.zeros((2, 2, 8, 1, 4))
    with pytest.raises(IndexError):
        store_kv(kv, torch.ones((1, 2, 1, 4)), kv_rows(torch.tensor([16]), 8))
    assert not kv.any()
