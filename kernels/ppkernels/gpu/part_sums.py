"""Sums of parts that other ranks have copied here. The kernel waits for no rank: its stream has waited before."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_TILE, _WARPS = 4096, 8
"""Elements of a program, and its warps."""


def sum_parts(part: Tensor, inbox: Tensor, rank: int, output: Tensor) -> None:
    """Write the sum of all ranks' parts [T, W] to `output`, added in float32 in rank order; all are contiguous.

    `part` is that of `rank`. `inbox` [ranks - 1, at least T * W] has those of the others, in order, each in its row.
    """
    elements = part.numel()
    _sum_parts[(triton.cdiv(elements, _TILE),)](
        part, inbox, inbox.stride(0), output, elements, RANK=rank, SIZE=len(inbox) + 1, TILE=_TILE, num_warps=_WARPS
    )


@triton.jit(do_not_specialize=["elements"])
def _sum_parts(
    part, inbox, inbox_stride, output, elements, RANK: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.float32)
    for peer in tl.static_range(SIZE):
        if peer == RANK:
            total += tl.load(part + at, mask=at < elements, other=0.0).to(tl.float32)
        else:
            place = inbox + (peer - (peer > RANK)) * inbox_stride + at
            total += tl.load(place, mask=at < elements, other=0.0).to(tl.float32)
    tl.store(output + at, total.to(output.dtype.element_ty), mask=at < elements)
