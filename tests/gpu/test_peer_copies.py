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
from ppengine.stage.backends.cuda import peer_copies
from ppengine.stage.backends.cuda.peer_copies import FEW_PIECES, PIECES, PeerCopies
from ppengine.stage.backends.cuda.signals import Signals
from ppengine.stage.backends.cuda.streams import Event, Order, Stream
from ppengine.stage.edge_flags import Flag
from ppengine.stage.ledger.ledger import Ledger
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
        self.copies = PeerCopies(driver, "GPU-1", Place(0, rank), size, folder, compute, 4096)

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
            addresses[rank] = int.from_bytes(one.copies.offer.handle, "little")
            for _ in range(generations):
                one.copies.begin()
                barrier.wait()
                one.copies.open({peer: address for peer, address in addresses.items() if peer != rank})
                live(one)
                barrier.wait()
                one.copies.close()
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
    def add(part: torch.Tensor, inbox: torch.Tensor, rank: int, output: torch.Tensor) -> None:
        others = list(inbox[:, : part.numel()].view(-1, *part.shape))
        parts = [*others[:rank], part, *others[rank:]]
        output.copy_(sum(parts[1:], parts[0]))

    monkeypatch.setattr(peer_copies, "sum_parts", add)
    return Device(monkeypatch)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_are_right_in_each_generation(size: int, device: Device, tmp_path: Path) -> None:
    """Also of fewer rows than there are ranks, and in any number of pieces."""

    def live(rank: Rank) -> None:
        for number in range(SUMS):
            rank.sum(number, (7, 7, 7, 2) if number % 3 else (9, 5))
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
        threading.Timer(0.05, rank.copies.release).start()
        piece.add_to(torch.ones(4, WIDTH))
        sent.set()

    together(device, tmp_path, 2, live)


def test_ranks_that_have_not_met_copy_nothing(device: Device, tmp_path: Path) -> None:
    residual = torch.ones(4, WIDTH)
    Rank(device, tmp_path, 0, 2).copies.send(torch.ones(4, WIDTH)).add_to(residual)
    # Its own share is summed with an empty inbox; the other's is not there.
    assert torch.equal(residual, torch.tensor([[2.0], [2.0], [1.0], [1.0]]).repeat(1, WIDTH))
    assert "copy" not in device.log


LEFT_OUT: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the product": lambda patch: _leave(patch, "part made"),
    "the copy of the part": lambda patch: _leave(patch, "parts sent"),
    "the sum": lambda patch: _leave(patch, "share summed"),
}


def _leave(patch: pytest.MonkeyPatch, event: str) -> None:
    whole = Stream.wait

    def wait(stream: Stream, waited: Event) -> None:
        if waited.name != event:
            whole(stream, waited)

    patch.setattr(Stream, "wait", wait)


@pytest.mark.parametrize("what", LEFT_OUT)
def test_a_wait_that_is_left_out_is_found(
    what: str, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LEFT_OUT[what](monkeypatch)

    def live(rank: Rank) -> None:
        for number in range(SUMS):
            rank.sum(number, (7, 7, 7, 2))
        assert rank.findings

    together(device, tmp_path, 3, live)


def test_the_others_are_waited_for(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(signals: Any, flag: Flag, number: int) -> None:
        signals._driver.wait_for(signals._device + flag, number, 0)  # which the ledger does not know

    monkeypatch.setattr(Signals, "wait", wait)

    def live(rank: Rank) -> None:
        rank.sum(0, (7, 7))
        assert any("without waiting for rank" in finding for finding in rank.findings), rank.findings

    together(device, tmp_path, 2, live)


def test_small_sums_go_in_one_piece(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_copies, "_FEW_BYTES", 2**22)
    driver: Any = StandInDriver(device)
    compute = Stream("compute", CPU, purpose="compute", order=Order(Ledger()))

    def pieces(part_bytes: int, rows: int, row_bytes: int, size: int = 2) -> list[int]:
        copies = PeerCopies(driver, "GPU-1", Place(0, 0), size, tmp_path, compute, part_bytes)
        return [one.stop - one.start for one in copies.pieces(rows, row_bytes)]

    assert pieces(2**25, 2047, 8192) == [2047]
    assert pieces(2**25, 2048, 8191) == [2048]
    assert pieces(2**25, 4095, 8192, size=4) == [4095]
    assert pieces(2**24, 8000, 8192) == [8000], "there is no room"
    monkeypatch.setattr(peer_copies, "LEAST_BYTES", 1)
    assert pieces(2**22, 2200, 1024) == [1152, 1048]
    assert pieces(2**25, 4096, 8192) == [1024] * PIECES, "two pieces are too large"
    assert pieces(2**25, 10_000, 1024) == [2560] * 3 + [2320]
    assert pieces(2**25, 10_000, 1024, size=4) == [5120, 4880]
    assert FEW_PIECES == 2
