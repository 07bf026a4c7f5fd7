"""Write the keys and values of new tokens into their slots, on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ppkernels.gpu.chain import chains, follow, let_follow

TILE = 2048
"""Elements of a program."""


def store_kv(kv: Tensor, fused: Tensor, slots: Tensor) -> None:
    """Write keys and values of `fused` to `kv`. A token with a slot outside of the cache is
    skipped: graphs pad with -1.
    """
    blocks, _, block_size, kv_heads, head_dim = kv.shape
    tokens, heads = fused.shape[:2]
    size = kv_heads * head_dim
    if tokens:
        chain = chains(kv.device)
        _store[tokens, 2, triton.cdiv(size, TILE)](
            kv,
            fused,
            slots,
            blocks * block_size,
            fused.stride(0),
            (heads - 2 * kv_heads) * head_dim,
            BLOCK_SIZE=block_size,
            SIZE=size,
            TILE=min(TILE, triton.next_power_of_2(size)),
            CHAIN=chain,
            num_warps=4,
            launch_pdl=chain,
        )


@triton.jit(do_not_specialize=["capacity"], do_not_specialize_on_alignment=["slots"])
def _store(
    kv,
    fused,
    slots,
    capacity,
    stride,
    first,
    BLOCK_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    CHAIN: tl.constexpr,
):
    follow(CHAIN)
    let_follow(CHAIN)  # earlier, attention would fill multiprocessors unevenly: the product before runs
    token, half = tl.program_id(0).to(tl.int64), tl.program_id(1)  # half 0: keys, 1: values
    slot = tl.load(slots + token).to(tl.int64)
    if (slot < 0) | (slot >= capacity):
        return
    element = tl.program_id(2) * TILE + tl.arange(0, TILE)
    inside = element < SIZE
    new = tl.load(fused + token * stride + first + half * SIZE + element, inside)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    tl.store(kv + ((block * 2 + half) * BLOCK_SIZE + offset) * SIZE + element, new, inside)
