"""Block copies give what a loop in list order gives."""

from __future__ import annotations

import random

import pytest
import torch
from ppkernels.block_copy import copy_blocks, independent_runs


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
    copy_blocks(cache, cache, pairs)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("seed", range(10))
def test_any_list_between_two_tensors(seed: int) -> None:
    generator = random.Random(seed)
    pairs = [(generator.randrange(8), generator.randrange(5)) for _ in range(12)]
    device, host = torch.randn((8, 2, 4, 2, 3)), torch.full((5, 2, 4, 2, 3), float("nan"))
    kept, expected = device.clone(), host.clone()
    loop(device, expected, pairs)
    copy_blocks(device, host, pairs)
    torch.testing.assert_close(host, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(device, kept)


def test_a_chain_moves_what_the_pair_before_wrote() -> None:
    cache = torch.arange(4.0).view(4, 1)
    copy_blocks(cache, cache, [(0, 1), (1, 2), (2, 3)])
    assert cache.flatten().tolist() == [0, 0, 0, 0]
    cache = torch.arange(4.0).view(4, 1)
    copy_blocks(cache, cache, [(2, 3), (1, 2), (0, 1)])
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
        copy_blocks(cache, cache, [(0, 1), pair])
    assert cache.flatten().tolist() == [0, 1, 2, 3]
