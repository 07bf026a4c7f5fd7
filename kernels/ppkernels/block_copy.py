"""Copy KV blocks within a cache, and between a device cache and a host pool."""

from __future__ import annotations

import torch
from torch import Tensor

Pairs = list[tuple[int, int]]


def copy_blocks(source: Tensor, target: Tensor, pairs: Pairs) -> None:
    """Copy block `src` of `source` to block `dst` of `target` for each (src, dst), in list order.

    Both are [blocks, ...] with the same block shape, and may be the same tensor: a later pair sees what an earlier
    one wrote. Raises IndexError for a block outside of its tensor.
    """
    for src, dst in pairs:
        if not (0 <= src < source.shape[0] and 0 <= dst < target.shape[0]):
            raise IndexError(f"block copy {src} -> {dst}; there are {source.shape[0]} and {target.shape[0]} blocks")
    copy_blocks_reference(source, target, pairs)


def copy_blocks_reference(source: Tensor, target: Tensor, pairs: Pairs) -> None:
    """Torch version of `copy_blocks`: as few indexed copies as list order allows."""
    same = source.data_ptr() == target.data_ptr()
    for run in independent_runs(pairs, same):
        sources = torch.tensor([src for src, _ in run], device=source.device)
        targets = torch.tensor([dst for _, dst in run], device=target.device)
        target.index_copy_(0, targets, source.index_select(0, sources).to(target.device))


def independent_runs(pairs: Pairs, same: bool) -> list[Pairs]:
    """Cut `pairs` where one reads (in the `same` tensor) or overwrites what an earlier one of its run wrote."""
    runs: list[Pairs] = []
    written: set[int] = set()
    for src, dst in pairs:
        if not runs or dst in written or (same and src in written):
            runs.append([])
            written.clear()
        runs[-1].append((src, dst))
        written.add(dst)
    return runs
