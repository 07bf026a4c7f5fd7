"""Block copies on a GPU give what a loop in list order gives, in every layer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from ppengine.protocol.steps import Move, MoveKind
from ppkernels.block_copy import copy_layers
from ppkernels.kv_layout import cache_shape
from standin_card import Device, alone

LAYERS = 3


def caches(blocks: int, device: torch.device) -> list[torch.Tensor]:
    shape = cache_shape(blocks, 16, 1, 12, device)
    return [torch.randn(shape, device=device).to(torch.float16) for _ in range(LAYERS)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("same", [True, False])
def test_any_list(seed: int, same: bool, device: torch.device) -> None:
    generator = random.Random(seed)
    pairs = [(generator.randrange(8), generator.randrange(5)) for _ in range(generator.randrange(1, 24))]
    sources = caches(8, device)
    targets = sources if same else caches(5, device)
    expected = [target.clone() for target in targets]
    for layer in range(LAYERS):
        for src, dst in pairs:
            expected[layer][dst] = (expected if same else sources)[layer][src].clone()
    copy_layers(sources, targets, pairs)
    assert all(torch.equal(target, other) for target, other in zip(targets, expected, strict=True))


def test_a_block_outside_is_refused_before_anything_moves(device: torch.device) -> None:
    both = caches(4, device)
    kept = [cache.clone() for cache in both]
    with pytest.raises(IndexError, match="block copy 4 -> 0; there are 4 and 4 blocks"):
        copy_layers(both, both, [(0, 1), (4, 0)])
    assert all(torch.equal(cache, other) for cache, other in zip(both, kept, strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in's tensors are not on a card")
def test_a_stage_gathers_no_blocks_that_it_moves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A shrink may move most blocks of a cache at once, and beside it a card has no memory for as many."""
    stage = alone(Device(monkeypatch), tmp_path)
    stage.step(map_blocks=12).finish()
    before = [layer.copy_(torch.randn(layer.shape)).clone() for layer in stage.cache.layers]

    def gathers(*_: object) -> NoReturn:
        raise AssertionError("torch gathers the blocks")

    monkeypatch.setattr(torch.Tensor, "index_select", gathers)
    stage.step(moves=[Move(MoveKind.DEVICE, 6 + block, 1 + block) for block in range(5)]).finish()
    for layer, old in zip(stage.cache.layers, before, strict=True):
        assert torch.equal(layer[1:6], old[6:11]) and torch.equal(layer[6:], old[6:])
