"""Sums of parts that other ranks have copied here. The kernels wait for no rank: their stream has waited before."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppkernels.gpu.collectives import NormOf
from ppkernels.gpu.norms import normed

_TILE, _WARPS = 4096, 8
"""Elements of a program of `sum_parts`, and its warps."""
_WARP = 512
"""Elements of a row that a warp adds to a residual stream."""


def add_parts(part: Tensor, inbox: Tensor, rank: int, residual: Tensor) -> None:
    """Add all ranks' parts [T, W] to `residual` [T, W] in place, in rank order.

    `inbox` [ranks - 1, at least T * W] has the parts of the others, in order, contiguous; `part` is that of `rank`.
    """
    _add(part, inbox, rank, residual, None, None)


def add_parts_norm(part: Tensor, inbox: Tensor, rank: int, residual: Tensor, norm: NormOf) -> Tensor:
    """As `add_parts`; return the norm of the sum [T, W]."""
    output = torch.empty_like(part)
    _add(part, inbox, rank, residual, norm, output)
    return output


def _add(part: Tensor, inbox: Tensor, rank: int, residual: Tensor, norm: NormOf | None, output: Tensor | None) -> None:
    rows, width = part.shape
    weight, bias = (norm.weight, norm.bias) if norm is not None else (None, None)
    block = triton.next_power_of_2(width)
    _add_rows[(rows,)](
        part,
        inbox,
        inbox.stride(0),
        residual,
        residual.stride(0),
        weight if weight is not None else part,
        bias if bias is not None else part,
        output if output is not None else part,
        norm.eps if norm is not None else 0.0,
        WIDTH=width,
        RANK=rank,
        SIZE=len(inbox) + 1,
        NORM=norm is not None,
        CENTRED=norm is not None and norm.centred,
        WEIGHT=weight is not None,
        BIAS=bias is not None,
        BLOCK=block,
        num_warps=min(max(block // _WARP, 4), 32),
    )


@triton.jit
def _add_rows(
    part, inbox, inbox_stride, residual, residual_stride, weight, bias, output, eps,
    WIDTH: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, NORM: tl.constexpr, CENTRED: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program p takes row p of WIDTH <= BLOCK columns."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = row * WIDTH + column
    total = tl.zeros((BLOCK,), tl.float32)
    for peer in tl.static_range(SIZE):
        if peer == RANK:
            total += tl.load(part + at, mask=inside, other=0.0).to(tl.float32)
        else:
            row_of = peer - 1 if peer > RANK else peer
            total += tl.load(inbox + row_of * inbox_stride + at, mask=inside, other=0.0).to(tl.float32)
    place = residual + row * residual_stride + column
    total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    # The residual stream keeps the rounded sum, so the norm is of that.
    kept = total.to(residual.dtype.element_ty)
    tl.store(place, kept, mask=inside)
    if NORM:
        values = normed(kept.to(tl.float32), inside, WIDTH, eps, CENTRED, output.dtype.element_ty, 0)
        if WEIGHT:
            values *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            values += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(output + at, values.to(output.dtype.element_ty), mask=inside)


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
