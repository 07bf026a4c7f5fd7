"""Ranks on cards note the collectives that they launch, and stop at the first one in which they differ."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, which has no macOS build")

import test_split_sampling
from interpreted_ranks import fork
from ppengine.checkpoint.model_shard import shard_of
from ppengine.common.groups import ATTENTION, HEAD, MLP, site
from ppengine.common.ring import Kind
from ppengine.protocol.place import Place
from ppengine.stage.backends.cuda import call_log
from ppengine.stage.backends.cuda.call_log import CallLog, calls_of
from ppengine.stage.backends.cuda.card_group import CardGroup
from ppengine.stage.backends.cuda.streams import Order, Stream
from ppengine.stage.rank_calls import BEST, RanksDifferError
from standin_card import CPU, Device, StandInDriver, StandInStage, prompt
from standin_sampling import join
from test_split_sampling import SIZE, VOCABULARY, SplitLayers, decodes, make_stage, registered
from thread_group import make_spec
from torch import Tensor

card, variants = test_split_sampling.card, test_split_sampling.variants
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in's tensors are not on a card")
CALL = (Kind.ALL_REDUCE, site(3, MLP), 1024, 2 << 24 | 64)
"""A sum of float32[4, 64]."""


def met(folder: Path, count: int = 2) -> list[CallLog]:
    logs = [CallLog(folder, 1, rank) for rank in range(count)]
    for log in logs:
        log.begin()
    for rank, log in enumerate(logs):
        log.open(peer for peer in range(count) if peer != rank)
    return logs


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ((8, Kind.ALL_REDUCE, site(3, ATTENTION), *CALL[2:]), "all-reduce 6 (attention of layer 3, m8, float32[4, 64]"),
        ((9, *CALL), "all-reduce 6 (MLP of layer 3, m9, float32[4, 64] 1024 B)"),
        ((8, Kind.ALL_GATHER, *CALL[1:]), "all-gather 6 (MLP of layer 3, m8, float32[4, 64] 1024 B)"),
        ((8, BEST, site(0, HEAD), *CALL[2:]), "best-tokens 6 (head, m8, float32[4, 64] 1024 B)"),
        ((8, *CALL[:2], 2048, CALL[3]), "all-reduce 6 (MLP of layer 3, m8, float32[8, 64] 2048 B)"),
    ],
)
def test_the_first_difference_has_both_call_sites(tmp_path: Path, other: tuple[int, ...], words: str) -> None:
    logs = met(tmp_path, 3)
    for log in logs:
        for number in range(5):
            log.note(8, Kind.ALL_REDUCE, site(number, MLP), *CALL[2:])
    logs[0].note(8, *CALL)
    for log in logs:
        log.compare()
    logs[1].note(*other)
    logs[2].note(8, *CALL)
    for rank, peer in ((0, 1), (1, 0), (2, 1)):
        with pytest.raises(RanksDifferError) as caught:
            logs[rank].compare()
        mine = "all-reduce 6 (MLP of layer 3, m8, float32[4, 64] 1024 B)"
        sides = (words, mine) if rank == 1 else (mine, words)
        assert f"stage 1 rank {rank} launched {sides[0]}" in str(caught.value)
        assert f", rank {peer} launched {sides[1]}" in str(caught.value)


def test_a_call_that_was_left_out_shows_with_the_next_one(tmp_path: Path) -> None:
    first, second = met(tmp_path)
    for log in (first, second):
        log.note(8, *CALL)
    first.note(8, Kind.ALL_REDUCE, site(4, ATTENTION), *CALL[2:])
    second.compare()
    second.note(9, *CALL)
    with pytest.raises(RanksDifferError, match=r"rank 1 launched all-reduce 2 \(MLP of layer 3, m9.*attention of lay"):
        second.compare()


def test_a_count_that_is_seen_before_its_call_is_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = met(tmp_path)
    first.note(8, *CALL)
    assert second._mine is not None
    second._mine._word[0] = 1

    def late(seconds: float) -> None:
        second._mine._word[0] = 0  # type: ignore[union-attr]
        second.note(8, *CALL)

    monkeypatch.setattr(time, "sleep", late)
    first.compare()
    assert first._compared == {1: 1}


@pytest.mark.parametrize("ahead", [12, 20])
def test_a_rank_that_is_a_ring_ahead_is_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    """Its device waits for this one, so it is not. If it were, it would write over the calls that are compared."""
    monkeypatch.setattr(call_log, "MOST", 8)
    first, second = met(tmp_path)
    assert first._mine is not None and second._mine is not None

    def note(log: CallLog, until: int) -> None:
        for number in range(log._mine.count, until):  # type: ignore[union-attr]
            log.note(number, *CALL)

    note(first, 4)
    note(second, ahead)
    first.compare()
    note(first, ahead)
    second._mine._map[64:96] = bytes(32)  # calls come before their count
    monkeypatch.setattr(time, "sleep", lambda seconds: note(second, ahead + 8))
    first.compare()
    assert first._compared == {1: ahead}


def test_a_ring_goes_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_log, "MOST", 7)
    first, second = met(tmp_path)
    graph: list[bytes] = []
    for log in (first, second):
        log.capture(lambda log=log: [log.note(0, Kind.ALL_REDUCE, each, 8, 0) for each in range(3)], graph)  # type: ignore[misc, arg-type, return-value]
    for step in range(1, 20):
        for log in (first, second):
            log.note(step, *CALL)
            log.replay(step, calls_of(graph))
            log.compare()
    first.replay(20, calls_of(graph[:2]))
    second.replay(20, calls_of([graph[0], graph[2]]))
    with pytest.raises(RanksDifferError, match=r"all-reduce 78 \(attention of layer 0, m20.* all-reduce 78 \(MLP of l"):
        first.compare()


def test_ranks_that_have_not_met_note_nothing_and_a_generation_begins_at_the_first_call(tmp_path: Path) -> None:
    log = CallLog(tmp_path, 1, 0)
    log.note(1, *CALL)
    log.compare()
    first, second = met(tmp_path)
    first.note(1, *CALL)
    first.close()
    first.compare()
    again, other = met(tmp_path)
    for each in (again, other):
        each.note(5, *CALL)
        each.compare()
    second.note(1, *CALL)
    second.compare()


# --- stages of cards -------------------------------------------------------------------------------------------


class Summing(SplitLayers):
    """Layers with two sums."""

    wrong = False
    """A planted error: the sums are the other way round."""

    def run(self, hidden: Tensor, batch: object, kv: object, behind: Any = None) -> Tensor:
        parts = [ATTENTION, MLP] if not self.wrong else [MLP, ATTENTION]
        for each in parts:
            self.group.all_reduce(torch.zeros(len(hidden), 4), site(0, each))
        return super().run(hidden, batch, kv, behind)


def make_rank(card: Device, folder: Path, rank: int, wrong: bool) -> tuple[StandInStage, CardGroup, Summing]:
    own = folder / str(rank)
    own.mkdir()
    driver: Any = StandInDriver(card)
    group = CardGroup(driver, "GPU-1", Place(0, rank), SIZE, folder, Stream("c", CPU, purpose="c", order=Order()), 1)
    model = Summing(card, shard_of(make_spec(vocab_size=VOCABULARY), rank, SIZE), group)
    model.wrong = wrong and rank == 1
    return make_stage(card, own, model, group), group, model


@pytest.mark.parametrize("rows", [prompt(), decodes(3, 0)], ids=["chunk", "decode"])
@pytest.mark.parametrize("captured", [True, False])
def test_no_step_in_which_ranks_differ_is_acknowledged(
    card: Device, tmp_path: Path, rows: list[Any], captured: bool
) -> None:
    """In a graph and launch by launch."""
    ranks = [make_rank(card, tmp_path, rank, captured) for rank in range(SIZE)]
    join([group for _, group, _ in ranks], 1)

    def live(rank: int) -> None:
        stage, group, model = ranks[rank]
        model.wrong = rank == 1
        if not captured:
            stage.buffers.graphs = []
        before = len(card.log)
        pending = stage.step(rows, **registered({}))
        together(group)
        with pytest.raises(RanksDifferError) as caught:
            pending.finish()
        sides = [f"rank {rank} launched all-reduce 1 (attention of layer 0, m2", "all-reduce 1 (MLP of layer 0, m2"]
        assert all(part in str(caught.value) for part in (sides if rank == 0 else [sides[1]])), caught.value
        with pytest.raises(RanksDifferError):
            stage.runner.check_neighbours()
        assert ("replay" in card.log[before:]) == captured

    fork(SIZE, live)


def together(group: CardGroup) -> None:
    """Wait for the notes of the other rank, as a rank's device does for its part."""
    mine = group.calls._mine
    (theirs,) = group.calls._others.values()
    assert mine is not None
    until(lambda: theirs.count >= mine.count)


def until(condition: Callable[[], bool]) -> None:
    for _ in range(10**7):
        if condition():
            return
    raise AssertionError("it did not come")
