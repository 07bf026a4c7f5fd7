"""Cutting block moves into runs keeps the meaning of the list order."""

from __future__ import annotations

import random

from ppengine.protocol.steps import Move, MoveKind
from ppengine.stage.moves import runs


def in_order(moves: list[Move], device: list[int], host: list[int]) -> tuple[list[int], list[int]]:
    device, host = list(device), list(host)
    for move in moves:
        source = host if move.kind == MoveKind.IN else device
        target = host if move.kind == MoveKind.OUT else device
        target[move.dst] = source[move.src]
    return device, host


def in_runs(moves: list[Move], device: list[int], host: list[int]) -> tuple[list[int], list[int]]:
    device, host = list(device), list(host)
    for kind, src, dst in runs(moves):
        source = host if kind is MoveKind.IN else device
        target = host if kind is MoveKind.OUT else device
        values = [source[index] for index in src]  # read all, then write all
        for index, value in zip(dst, values, strict=True):
            target[index] = value
    return device, host


def test_compaction_is_one_run() -> None:
    moves = [Move(0, 90 + index, 10 + index) for index in range(5)]
    assert list(runs(moves)) == [(MoveKind.DEVICE, [90, 91, 92, 93, 94], [10, 11, 12, 13, 14])]


def test_a_chain_is_cut() -> None:
    assert len(list(runs([Move(0, 1, 2), Move(0, 2, 3)]))) == 2
    assert len(list(runs([Move(0, 1, 2), Move(0, 3, 1)]))) == 1
    assert len(list(runs([Move(1, 1, 2), Move(2, 2, 1), Move(1, 5, 6)]))) == 3
    assert list(runs([])) == []


def test_runs_mean_what_the_list_means() -> None:
    draw = random.Random(7)
    for _ in range(500):
        moves = [Move(draw.randrange(3), draw.randrange(5), draw.randrange(5)) for _ in range(draw.randrange(12))]
        device, host = list(range(5)), list(range(100, 105))
        assert in_runs(moves, device, host) == in_order(moves, device, host)
