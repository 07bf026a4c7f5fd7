"""Copies of KV blocks on a CPU: one call of memmove a block and layer.

torch gathers the blocks of a run into a tensor of its own first, and so moves each byte twice.
"""

from __future__ import annotations

import ctypes

from torch import Tensor


def copy_run(sources: list[Tensor], targets: list[Tensor], run: list[tuple[int, int]]) -> None:
    """Copy the pairs of a run, whose blocks are inside of the tensors. Blocks are contiguous."""
    move = ctypes.memmove
    for source, target in zip(sources, targets, strict=True):
        item = source.element_size()
        size, read, write = source[0].numel() * item, source.stride(0) * item, target.stride(0) * item
        reads, writes = source.data_ptr(), target.data_ptr()
        for src, dst in run:
            move(writes + dst * write, reads + src * read, size)
