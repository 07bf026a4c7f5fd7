"""Write the keys and values of new tokens into their slots, on a CPU."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from ppkernels.cpu import jit
from ppkernels.kv_layout import transposed


def store_kv(kv: Tensor, fused: Tensor, slots: Tensor) -> None:
    """Write keys and values of `fused` into `kv`. Raises IndexError before anything is written."""
    if not store_rows(transposed(kv).numpy(), kv.numpy(), fused.numpy(), slots.numpy()):
        refuse_slots(kv, slots)


def refuse_slots(kv: Tensor, slots: Tensor) -> NoReturn:
    """Raise IndexError: a kernel found some of `slots` outside of `kv`."""
    capacity = kv.shape[0] * kv.shape[3]
    raise IndexError(f"slots {int(slots.min())} to {int(slots.max())} reach out of a cache of {capacity}")


@jit.compiled
def store_rows(keys: Any, values: Any, fused: Any, slots: Any) -> bool:
    """Write all tokens and return True, or none and False with a slot outside of the cache."""
    blocks, _, kv_heads, block_size, head_dim = values.shape
    if not all_inside(slots, blocks * block_size):
        return False
    first = fused.shape[1] - 2 * kv_heads
    for token in range(len(slots)):
        block, offset = slots[token] // block_size, slots[token] % block_size
        for head in range(kv_heads):
            for i in range(head_dim):
                keys[block, 0, head, i, offset] = fused[token, first + head, i]
                values[block, 1, head, offset, i] = fused[token, first + kv_heads + head, i]
    return True


@jit.compiled
def all_inside(slots: Any, capacity: int) -> bool:
    """Return whether all `slots` are inside a cache of `capacity` slots."""
    for slot in slots:  # noqa: SIM110 (numba has no generators)
        if slot < 0 or slot >= capacity:
            return False
    return True
