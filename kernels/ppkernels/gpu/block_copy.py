"""Copy KV blocks from cache to cache on one GPU, in all layers at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WORD = 8
"""Bytes of one copy of a lane."""
TILE = 2048
"""Words of a program."""


def copy_run(sources: list[Tensor], targets: list[Tensor], pairs: list[tuple[int, int]]) -> None:
    """Copy each (src, dst) of `pairs` in every layer, in any order: see `independent_runs`."""
    words = sources[0][0].nbytes // WORD
    layers = [(source.data_ptr(), target.data_ptr()) for source, target in zip(sources, targets, strict=True)]
    both = torch.tensor(layers + pairs)
    if targets[0].is_cuda:
        # torch keeps the pinned memory until the copy is done.
        both = both.pin_memory().to(targets[0].device, non_blocking=True)
    addresses, blocks = both[: len(layers)], both[len(layers) :]
    _copy[len(pairs), triton.cdiv(words, TILE), len(layers)](addresses, blocks, WORDS=words, TILE=TILE, num_warps=8)


@triton.jit
def _copy(addresses, blocks, WORDS: tl.constexpr, TILE: tl.constexpr):
    pair, layer = tl.program_id(0), tl.program_id(2)
    source = tl.load(addresses + 2 * layer).to(tl.pointer_type(tl.int64))
    target = tl.load(addresses + 2 * layer + 1).to(tl.pointer_type(tl.int64))
    word = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = word < WORDS
    some = tl.load(source + tl.load(blocks + 2 * pair) * WORDS + word, inside)
    tl.store(target + tl.load(blocks + 2 * pair + 1) * WORDS + word, some, inside)
