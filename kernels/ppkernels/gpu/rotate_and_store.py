"""Rotate queries and keys and write keys and values into their slots, in one launch.

For a decode of 128 rows of a Llama-8B shape on an H200 one launch takes 2.1 µs, two launches 3.4
µs. For 4,096 tokens both take 27 µs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ppkernels.gpu.chain import chains, follow, let_follow

HEADS = 8
"""Heads of a program."""


def rotate_and_store(
    kv: Tensor, fused: Tensor, heads: int, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor
) -> None:
    """Rotate `fused`, contiguous, and store it. A token with a slot outside of the cache is
    skipped: graphs pad with -1.
    """
    blocks, _, block_size, kv_heads, head_dim = kv.shape
    tokens = len(fused)
    if tokens:
        chain = chains(kv.device)
        _rotate_and_store[tokens, triton.cdiv(heads + 2 * kv_heads, HEADS)](
            kv,
            fused,
            cos,
            sin,
            positions,
            slots,
            blocks * block_size,
            QUERY_HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            WIDE=triton.next_power_of_2(head_dim // 2),
            BLOCK_SIZE=block_size,
            HEADS=HEADS,
            CHAIN=chain,
            num_warps=4,
            launch_pdl=chain,
        )


@triton.jit(do_not_specialize=["capacity"], do_not_specialize_on_alignment=["positions", "slots"])
def _rotate_and_store(
    kv,
    fused,
    cos,
    sin,
    positions,
    slots,
    capacity,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    CHAIN: tl.constexpr,
):
    follow(CHAIN)
    let_follow(CHAIN)  # earlier, attention would fill multiprocessors unevenly: the product before runs
    half: tl.constexpr = HEAD_DIM // 2
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    inside = column < half
    # The two halves of the tables differ only in the sign of the sines.
    angle = tl.load(positions + token).to(tl.int64) * HEAD_DIM + half + column
    c = tl.load(cos + angle, inside, 0.0).to(tl.float32)[None, :]
    s = tl.load(sin + angle, inside, 0.0).to(tl.float32)[None, :]
    place = fused + (token * (QUERY_HEADS + 2 * KV_HEADS) + head)[:, None] * HEAD_DIM + column[None, :]
    kept = (head < QUERY_HEADS + 2 * KV_HEADS)[:, None] & inside[None, :]
    first = tl.load(place, kept, 0.0)
    second = tl.load(place + half, kept, 0.0)
    turns = (head < QUERY_HEADS + KV_HEADS)[:, None]
    one, two = first.to(tl.float32), second.to(tl.float32)
    first = tl.where(turns, (one * c - two * s).to(first.dtype), first)
    second = tl.where(turns, (two * c + one * s).to(second.dtype), second)
    query = (head < QUERY_HEADS)[:, None]
    tl.store(place, first, kept & query)
    tl.store(place + half, second, kept & query)

    slot = tl.load(slots + token).to(tl.int64)
    stored = kept & (head >= QUERY_HEADS)[:, None] & (slot >= 0) & (slot < capacity)
    # A block's values follow its keys: value heads continue the numbers of the key heads, one block further.
    ahead = tl.where(turns, 0, BLOCK_SIZE - 1) * KV_HEADS
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    row = (block * (2 * BLOCK_SIZE) + offset) * KV_HEADS + ahead + (head - QUERY_HEADS)[:, None]
    target = kv + row * HEAD_DIM + column[None, :]
    tl.store(target, first, stored)
    tl.store(target + half, second, stored)
