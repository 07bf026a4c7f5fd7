"""Sums by copies between ranks, whose cards are this process: values, slots, generations, and the order of streams."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ppengine.protocol.place import Place
from ppengine.stage.backends.cuda import peer_copies
from ppengine.stage.backends.cuda.peer_copies import PIECES, SLOTS, PeerCopies
from ppengine.stage.backends.cuda.signals import Signals
from ppengine.stage.backends.cuda.streams import Event, Order, Stream
from ppengine.stage.ledger.ledger import Ledger
from standin_card import CPU, Device, StandInDriver

SIZE, WIDTH, SUMS = 3, 8, 6
"""More sums than there are slots."""


class Rank:
    """One rank, with a ledger of its own that is on."""

    def __init__(self, device: Device, folder: Path, rank: int) -> None:
        self.ledger = Ledger()
        self.ledger.thread("main", "cpu")
        self.ledger.switch(True)
        self.driver = StandInDriver(device)
        compute = Stream("compute", CPU, purpose="compute", order=Order(self.ledger))
        self.copies = PeerCopies(self.driver, "GPU-1", Place(0, rank), SIZE, folder, compute, 4096)  # type: ignore[arg-type]

    def found(self) -> list[str]:
        return [finding.summary for finding in self.ledger.findings()]


class Ranks:
    """All ranks of a stage, which take turns."""

    def __init__(self, device: Device, folder: Path) -> None:
        self.ranks = [Rank(device, folder, rank) for rank in range(SIZE)]

    def meet(self) -> None:
        offers = [int.from_bytes(rank.copies.offer.handle, "little") for rank in self.ranks]
        for each in self.ranks:
            each.copies.begin()
        for number, each in enumerate(self.ranks):
            each.copies.open({peer: address for peer, address in enumerate(offers) if peer != number})

    def sum(self, seed: int) -> None:
        """Send all pieces of one sum on every rank, then add them; check values and ranks."""
        parts = torch.randn(SIZE, PIECES, 4, WIDTH, generator=torch.Generator().manual_seed(seed))
        sums = [[each.copies.send(part) for part in mine] for each, mine in zip(self.ranks, parts.clone(), strict=True)]
        for piece, ranks in itertools.product(range(PIECES), [self.ranks]):
            total = sum(parts[1:, piece], parts[0, piece])
            for number in range(len(ranks)):
                residual = torch.ones(4, WIDTH)
                sums[number][piece].add_to(residual)
                assert torch.equal(residual, total + 1)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    def add(part: torch.Tensor, inbox: torch.Tensor, rank: int, residual: torch.Tensor) -> None:
        others = list(inbox.view(SIZE - 1, -1)[:, : part.numel()].view(SIZE - 1, *part.shape))
        parts = [*others[:rank], part, *others[rank:]]
        residual.add_(sum(parts[1:], parts[0]))

    monkeypatch.setattr(peer_copies, "add_parts", add)
    return Device(monkeypatch)


def test_sums_are_right_in_each_generation(device: Device, tmp_path: Path) -> None:
    ranks = Ranks(device, tmp_path)
    for generation in range(2):
        ranks.meet()
        for number in range(SUMS):
            ranks.sum(10 * generation + number)
        for rank in ranks.ranks:
            assert rank.found() == []
            rank.copies.close()
    assert not list(tmp_path.iterdir()), "pages of flags are gone"


def test_a_released_rank_waits_no_longer(device: Device, tmp_path: Path) -> None:
    ranks = Ranks(device, tmp_path)
    ranks.meet()
    alone = ranks.ranks[1].copies
    piece = alone.send(torch.ones(4, WIDTH))
    with pytest.raises(AssertionError, match="the device would wait"):
        piece.add_to(torch.ones(4, WIDTH))
    alone.release()
    piece.add_to(torch.ones(4, WIDTH))


def test_ranks_that_have_not_met_copy_nothing(device: Device, tmp_path: Path) -> None:
    copies = Ranks(device, tmp_path).ranks[0].copies
    residual = torch.ones(4, WIDTH)
    copies.send(torch.ones(4, WIDTH)).add_to(residual)
    assert torch.equal(residual, torch.full((4, WIDTH), 2.0)) and "copy" not in device.log


LEFT_OUT: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the product": lambda patch: _leave(patch, "part made"),
    "the copy": lambda patch: _leave(patch, "part sent"),
    "the others": lambda patch: patch.setattr(Signals, "wait", lambda *args: None),
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
    ranks = Ranks(device, tmp_path)
    ranks.meet()
    for number in range(SUMS):
        ranks.sum(number)
    assert all(rank.found() for rank in ranks.ranks)


def test_small_sums_go_in_one_piece(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_copies, "MOST_BYTES", 2**22)
    compute = Stream("compute", CPU, purpose="compute", order=Order(Ledger()))
    copies = PeerCopies(StandInDriver(device), "GPU-1", Place(0, 0), 2, tmp_path, compute, 2**25)  # type: ignore[arg-type]
    whole = [(2047, 8192), (2048, 8191), (2**14, 1024)]
    assert [copies.pieces(*each) for each in whole] == [[slice(0, rows)] for rows, _ in whole]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_copies, "LEAST_BYTES", 1)
        assert copies.pieces(2200, 1024) == [slice(0, 1152), slice(1152, 2200)]
    assert SLOTS == 2 * PIECES
