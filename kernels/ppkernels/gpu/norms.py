"""RMS and layer norm on a GPU: a program takes whole rows, so that each value is read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppkernels.gpu.chain import chains, follow, let_follow

_TILE = 1024
"""Least elements of a program: narrower rows share one."""


def rms_norm(values: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of `values` [T, W], or [T, heads, W] with a `weight` [W] or [heads, W],
    dense rows.
    """
    return _norm(values, weight, None, eps, None, centred=False)


def layer_norm(values: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return the layer norm of `values` [T, W], dense rows."""
    return _norm(values, weight, bias, eps, None, centred=True)


def add_rms_norm(residual: Tensor, update: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `update` to `residual` [T, W] in place, and return the RMS norm of the sum."""
    return _norm(residual, weight, None, eps, update, centred=False)


def add_layer_norm(residual: Tensor, update: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Add `update` to `residual` [T, W] in place, and return the layer norm of the sum."""
    return _norm(residual, weight, bias, eps, update, centred=True)


def _norm(
    values: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, update: Tensor | None, *, centred: bool
) -> Tensor:
    output = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    if not output.numel():
        return output
    width = values.shape[-1]
    heads = values.shape[1] if values.dim() == 3 else 1
    rows = output.numel() // width
    block = triton.next_power_of_2(width)
    tile = max(1, min(_TILE // block, rows))
    chain = chains(values.device)
    _norm_rows[(triton.cdiv(rows, tile),)](
        values,
        update if update is not None else values,
        weight if weight is not None else values,
        bias if bias is not None else values,
        output,
        rows,
        heads,
        values.stride(0),
        values.stride(-2),
        update.stride(0) if update is not None else 0,
        weight.stride(0) if weight is not None and weight.dim() == 2 else 0,
        eps,
        width=width,
        CENTRED=centred,
        UPDATE=update is not None,
        WEIGHT=weight is not None,
        BIAS=bias is not None,
        TILE=triton.next_power_of_2(tile),
        BLOCK=block,
        CHAIN=chain,
        num_warps=min(max(block // 1024, 4), 32),
        launch_pdl=chain,
    )
    return output


@triton.jit(do_not_specialize=["rows"])
def _norm_rows(
    values,
    update,
    weight,
    bias,
    output,
    rows,
    heads,
    token_stride,
    head_stride,
    update_stride,
    weight_stride,
    eps,
    width: tl.constexpr,
    CENTRED: tl.constexpr,
    UPDATE: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """Norm TILE rows of BLOCK >= width columns, in float32."""
    let_follow(CHAIN)
    row = (tl.program_id(0) * TILE + tl.arange(0, TILE))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < width)
    token, head, row = (row // heads).to(tl.int64), (row % heads).to(tl.int64), row.to(tl.int64)
    if WEIGHT:
        scale = tl.load(weight + head * weight_stride + column, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    follow(CHAIN)
    place = values + token * token_stride + head * head_stride + column
    read = tl.load(place, mask=inside, other=0.0)
    x = read.to(tl.float32)
    if UPDATE:
        x += tl.load(update + row * update_stride + column, mask=inside, other=0.0).to(tl.float32)
        # The residual stream keeps the rounded sum, so the norm is of that.
        read = x.to(output.dtype.element_ty)
        tl.store(place, read, mask=inside)
        x = read.to(tl.float32)
    x = normed(x, inside, width, eps, CENTRED, output.dtype.element_ty, 1)
    if WEIGHT:
        x *= scale
    if BIAS:
        x += shift
    tl.store(output + row * width + column, x, mask=inside)


@triton.jit
def normed(
    x, inside, width: tl.constexpr, eps, CENTRED: tl.constexpr, output_type: tl.constexpr, AXIS: tl.constexpr
):  # fmt: skip
    """Return the norm of float32 `x` over AXIS, of which `width` columns are `inside`, without weight and bias."""
    if CENTRED:
        mean = tl.sum(x, axis=AXIS, keep_dims=True) / width
        x = tl.where(inside, x - mean, 0.0)
    variance = tl.sum(x * x, axis=AXIS, keep_dims=True) / width
    x *= tl.rsqrt(variance + eps)
    if not CENTRED:
        # The reference rounds before the weight, too.
        x = x.to(output_type).to(tl.float32)
    return x
