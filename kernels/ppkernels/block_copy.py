"""Copy KV blocks within a cache, and between a device cache and a host pool."""

from __future__ import annotations

import torch
from torch import Tensor

from ppkernels import gpu

Pairs = list[tuple[int, int]]


def copy_layers(sources: list[Tensor], targets: list[Tensor], pairs: Pairs) -> None:
    """Copy block `src` of each of `sources` to block `dst` of its target, for each (src, dst) in list order.

    One source and one target for each layer, [blocks, ...], all with the same block shape. A target may be its source:
    a later pair sees what an earlier one wrote. Raises IndexError for a block outside of a tensor.
    """
    reads, writes = min(map(len, sources)), min(map(len, targets))
    for src, dst in pairs:
        if not (0 <= src < reads and 0 <= dst < writes):
            raise IndexError(f"block copy {src} -> {dst}; there are {reads} and {writes} blocks")
    first, into = sources[0], targets[0]
    runs = independent_runs(pairs, first.data_ptr() == into.data_ptr())
    if first.device == into.device and gpu.serves(first):
        from ppkernels.gpu.block_copy import copy_run

        for run in runs:
            copy_run(sources, targets, run)
    else:
        for source, target in zip(sources, targets, strict=True):
            _copy_runs(source, target, runs)


def copy_blocks(source: Tensor, target: Tensor, pairs: Pairs) -> None:
    """Do as `copy_layers` for one layer."""
    copy_layers([source], [target], pairs)


def copy_blocks_reference(source: Tensor, target: Tensor, pairs: Pairs) -> None:
    """Torch version of `copy_blocks`: as few indexed copies as list order allows."""
    _copy_runs(source, target, independent_runs(pairs, source.data_ptr() == target.data_ptr()))


def independent_runs(pairs: Pairs, same: bool) -> list[Pairs]:
    """Cut `pairs` into runs whose pairs may be copied in any order, or at once.

    A cut comes before a pair that overwrites what an earlier one of its run wrote, or, in the `same` tensor, that
    reads what one wrote or overwrites what one reads.
    """
    runs: list[Pairs] = []
    read: set[int] = set()
    written: set[int] = set()
    for src, dst in pairs:
        if not runs or dst in written or (same and (src in written or dst in read)):
            runs.append([])
            read.clear()
            written.clear()
        runs[-1].append((src, dst))
        read.add(src)
        written.add(dst)
    return runs


def _copy_runs(source: Tensor, target: Tensor, runs: list[Pairs]) -> None:
    for run in runs:
        reads = torch.tensor([src for src, _ in run], device=source.device)
        writes = torch.tensor([dst for _, dst in run], device=target.device)
        target.index_copy_(0, writes, source.index_select(0, reads).to(target.device))
