"""Kernels for GPUs, in Triton. A module with the name of one a level up holds that operation's
kernel.

`dispatch` imports these modules for the first tensor that `serves` accepts, so that a machine
without a GPU needs no Triton. With TRITON_INTERPRET=1 in the environment before the first import,
Triton's interpreter runs the kernels on a CPU, about 10,000 times slower. Tests use it.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

interpreted = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether the kernels also take tensors on a CPU."""

TYPES = (torch.bfloat16, torch.float16, torch.float32)


def serves(tensor: Tensor) -> bool:
    """Return whether the kernels take `tensor`: half precision or float32, on a GPU."""
    return (tensor.is_cuda or interpreted) and tensor.dtype in TYPES
