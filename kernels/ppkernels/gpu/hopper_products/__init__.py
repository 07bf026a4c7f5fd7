"""Products of 2 to 16 rows for Hopper cards (compute capability 9.x), in Gluon, Triton's lower language.

Their time is that of reading the weight once. A program has two groups of warps. One warp copies
tiles of the weight and the inputs into a ring in shared memory by the tensor memory accelerator, so
many bytes are on their way at any time. Four warps multiply: outputs are the rows of their matrix
instructions, and rows of the inputs the columns, which may be as few as 16.

A card has one program for each multiprocessor. All have the same share of the weight, to a unit: the
span of a program may begin and end amid a tile of outputs, whose partial sums the last of its
programs adds (stream-K, arXiv 2301.03598).

About half of a multiprocessor's shared memory is enough for a ring. The next product of a chain
(`gpu/chain.py`) begins in the other half: it reads the first part of its weight while this one ends.
A layer's products go out of the residual stream and into it, in turn. Those into it have more than
half, those out of it less. So neighbours fit together, and two programs of a product into it do not:
the one behind attention starts on an empty card, and would otherwise fill some multiprocessors twice
and leave others idle. A layer of Llama-8B with 16 rows then takes 13 % longer on an H200.

| module | subject |
|---|---|
| `product_launch` | arguments of a launch, its grid, and shapes of tiles |
| `product_kernel` | spans, barriers, and the two groups of warps |
| `copy_units` | the warp that copies |
| `add_units` | the warps that compute |
| `spans` | units of each program, and places of partial sums |
"""

from __future__ import annotations

import torch
from torch import Tensor

from ppkernels.gpu.hopper import is_hopper

LEAST_ROWS, MOST_ROWS = 2, 16
"""Rows that are served. With 32, cuBLAS is faster on an H200; the kernel pads all to 16."""


def serves(inputs: Tensor, weight: Tensor) -> bool:
    """Return whether these kernels take the product of `inputs` [T, K] and `weight` [N, K].

    The tensor memory accelerator copies from multiples of 16 bytes.
    """
    rows, width = inputs.shape
    if inputs.device.type != "cuda" or not LEAST_ROWS <= rows <= MOST_ROWS or not is_hopper(inputs.device):
        return False
    typed = inputs.dtype in (torch.bfloat16, torch.float16) and inputs.dtype == weight.dtype
    plain = inputs.stride(1) == 1 and weight.is_contiguous()
    places = (inputs.data_ptr(), weight.data_ptr(), inputs.stride(0) * 2, width * 2)
    return typed and plain and all(place % 16 == 0 for place in places)
