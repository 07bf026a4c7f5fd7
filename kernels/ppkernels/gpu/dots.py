"""Constants and tile shapes shared by the attention kernels, which are products of tiles."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from ppkernels import gpu

LOG2_E = math.log2(math.e)
"""Factor of the scores: the hardware's exponential is 2^x."""
STEP = ("tables", "lengths", "query_start", "table_stride", "rows")
"""Arguments that change from step to step: Triton must not recompile for a value of 1, or a
multiple of 16.
"""
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True)
class Tiles:
    """Shape of a program's tiles."""

    queries: int
    """Rows of the score matrix: tokens times query heads of one key head."""
    slots: int
    """Columns of the score matrix: slots of the cache read at once."""
    warps: int
    stages: int
    """Tiles in the software pipeline, loading or in use."""


def dot_type(dtype: torch.dtype) -> Any:
    """Return Triton's operand type for products of `dtype`; float32 for bfloat16 in the
    interpreter, which lacks it.
    """
    return tl.float32 if gpu.interpreted and dtype == torch.bfloat16 else _TYPES[dtype]


@functools.cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of `device`."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
