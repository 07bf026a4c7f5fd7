"""Write the keys and values of new tokens into their slots."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from ppkernels import gpu, jit
from ppkernels.kv_layout import keys, transposed, values


def store_kv(kv: Tensor, fused: Tensor, slots: Tensor) -> None:
    """Write the last 2 * kv_heads heads of `fused` [T, heads, head_dim], keys first, into `kv` (see `kv_layout`).

    `slots` [T] are block * block_size + offset. A slot beyond the cache raises IndexError and nothing is written; on a
    GPU, where raising would wait for the device, such a token is left out.
    """
    if gpu.serves(kv) and fused.is_contiguous():
        from ppkernels.gpu.store_kv import store_kv as store_on_gpu

        store_on_gpu(kv, fused, slots)
    elif not (jit.serves(kv) and fused.is_contiguous()):
        store_kv_reference(kv, fused, slots)
    elif not store_rows(transposed(kv).numpy(), kv.numpy(), fused.numpy(), slots.numpy()):
        refuse_slots(kv, slots)


def refuse_slots(kv: Tensor, slots: Tensor) -> NoReturn:
    """Raise IndexError: a kernel found some of `slots` outside of `kv`."""
    capacity = kv.shape[0] * kv.shape[3]
    raise IndexError(f"slots {int(slots.min())} to {int(slots.max())} reach out of a cache of {capacity}")


def store_kv_reference(kv: Tensor, fused: Tensor, slots: Tensor) -> None:
    """Torch version of `store_kv`."""
    _, kv_heads, block_size, _ = values(kv).shape
    blocks, offsets = slots // block_size, slots % block_size
    keys(kv)[blocks, :, :, offsets] = fused[:, -2 * kv_heads : -kv_heads]
    values(kv)[blocks, :, offsets] = fused[:, -kv_heads:]


@jit.compiled
def store_rows(keys: Any, values: Any, fused: Any, slots: Any) -> bool:
    """Write all tokens, or none and return False."""
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
    """Return whether all `slots` are ones of a cache of `capacity`."""
    for slot in slots:  # noqa: SIM110 (numba has no generators)
        if slot < 0 or slot >= capacity:
            return False
    return True
