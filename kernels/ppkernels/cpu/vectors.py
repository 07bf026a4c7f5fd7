"""The width of the CPU kernels' vectors, and the shapes that it allows.

`PPKERNELS_VECTOR_BYTES` overrides the width that suits the machine: 32 or 64. LLVM splits vectors
that are wider than the machine's registers, so both widths give right results everywhere; tests run
both.
"""

from __future__ import annotations

import os

from llvmlite import binding
from torch import Tensor

from ppkernels import cpu

VARIABLE = "PPKERNELS_VECTOR_BYTES"


def chosen_width(setting: str | None, *, avx512: bool) -> int:
    """Return the bytes of a vector. Raises ValueError for a `setting` other than 32, 64 or none."""
    if not setting:
        return 64 if avx512 else 32
    if setting not in ("32", "64"):
        raise ValueError(f"{VARIABLE} is {setting!r}; it must be 32 or 64, or unset for the machine's own width")
    return int(setting)


VECTOR_BYTES = chosen_width(os.environ.get(VARIABLE), avx512=binding.get_host_cpu_features().get("avx512f", False))
"""Bytes of a vector in this process."""


def lanes(tensor: Tensor) -> int:
    """Return how many numbers of `tensor`'s type one vector holds."""
    return VECTOR_BYTES // tensor.element_size()


def takes_cache(kv: Tensor) -> bool:
    """Return whether the attention kernel takes a cache [blocks, 2, kv_heads, block_size, head_dim]
    like `kv`.
    """
    width = lanes(kv)
    return cpu.serves(kv) and kv.shape[3] % width == 0 and kv.shape[4] % width == 0
