"""Sums by copies between ranks whose cards are threads of this process: values, slots, generations, order."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from ppengine.protocol.place import Place
from ppengine.stage.backends.cuda import copied_sums, one_shot_sums, two_shot_sums
from ppengine.stage.backends.cuda.copied_sums import CopiedSums
from ppengine.stage.backends.cuda.one_shot_sums import OneShotSums
from ppengine.stage.backends.cuda.peer_lanes import PeerLanes
from ppengine.stage.backends.cuda.signals import Signals
from ppengine.stage.backends.cuda.streams import Event, Order, Stream
from ppengine.stage.backends.cuda.two_shot_sums import TwoShotSums
from ppengine.stage.edge_flags import Flag
from ppengine.stage.ledger.ledger import Ledger
from ppengine.stage.wire import PeerLostError
from standin_card import CPU, Device, StandInDriver

WIDTH, SUMS, PATIENCE_S = 8, 6, 60.0
"""More sums than a piece has slots."""


class Waiting(StandInDriver):
    """A driver whose device waits: here the thread that launches does."""

    def wait_for(self, word: int, value: int, stream: int) -> None:
        flag, end = ctypes.c_uint64.from_address(word), time.monotonic() + PATIENCE_S
        while flag.value < value:
            assert time.monotonic() < end, "the device waits for ever"
            time.sleep(1e-4)


class Rank:
    """One rank, a thread, with a ledger of its own that is on."""

    def __init__(self, device: Device, folder: Path, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.ledger = Ledger()
        self.ledger.thread("main", "cpu")
        self.ledger.switch(True)
        compute = Stream("compute", CPU, purpose="compute", order=Order(self.ledger))
        driver: Any = Waiting(device)
        self.lanes = PeerLanes(driver, "GPU-1", Place(0, rank), size, folder, compute)
        self.copies: CopiedSums = (OneShotSums if size == 2 else TwoShotSums)(self.lanes, 4096)

    def sum(self, seed: int, rows: tuple[int, ...]) -> None:
        """Send all pieces of one sum, then add them, and check each."""
        made = torch.Generator().manual_seed(seed)
        parts = [torch.randn(self.size, each, WIDTH, generator=made) for each in rows]
        sums = [self.copies.send(part[self.rank].clone()) for part in parts]
        for part, one in zip(parts, sums, strict=True):
            residual = torch.ones(part.shape[1:])
            one.add_to(residual)
            assert torch.equal(residual, sum(part[1:], part[0]) + 1)

    @property
    def findings(self) -> list[str]:
        return [finding.summary for finding in self.ledger.findings()]


def together(device: Device, folder: Path, size: int, live: Callable[[Rank], None], generations: int = 1) -> None:
    """Run `live` on each rank in each generation."""
    barrier, addresses = threading.Barrier(size, timeout=PATIENCE_S), dict[int, int]()

    def run(rank: int) -> None:
        try:
            one = Rank(device, folder, rank, size)
            for _ in range(rank):  # as a rank that was there before
                one.copies.send(torch.ones(4, WIDTH)).add_to(torch.ones(4, WIDTH))
            addresses[rank] = int.from_bytes(one.lanes.offer.handle, "little")
            for _ in range(generations):
                one.copies.begin()
                one.lanes.begin()
                barrier.wait()
                one.lanes.open({peer: address for peer, address in addresses.items() if peer != rank})
                live(one)
                barrier.wait()
                one.lanes.close()
                barrier.wait()
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        errors = [future.exception() for future in [threads.submit(run, rank) for rank in range(size)]]
    for error in errors:
        if error is not None and not isinstance(error, threading.BrokenBarrierError):
            raise error


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    def parts_of(part: torch.Tensor, inbox: torch.Tensor, rank: int) -> torch.Tensor:
        others = list(inbox[:, : part.numel()].view(-1, *part.shape))
        parts = [*others[:rank], part, *others[rank:]]
        return sum(parts[1:], parts[0])

    def sum_parts(part: torch.Tensor, inbox: torch.Tensor, rank: int, output: torch.Tensor) -> None:
        output.copy_(parts_of(part, inbox, rank))

    def add_parts(part: torch.Tensor, inbox: torch.Tensor, rank: int, residual: torch.Tensor) -> None:
        residual.add_(parts_of(part, inbox, rank))

    monkeypatch.setattr(two_shot_sums, "sum_parts", sum_parts)
    monkeypatch.setattr(one_shot_sums, "add_parts", add_parts)
    return Device(monkeypatch)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_are_right_in_each_generation(size: int, device: Device, tmp_path: Path) -> None:
    """Also of fewer rows than there are ranks, and in any number of pieces."""

    def live(rank: Rank) -> None:
        for number in range(SUMS):
            rank.sum(number, (7, 7, 7, 2) if number % 3 and size > 2 else (9, 5))
        rank.sum(SUMS, (1,))
        assert rank.findings == []

    together(device, tmp_path, size, live, generations=2)
    assert not list(tmp_path.iterdir()), "pages of flags are gone"


def test_a_released_rank_waits_no_longer(device: Device, tmp_path: Path) -> None:
    sent = threading.Event()

    def live(rank: Rank) -> None:
        if rank.rank == 0:
            sent.wait(PATIENCE_S)
            return  # it sends nothing
        piece = rank.copies.send(torch.ones(4, WIDTH))
        (release,) = rank.lanes.releases()
        threading.Timer(0.05, release).start()
        piece.add_to(torch.ones(4, WIDTH))
        sent.set()

    together(device, tmp_path, 2, live)


def test_a_rank_that_leaves_while_another_opens_is_lost(device: Device, tmp_path: Path) -> None:
    first, second = (Rank(device, tmp_path, rank, 2).lanes for rank in range(2))
    first.begin()
    second.begin()
    first.open({1: 1})
    first.close()
    with pytest.raises(PeerLostError) as lost:
        second.open({0: 1})
    assert (lost.value.peer, lost.value.rank) == (0, 0)
    second.close()


def test_ranks_that_have_not_met_copy_nothing(device: Device, tmp_path: Path) -> None:
    for size, rows in ((2, [2.0] * 4), (4, [2.0, 1.0, 1.0, 1.0])):
        residual = torch.ones(4, WIDTH)
        Rank(device, tmp_path, 0, size).copies.send(torch.ones(4, WIDTH)).add_to(residual)
        # Its own part, or share, is summed with an empty inbox; shares of others are not there.
        assert residual[:, 0].tolist() == rows
    assert "copy" not in device.log


@pytest.mark.parametrize(
    ("size", "event"), [(2, "part made"), (2, "part sent"), (3, "part made"), (3, "parts sent"), (3, "share summed")]
)
def test_a_wait_that_is_left_out_is_found(
    size: int, event: str, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Stream.wait

    def wait(stream: Stream, waited: Event) -> None:
        if waited.name != event:
            whole(stream, waited)

    monkeypatch.setattr(Stream, "wait", wait)

    def live(rank: Rank) -> None:
        for number in range(SUMS):
            rank.sum(number, (7, 7))
        assert rank.findings

    together(device, tmp_path, size, live)


@pytest.mark.parametrize("size", [2, 3])
def test_the_others_are_waited_for(size: int, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(signals: Any, flag: Flag, number: int) -> None:
        signals._driver.wait_for(signals._device + flag, number, 0)  # which the ledger does not know

    monkeypatch.setattr(Signals, "wait", wait)

    def live(rank: Rank) -> None:
        rank.sum(0, (7, 7))
        assert any("without waiting for rank" in finding for finding in rank.findings), rank.findings

    together(device, tmp_path, size, live)


def test_small_sums_go_in_one_piece(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver: Any = StandInDriver(device)
    compute = Stream("compute", CPU, purpose="compute", order=Order(Ledger()))

    def pieces(part_bytes: int, rows: int, row_bytes: int, size: int = 2) -> list[int]:
        lanes = PeerLanes(driver, "GPU-1", Place(0, 0), size, tmp_path, compute)
        copies: CopiedSums = (OneShotSums if size == 2 else TwoShotSums)(lanes, part_bytes)
        return [one.stop - one.start for one in copies.pieces(rows, row_bytes)]

    assert pieces(2**26, 4096, 8192) == [4096]
    assert pieces(2**26, 4100, 4000) == [4100]
    assert pieces(2**27, 8192, 8192, size=4) == [8192]
    assert pieces(2**24, 8000, 8192) == [8000], "there is no room"
    assert pieces(2**26, 4200, 8192) == [2176, 2024]
    assert pieces(2**27, 16_384, 8192) == [8192] * 2
    assert pieces(2**26, 8320, 4096, size=4) == [4224, 4096]
    assert pieces(2**27, 16_384, 8192, size=4) == [4096] * 4
    assert pieces(2**27, 10_000, 8192, size=4) == [2560] * 3 + [2320], "two pieces are too large"
    monkeypatch.setattr(copied_sums, "LEAST_BYTES", 1)
    assert pieces(2**25, 10_000, 1024, size=4) == [5120, 4880]
