"""Sums by copies on cards that lag: in any order that their streams allow, each sum is right in each generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lagging_cards import Cards, Floats, Host, LaggingDriver, Pool, at_once, floats_at
from ppengine.protocol.place import Place
from ppengine.stage.backends.cuda import one_shot_sums, two_shot_sums
from ppengine.stage.backends.cuda.copied_sums import CopiedSums
from ppengine.stage.backends.cuda.one_shot_sums import OneShotSums
from ppengine.stage.backends.cuda.peer_lanes import PeerLanes
from ppengine.stage.backends.cuda.streams import Event, Stream
from ppengine.stage.backends.cuda.two_shot_sums import TwoShotSums
from standin_card import CPU

WIDTH, MOST_ROWS, SUMS, GENERATIONS = 4, 6, 6, 3
Plan = list[tuple[int, ...]]
"""Rows of the pieces of each sum."""


class Stage:
    """Ranks with a card each. `wrong`: the pieces that had another sum."""

    def __init__(self, patch: pytest.MonkeyPatch, seed: int, size: int, folder: Path) -> None:
        self.cards, self.size, self.folder, self.seed = Cards(patch, seed), size, folder, seed
        self.driver: Any = LaggingDriver(self.cards)
        self.wrong: list[tuple[int, int]] = []
        self.over = False
        """Whether the generation is: results are void."""
        patch.setattr(two_shot_sums, "sum_parts", self._sum_parts)
        patch.setattr(one_shot_sums, "add_parts", self._add_parts)
        self.ranks = [Rank(self, rank) for rank in range(size)]

    def plan(self) -> Plan:
        lots = self.cards.lots
        counts = [2] if self.size == 2 else [1, 2, 4]
        return [
            tuple(lots.randint(1, MOST_ROWS) for _ in range(lots.choice(counts))) for _ in range(SUMS)
        ]  # fmt: skip

    def live(self, generation: int) -> None:
        """Spend a generation: all sums, or as many as there are until one rank fails at some point."""
        addresses = {one.number: int.from_bytes(one.lanes.offer.handle, "little") for one in self.ranks}
        for one in self.ranks:
            one.copies.begin()
            one.lanes.begin()
        for one in self.ranks:
            one.lanes.open({peer: at for peer, at in addresses.items() if peer != one.number})
        self.over, plan = False, self.plan()
        if generation % 2:
            self.cards.run(*(one.sums(plan) for one in self.ranks))
        else:
            steps = self.cards.lots.randint(1, 2 * sum(map(len, plan)))
            failing = self.cards.lots.randrange(self.size)
            self.cards.run(*(one.fails(plan, steps + 3 * (one.number != failing)) for one in self.ranks))
        self.cards.run(*(one.leaves() for one in self.ranks))
        if generation % 2 == 0:  # the one that failed is another process from here on
            self.ranks[failing] = Rank(self, failing)

    def _sum_parts(self, part: torch.Tensor, inbox: torch.Tensor, rank: int, output: torch.Tensor) -> None:
        total, at = self._total(part, inbox, rank), output.data_ptr()
        self.ranks[rank].launch(lambda: np.copyto(floats_at(at, part_size), total()))
        part_size = part.numel()

    def _add_parts(self, part: torch.Tensor, inbox: torch.Tensor, rank: int, residual: Any) -> None:
        residual.expect(self._total(part, inbox, rank))

    def _total(self, part: torch.Tensor, inbox: torch.Tensor, rank: int) -> Callable[[], Floats]:
        """Return the sum as a launch would make it: it knows addresses, and keeps no tensor."""
        count, own, first, stride = part.numel(), part.data_ptr(), inbox.data_ptr(), 4 * inbox.stride(0)
        places = [own, *(first + row * stride for row in range(len(inbox)))]
        return lambda: np.sum([floats_at(place, count) for place in places], 0, dtype=np.float32)


class Rank:
    """One process."""

    def __init__(self, stage: Stage, number: int) -> None:
        self.stage, self.number = stage, number
        self.compute = Stream("compute", CPU)
        self.lanes = PeerLanes(stage.driver, "GPU-1", Place(0, number), stage.size, stage.folder, self.compute)
        self.copies: CopiedSums = (OneShotSums if stage.size == 2 else TwoShotSums)(self.lanes, 4096)
        self.pool = Pool(WIDTH * MOST_ROWS)

    def launch(self, work: Callable[[], None]) -> None:
        self.stage.cards.launch(self.compute.handle, work)

    def sums(self, plan: Plan) -> Host:
        """Launch all sums, as a step does."""
        for number, pieces in enumerate(plan):
            begun = []
            for piece, rows in enumerate(pieces):
                begun.append((Residual(self, number, piece, rows), self.copies.send(self.product(number, piece, rows))))
                yield at_once
            while begun:
                residual, one = begun.pop(0)
                one.add_to(residual)  # type: ignore[arg-type]
                del one
                yield at_once

    def product(self, number: int, piece: int, rows: int) -> torch.Tensor:
        part = self.pool.take(rows, WIDTH)
        at, values = part.data_ptr(), values_of(number, piece, self.number, rows)
        self.launch(lambda: np.copyto(floats_at(at, len(values)), values))
        return part

    def fails(self, plan: Plan, steps: int) -> Host:
        """Launch some of it, and leave the rest in the middle."""
        yield from islice(self.sums(plan), steps)
        self.stage.over = True

    def leaves(self) -> Host:
        """As `CudaRunner.leave`, and `CardGroup.close`, which waits for the whole device."""
        cards, compute, copies = self.stage.cards, self.compute.handle, self.lanes.stream.handle
        while cards.queues[compute]:
            if self.stage.over:
                for release in self.lanes.releases():
                    release()
            yield lambda: not cards.queues[compute] or (self.stage.over and cards.blocked(compute))
        yield lambda: not cards.queues[copies]
        self.lanes.close()


class Residual:
    """A residual stream that compares the sum which is added to it."""

    def __init__(self, rank: Rank, number: int, piece: int, rows: int) -> None:
        self._rank, self._of = rank, (number, piece)
        size = rank.stage.size
        self._expected = np.sum([values_of(number, piece, each, rows) for each in range(size)], 0)

    def add_(self, total: torch.Tensor) -> None:
        at, count = total.data_ptr(), total.numel()
        self.expect(lambda: floats_at(at, count))

    def expect(self, total: Callable[[], Floats]) -> None:
        def look() -> None:
            if not self._rank.stage.over and not np.array_equal(total(), self._expected):
                self._rank.stage.wrong.append(self._of)

        self._rank.launch(look)


def values_of(number: int, piece: int, rank: int, rows: int) -> Floats:
    return (np.arange(rows * WIDTH) % 7 + 1000 * number + 100 * piece + 10 * rank).astype(np.float32)


def wrong_sums(patch: pytest.MonkeyPatch, folder: Path, size: int, seed: int, generations: int = GENERATIONS) -> int:
    stage = Stage(patch, seed, size, folder)
    for generation in range(1, generations + 1):
        stage.live(generation)
    return len(stage.wrong)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_are_right_in_any_order(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second generation a rank fails amid a step, and another process is in its place in the third."""
    for seed in range({2: 16, 3: 8, 4: 4}[size]):
        with monkeypatch.context() as patch:
            assert wrong_sums(patch, tmp_path, size, seed) == 0, seed
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("size", "event"), [(2, "part made"), (2, "part sent"), (3, "part made"), (3, "parts sent"), (3, "share summed")]
)
def test_each_wait_is_needed(size: int, event: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Stream.wait

    def wait(stream: Stream, waited: Event) -> None:
        if waited.name != event:
            whole(stream, waited)

    monkeypatch.setattr(Stream, "wait", wait)
    assert any(_seeds(tmp_path, monkeypatch, size))


def test_each_slot_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_shot_sums, "SLOTS", 2)
    assert any(_seeds(tmp_path, monkeypatch, 2))
    monkeypatch.setattr(two_shot_sums, "PIECES", 2)
    assert any(_seeds(tmp_path, monkeypatch, 3))


def _seeds(folder: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> Iterator[int]:
    for seed in range(50):
        with monkeypatch.context() as patch:
            yield wrong_sums(patch, folder, size, seed, generations=1)
