"""Kernels for CPUs, compiled by numba on their first call and kept on disk beside the source for the next process.

torch spends more time on calling its small operations than on doing them, and has none that reads a paged cache in
place. Each kernel stands beside its torch reference, which serves the types that numba has not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import torch
from numba.core.caching import IndexDataCacheFile
from torch import Tensor

from ppkernels.vectors import VECTOR_BYTES

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

REORDER = {"reassoc", "contract", "arcp", "nsz"}
"""Sums may be reordered, so that they can be vectorized; NaN and infinity keep their meaning."""


def compiled(function: Kernel) -> Kernel:
    """Return `function` as machine code. It runs without the GIL and trusts its caller's indices."""
    kernel: Any = numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=REORDER)(function)
    # numba's own key is the kernel's file, but code of other files, and the vectors' width, are compiled into it.
    cache = kernel._cache
    name = f"{cache._impl.filename_base}.{VECTOR_BYTES}"
    cache._cache_file = IndexDataCacheFile(cache.cache_path, name, _sources())
    return cast(Kernel, kernel)


@functools.cache
def _sources() -> list[tuple[str, int, int]]:
    """Name, time and size of all files that kernels may be made of: a change of any makes kept code stale."""
    stats = [(path.name, path.stat()) for path in sorted(Path(__file__).parent.glob("*.py"))]
    return [(name, stat.st_mtime_ns, stat.st_size) for name, stat in stats]


def serves(tensor: Tensor) -> bool:
    """Return whether compiled kernels take `tensor`: float32 or float64, on a CPU."""
    return tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64)


def one_thread() -> bool:
    """Return whether torch has one thread here. Compiled kernels have: where it has more, its large products win."""
    return torch.get_num_threads() == 1
