"""Compilation by numba: a kernel is compiled on its first call and cached beside its source for the
next process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core.caching import IndexDataCacheFile

from ppkernels.cpu.vectors import VECTOR_BYTES

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

REORDER = {"reassoc", "contract", "arcp", "nsz"}
"""Fast-math flags: sums may be reordered to vectorize them; NaN and infinity stay."""


def compiled(function: Kernel) -> Kernel:
    """Return `function` as machine code, which runs without the GIL and checks no index."""
    kernel: Any = numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=REORDER)(function)
    # numba's cache knows the kernel's own file only. Other files and the vector width are compiled into it, too.
    cache, make_file = kernel._cache, cast(Callable[..., Any], IndexDataCacheFile)
    name = f"{cache._impl.filename_base}.{VECTOR_BYTES}"
    cache._cache_file = make_file(cache.cache_path, name, _sources())
    return cast(Kernel, kernel)


@functools.cache
def _sources() -> list[tuple[str, int, int]]:
    """Return name, time and size of each file here: a change makes cached code stale."""
    stats = [(path.name, path.stat()) for path in sorted(Path(__file__).parent.glob("*.py"))]
    return [(name, stat.st_mtime_ns, stat.st_size) for name, stat in stats]
