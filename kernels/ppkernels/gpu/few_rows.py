"""Products with few rows on a GPU, whose time is that of reading the weights.

A program reads whole rows of the weight at once, before it waits for its inputs. It multiplies
without matrix units and sums in float32. There is no loop, and enough programs are resident to keep
the memory busy. A norm of the inputs is not fused: every program would repeat it, which costs more
than a launch.

Reading the weights of OPT-6.7B and Llama-8B for one row, an H200 reaches 3,800 to 4,500 GB/s; with
cuBLAS 2,600 to 4,250, and a copy 4,280. From two rows on, `hopper_products` has another kernel for Hopper cards.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppkernels.activation_kind import Activation
from ppkernels.gpu import hopper_products
from ppkernels.gpu.chain import chains, follow, let_follow

TILE_BYTES = 32768
"""Bytes of weights that a program reads."""


def few_rows(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation | None,
    residual: Tensor | None,
    into_stream: bool,
) -> Tensor:
    """Return act(x W^T + b) + residual [T, outputs] as a new tensor, rounded once."""
    if hopper_products.serves(inputs, weight):
        from ppkernels.gpu.hopper_products.product_launch import multiply_rows

        return multiply_rows(inputs, weight, bias, activation, residual, into_stream)
    rows, width = inputs.shape
    gated = activation is Activation.SILU_AND_MUL
    outputs = weight.shape[0] // (2 if gated else 1)
    output = torch.empty((rows, outputs), dtype=inputs.dtype, device=inputs.device)
    wide = triton.next_power_of_2(width)
    block = max(1, TILE_BYTES // weight.element_size() // (wide * (2 if gated else 1)))
    chain = chains(inputs.device)
    _few_rows[(triton.cdiv(outputs, block),)](
        inputs,
        weight,
        bias if bias is not None else inputs,
        residual if residual is not None else inputs,
        output,
        outputs,
        inputs.stride(0),
        residual.stride(0) if residual is not None else 0,
        WIDTH=width,
        ROWS=rows,
        BIAS=bias is not None,
        RELU=activation is Activation.RELU,
        GATED=gated,
        RESIDUAL=residual is not None,
        BLOCK=block,
        WIDE=wide,
        CHAIN=chain,
        num_warps=8 if wide <= 16384 else 16,
        launch_pdl=chain,
    )
    return output


@triton.jit(do_not_specialize=["input_stride", "residual_stride"])
def _few_rows(
    inputs,
    weight,
    bias,
    residual,
    output,
    outputs,
    input_stride,
    residual_stride,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    RELU: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    CHAIN: tl.constexpr,
):
    let_follow(CHAIN)
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, WIDE)
    kept, inside = number < outputs, column < WIDTH
    # [BLOCK, WIDE], read by one program only: it must not evict the inputs, which all programs read.
    place = weight + number.to(tl.int64)[:, None] * WIDTH + column[None, :]
    read = kept[:, None] & inside[None, :]
    weights = tl.load(place, read, 0.0, eviction_policy="evict_first")
    if GATED:
        ups = tl.load(place + outputs.to(tl.int64) * WIDTH, read, 0.0, eviction_policy="evict_first")
    if BIAS:
        biases = tl.load(bias + number, kept, 0.0).to(tl.float32)
        if GATED:
            up_biases = tl.load(bias + outputs + number, kept, 0.0).to(tl.float32)
    follow(CHAIN)
    for row in tl.static_range(ROWS):
        x = tl.load(inputs + row * input_stride + column, inside, 0.0).to(tl.float32)
        y = tl.sum(weights.to(tl.float32) * x[None, :], 1)
        if BIAS:
            y += biases
        if GATED:
            up = tl.sum(ups.to(tl.float32) * x[None, :], 1)
            if BIAS:
                up += up_biases
            y = y * tl.sigmoid(y) * up
        if RELU:
            y = tl.where(y < 0.0, 0.0, y)  # a maximum would make 0 of NaN
        if RESIDUAL:
            y += tl.load(residual + row * residual_stride + number, kept, 0.0).to(tl.float32)
        tl.store(output + row * outputs + number, y.to(output.dtype.element_ty), kept)
