"""Activations of the MLPs on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppkernels.gpu.chain import chains, follow, let_follow

_BLOCK = 2048


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up [T, I] of `gate_up` [T, 2 * I], gate first, rows contiguous."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if output.numel():
        block = min(_BLOCK, triton.next_power_of_2(width))
        grid = (rows, triton.cdiv(width, block))
        chain = chains(gate_up.device)
        _silu_and_mul[grid](
            gate_up, output, gate_up.stride(0), width, BLOCK=block, CHAIN=chain, num_warps=4, launch_pdl=chain
        )
    return output


@triton.jit
def _silu_and_mul(gate_up, output, stride, width, BLOCK: tl.constexpr, CHAIN: tl.constexpr):
    let_follow(CHAIN)
    follow(CHAIN)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    place = gate_up + row * stride + column
    gate = tl.load(place, mask=inside).to(tl.float32)
    up = tl.load(place + width, mask=inside).to(tl.float32)
    # The reference rounds before the product, too.
    gate = (gate * tl.sigmoid(gate)).to(output.dtype.element_ty).to(tl.float32)
    tl.store(output + row * width + column, gate * up, mask=inside)
