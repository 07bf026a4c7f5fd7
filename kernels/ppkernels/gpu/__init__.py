"""The same operations in Triton, for tensors on a GPU.

Only the operations of `ppkernels` import these modules, and only for a tensor that `serves` names: who has no GPU
needs no Triton. Each module is the twin of the one with its name a level up, where the torch reference is.

With TRITON_INTERPRET=1 in the environment before the first import, Triton's interpreter runs the kernels on a CPU,
about 10,000 times slower. Tests use it.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

interpreted = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether tensors on a CPU are served too."""

TYPES = (torch.bfloat16, torch.float16, torch.float32)


def serves(tensor: Tensor) -> bool:
    """Return whether the kernels of this package take `tensor`: half precision or float32, on a GPU."""
    return (tensor.is_cuda or interpreted) and tensor.dtype in TYPES
