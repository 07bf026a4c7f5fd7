"""What the attention kernels share: they are products of tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from ppkernels import gpu

LOG2_E = math.log2(math.e)
"""Scores are scaled by this too: the hardware's exponential is 2^x."""
STEP = ("tables", "lengths", "query_start", "table_stride", "rows")
"""Arguments that change from step to step: a kernel is not compiled anew because one is 1, or a multiple of 16."""
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True)
class Tiles:
    """How a program cuts its work."""

    queries: int
    """Rows of the score matrix: tokens times query heads of one key head."""
    slots: int
    """Its columns: how much of the cache is read at once."""
    warps: int
    stages: int
    """Tiles in flight and in work."""


def dot_type(dtype: torch.dtype) -> Any:
    """Return Triton's type of the operands of a product of `dtype`; the interpreter cannot multiply bfloat16."""
    return tl.float32 if gpu.interpreted and dtype == torch.bfloat16 else _TYPES[dtype]
