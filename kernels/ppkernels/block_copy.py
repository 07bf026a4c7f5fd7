"""Copy KV blocks within a cache, and between a device cache and a host pool."""

from __future__ import annotations

import torch
from torch import Tensor

from ppkernels.dispatch import choose

Pairs = list[tuple[int, int]]


def copy_layers(sources: list[Tensor], targets: list[Tensor], pairs: Pairs) -> None:
    """Copy block `src` of each of `sources` to block `dst` of its target, for each (src, dst) in
    list order.

    Each layer has a source and a target, [blocks, ...], all with the same block shape. A target may
    be its source: a later pair reads what an earlier pair wrote. Raises IndexError for a block
    outside of a tensor.
    """
    reads, writes = min(map(len, sources)), min(map(len, targets))
    for src, dst in pairs:
        if not (0 <= src < reads and 0 <= dst < writes):
            raise IndexError(f"block copy {src} -> {dst}; there are {reads} and {writes} blocks")
    first, into = sources[0], targets[0]
    copy = choose("copy_run", copy_run_reference, first, into)
    for run in independent_runs(pairs, first.data_ptr() == into.data_ptr()):
        copy(sources, targets, run)


def copy_run_reference(sources: list[Tensor], targets: list[Tensor], run: Pairs) -> None:
    """Copy the pairs of one of `independent_runs`, by one indexed copy of torch a layer."""
    for source, target in zip(sources, targets, strict=True):
        reads = torch.tensor([src for src, _ in run], device=source.device)
        writes = torch.tensor([dst for _, dst in run], device=target.device)
        target.index_copy_(0, writes, source.index_select(0, reads).to(target.device))


def independent_runs(pairs: Pairs, same: bool) -> list[Pairs]:
    """Split `pairs` into runs whose pairs may be copied in any order, or at once.

    A run ends before a pair that overwrites a block written in this run. Within the `same` tensor
    it also ends before a pair that reads a block written in this run, or overwrites a block read in
    it.
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
