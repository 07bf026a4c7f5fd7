"""Block copies give what a loop in list order gives."""

from __future__ import annotations

import random

import pytest
import torch
from ppkernels.block_copy import copy_layers, independent_runs


def loop(source: torch.Tensor, target: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
    for src, dst in pairs:
        target[dst] = source[src].clone()


@pytest.mark.parametrize("seed", range(20))
def test_any_list_within_one_tensor(seed: int) -> None:
    generator = random.Random(seed)
    pairs = [(generator.randrange(8), generator.randrange(8)) for _ in range(generator.randrange(1, 24))]
    cache = torch.randn((8, 2, 4, 2, 3), generator=torch.Generator().manual_seed(seed))
    expected = cache.clone()
    loop(expected, expected, pairs)
    copy_layers([cache], [cache], pairs)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("seed", range(10))
def test_any_list_between_two_tensors(seed: int) -> None:
    generator = random.Random(seed)
    pairs = [(generator.randrange(8), generator.randrange(5)) for _ in range(12)]
    device, host = torch.randn((8, 2, 4, 2, 3)), torch.full((5, 2, 4, 2, 3), float("nan"))
    kept, expected = device.clone(), host.clone()
    loop(device, expected, pairs)
    copy_layers([device], [host], pairs)
    torch.testing.assert_close(host, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(device, kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_layers_with_other_strides_and_types(dtype: torch.dtype) -> None:
    """A slot of the host has all layers in one run of memory, and a bfloat16 block is copied by torch."""
    device = [torch.randn((8, 2, 4, 2, 3)).to(dtype) for _ in range(3)]
    pool = torch.zeros((5, 3, 2, 4, 2, 3), dtype=dtype)
    host = [pool[:, layer] for layer in range(3)]
    copy_layers(device, host, [(7, 0), (2, 4), (0, 2)])
    for layer, source in enumerate(device):
        assert torch.equal(host[layer], torch.stack([source[7], source[7] * 0, source[0], source[7] * 0, source[2]]))
    back = [torch.zeros_like(source) for source in device]
    copy_layers(host, back, [(4, 2), (0, 7), (2, 0)])
    for source, target in zip(device, back, strict=True):
        assert torch.equal(target[[0, 2, 7]], source[[0, 2, 7]]) and target[[1, 3, 4, 5, 6]].count_nonzero() == 0


def test_blocks_that_are_no_run_of_memory() -> None:
    source, target = torch.randn((4, 3, 5)), torch.zeros((4, 5, 3)).transpose(1, 2)
    copy_layers([source], [target], [(1, 2), (3, 0)])
    assert torch.equal(target[[2, 0]], source[[1, 3]]) and target[[1, 3]].count_nonzero() == 0


def test_a_chain_moves_what_the_pair_before_wrote() -> None:
    cache = torch.arange(4.0).view(4, 1)
    copy_layers([cache], [cache], [(0, 1), (1, 2), (2, 3)])
    assert cache.flatten().tolist() == [0, 0, 0, 0]
    cache = torch.arange(4.0).view(4, 1)
    copy_layers([cache], [cache], [(2, 3), (1, 2), (0, 1)])
    assert cache.flatten().tolist() == [0, 0, 1, 2]


def test_independent_pairs_are_one_copy() -> None:
    assert len(independent_runs([(1, 2), (3, 4), (5, 6)], same=True)) == 1
    assert len(independent_runs([(1, 2), (2, 4)], same=True)) == 2
    assert len(independent_runs([(1, 2), (4, 1)], same=True)) == 2
    assert len(independent_runs([(1, 2), (2, 4)], same=False)) == 1
    assert len(independent_runs([(1, 2), (3, 2)], same=False)) == 2
    assert independent_runs([], same=True) == []


@pytest.mark.parametrize("pair", [(4, 0), (0, 4), (-1, 0), (0, -1)])
def test_a_block_outside_is_refused_before_anything_moves(pair: tuple[int, int]) -> None:
    cache = torch.arange(4.0).view(4, 1)
    with pytest.raises(IndexError, match="there are 4 and 4 blocks"):
        copy_layers([cache], [cache], [(0, 1), pair])
    assert cache.flatten().tolist() == [0, 1, 2, 3]
