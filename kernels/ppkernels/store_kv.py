"""Write the keys and values of new tokens into their slots."""

from __future__ import annotations

import torch
from torch import Tensor


def kv_rows(slot_mapping: Tensor, block_size: int) -> Tensor:
    """Return [T, 2]: the rows of key and value of each slot in a cache seen as [blocks * 2 * block_size, ...]."""
    key = slot_mapping + torch.div(slot_mapping, block_size, rounding_mode="floor") * block_size
    return torch.stack((key, key + block_size), dim=1)


def store_kv(kv: Tensor, key_value: Tensor, rows: Tensor) -> None:
    """Write `key_value` [T, 2, kv_heads, head_dim] into `kv` [blocks, 2, block_size, kv_heads, head_dim].

    `rows` is `kv_rows` of the step's slots. `kv` is contiguous; a slot beyond it raises IndexError.
    """
    store_kv_reference(kv, key_value, rows)


def store_kv_reference(kv: Tensor, key_value: Tensor, rows: Tensor) -> None:
    """Torch version of `store_kv`."""
    kv.view(-1, *kv.shape[3:])[rows] = key_value
