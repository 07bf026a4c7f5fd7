"""Kernels for CPUs, compiled by numba.

torch spends more time on calling its small operations than on computing them, and none of them
reads a paged cache in place. A module with the name of one a level up holds that operation's
kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

TYPES = (torch.float32, torch.float64)


def serves(tensor: Tensor) -> bool:
    """Return whether the kernels of this package take `tensor`: float32 or float64, on a CPU."""
    return tensor.is_cpu and tensor.dtype in TYPES


def one_thread() -> bool:
    """Return whether torch has one thread; with more, its large products are faster."""
    return torch.get_num_threads() == 1
