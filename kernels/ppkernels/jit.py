"""Kernels for CPUs, compiled by numba on their first call and kept on disk beside the source for the next process.

torch spends more time on calling its small operations than on doing them, and has none that reads a paged cache in
place. Each kernel stands beside its torch reference, which serves the types that numba has not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import torch
from torch import Tensor

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

_REORDER = {"reassoc", "contract", "arcp", "nsz"}
"""Sums may be reordered, so that they can be vectorized; NaN and infinity keep their meaning."""


def compiled(function: Kernel) -> Kernel:
    """Return `function` as machine code. It runs without the GIL and trusts its caller's indices."""
    return cast(Kernel, numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=_REORDER)(function))


def serves(tensor: Tensor) -> bool:
    """Return whether compiled kernels take `tensor`: float32 or float64, on a CPU."""
    return tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64)
