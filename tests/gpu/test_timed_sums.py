"""Ranks on cards time sums when they meet: the same calls on all of them, waits that end, nothing left behind.

Groups and kernels are a card's. The device is a stand-in, and each rank a process, or a thread that launches nothing.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, which has no macOS build")

from interpreted_ranks import fork, interpret_few_programs
from kernel_variants import Variants
from ppengine.common.device_page import DevicePage, DevicePageReader
from ppengine.protocol.place import Place
from ppengine.protocol.stage_info import SumsInfo, SumTime
from ppengine.stage.backends.cuda import copied_sums, sum_ways
from ppengine.stage.backends.cuda.card_group import CardGroup
from ppengine.stage.backends.cuda.late_ranks import LateRanks
from ppengine.stage.backends.cuda.streams import Order, Stream
from ppengine.stage.backends.cuda.sum_ways import COPIES, ONE_SHOT, TWO_SHOTS, StepRows
from ppengine.stage.edge_flags import RELEASED, Flag
from ppengine.stage.wire import PeerLostError, SupersededError, Wire
from ppkernels.gpu import collectives
from standin_card import CPU, Device, Layers, StandInDriver, StandInStage, _Tcp
from test_copied_sums import Waiting

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in's tensors are not on a card")
WIDTH, MOST, PATIENCE_S = 8, 256, 60.0
ROWS = StepRows(WIDTH, torch.bfloat16, MOST)
WAYS = [(64, ONE_SHOT), (1024, ONE_SHOT), (2048, TWO_SHOTS), (4096, COPIES)]
GENERATIONS = 2


# --- ranks that are processes --------------------------------------------------------------------------------------


class Clock:
    """An event that is done at once, by this process's clock."""

    def __init__(self, **_: object) -> None:
        self.at_s = 0.0

    def record(self, stream: object) -> None:
        self.at_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing is left to wait for."""

    def elapsed_time(self, other: Clock) -> float:
        return 1e3 * (other.at_s - self.at_s)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device(monkeypatch)
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(sum_ways, "BYTES", (64, 1024, 2048))
    monkeypatch.setattr(sum_ways, "_CALLS", 2)
    monkeypatch.setattr(copied_sums, "AT_ONCE_ROWS", 63)
    monkeypatch.setattr(copied_sums, "LEAST_BYTES", 4096)
    for name in ("TWO_SHOT_BYTES", "MANY_TWO_SHOT_BYTES"):
        monkeypatch.setattr(collectives, name, 2048)
    return device


def make_group(
    driver: Any, folder: Path, rank: int, size: int = 2, card: int | None = None, page: DevicePage | None = None
) -> CardGroup:
    compute = Stream("compute", CPU, purpose="compute", order=Order())
    uuid = f"GPU-{rank if card is None else card}"
    return CardGroup(driver, uuid, Place(0, rank), size, folder, compute, MOST * ROWS.row_bytes, page, ROWS)


def make_wires(size: int, left: Callable[[], bool] = lambda: False) -> list[dict[int, Wire]]:
    """Return by rank the wires to the other ranks."""
    wires: list[dict[int, Wire]] = [{} for _ in range(size)]
    for first in range(size):
        for second in range(first + 1, size):
            for rank, peer, end in zip((first, second), (second, first), socket.socketpair(), strict=True):
                made: Any = _Tcp(end)
                wires[rank][peer] = Wire(made, 0, left, peer)
    return wires


def met(wires: dict[int, Wire]) -> dict[int, Wire]:
    """Return the wires once all ranks are there."""
    for wire in wires.values():
        wire.send([memoryview(b"!")])
    for wire in wires.values():
        wire.receive(memoryview(bytearray(1)))
    return wires


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_make_the_same_calls_in_each_generation(
    device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: int
) -> None:
    """Later sums are right, and no kernel is one that boot has not had. A launch that waits for the device ends, too.

    This device waits in the thread that launches, so it lets the held stream go by its timer.
    """
    interpret_few_programs(monkeypatch)
    variants = Variants(monkeypatch, runs=True)
    driver: Any = Waiting(device)
    groups = [make_group(driver, tmp_path, rank, size) for rank in range(size)]
    for number, group in enumerate(groups):
        for _ in range(number + 1):  # as a rank that was there before
            group.warm_up()
        assert group.sums is not None and group.sums.times == []
    warmed = variants.taken()
    wires = [make_wires(size) for _ in range(GENERATIONS)]

    def live(rank: int) -> None:
        group, found = groups[rank], []
        for generation in range(GENERATIONS):
            group.step = 7 * rank
            group.join(generation + 1, lambda met_by=wires[generation][rank]: met(met_by))  # type: ignore[misc]
            assert group.sums is not None and group.calls._mine is not None
            times = group.sums.times
            assert [(each.bytes, each.way) for each in times] == WAYS and all(each.us > 0 for each in times)
            found.append((group.calls._mine.count, group._counters.tolist(), group._lanes.next_shot, group.step))
            own = [memory.fill_(77) for memory in group._own_data()]
            for step in range(1, 4):
                group.step = step
                for rows in (1, 64, 130):
                    part = torch.full((rows, WIDTH), rank + 1.0, dtype=torch.bfloat16)
                    assert torch.equal(group.all_reduce(part, 0), torch.full_like(part, size * (size + 1) / 2))
                residual = torch.ones(5, WIDTH, dtype=torch.bfloat16)
                group.send(torch.full_like(residual, rank + 1.0), 0).add_to(residual)
                assert torch.equal(residual, torch.full_like(residual, 1 + size * (size + 1) / 2))
                column = torch.full((3, 2), rank, dtype=torch.bfloat16)
                assert group.all_gather(column, [2] * size, 0)[0, ::2].tolist() == list(range(size))
                group.compare()
            assert all(bool((memory == 77).all()) for memory in own), "the own places of a rank are its own"
            for memory in own:
                memory.zero_()
            group.close()
        (tmp_path / f"found{rank}").write_text(json.dumps(found))
        kernels = {name.rpartition(".")[2] for name, _ in variants.taken() - warmed}
        assert kernels <= {"_all_gather"}, "which no timed sum is"

    fork(size, live)
    found = [json.loads((tmp_path / f"found{rank}").read_text()) for rank in range(size)]
    assert all(each == found[0] for each in found[1:])
    kernels, pieces = 3 * 3, 3 * 2
    """Three sizes by kernels and one by copies, each three times."""
    for generation, (noted, counters, shot, step) in enumerate(found[0]):
        assert (noted, step) == (kernels + pieces, 0)
        assert {count - ((generation + 1) << 40) for count in counters} == {kernels}
        assert shot == 1 + pieces * (1 if size == 2 else 2)


# --- ranks that wait -----------------------------------------------------------------------------------------------


class Waits:
    """Two ranks with a page each. Kernels launch nothing, and the device of the first waits until it is released."""

    def __init__(self, device: Device, folder: Path, monkeypatch: pytest.MonkeyPatch, cards: tuple[int, int]) -> None:
        self.left, self.log = False, list[str]()
        driver: Any = StandInDriver(device)
        monkeypatch.setattr(driver, "wait_for", self._wait_for)
        monkeypatch.setattr(collectives, "all_reduce", lambda *args: self.log.append(self._launched()))
        monkeypatch.setattr(LateRanks, "start", lambda looks: None)
        self.pages = [folder / f"page{rank}" for rank in range(2)]
        self.groups = [
            make_group(driver, folder, rank, 2, cards[rank], DevicePage(self.pages[rank])) for rank in range(2)
        ]
        # It is there, and times nothing.
        self.groups[1]._timed = None
        monkeypatch.setattr(Clock, "query", lambda event: self.released)
        fill = self.groups[0]._fill

        def fill_at_last(*words: int) -> None:
            assert not self.log or self.released, "the host would wait for a device that waits"
            fill(*words)

        monkeypatch.setattr(self.groups[0], "_fill", fill_at_last)

    def _wait_for(self, word: int, value: int, stream: int) -> None:
        self.log.append("waits")

    def _launched(self) -> str:
        flags = self.groups[0]._flags
        assert flags is not None and not self.groups[0]._late.active  # type: ignore[union-attr]
        return "launched, held" if flags.value(Flag.READ) < RELEASED else "launched"

    @property
    def released(self) -> bool:
        """Whether the first one's device goes on: it is held no more, and its sums are released."""
        flags = self.groups[0]._flags
        return flags is not None and all(flags.value(flag) >= RELEASED for flag in Flag)

    def meet(self) -> list[threading.Thread]:
        """Have both join; return their threads, whose errors are in `errors`."""
        self.errors: list[BaseException | None] = [None, None]
        wires = make_wires(2, lambda: self.left)

        def join(rank: int) -> None:
            try:
                self.groups[rank].join(1, lambda: met(wires[rank]))
            except (PeerLostError, SupersededError) as error:
                self.errors[rank] = error

        threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in range(2)]
        for thread in threads:
            thread.start()
        return threads


@pytest.fixture
def waits(device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Waits]:
    monkeypatch.setattr(sum_ways, "_HELD_S", PATIENCE_S)
    # Without copies: pieces are launched by a driver that waits for nothing.
    monkeypatch.setattr(copied_sums, "AT_ONCE_ROWS", MOST)
    yield Waits(device, tmp_path, monkeypatch, (0, 1))


@pytest.mark.parametrize("how", ["lost", "superseded"])
def test_a_rank_that_waits_for_another_leaves_its_device_released(waits: Waits, how: str) -> None:
    first, second = waits.meet()
    second.join(PATIENCE_S)
    until(lambda: len(waits.log) > 1 and waits.groups[0]._flags.value(Flag.READ) >= RELEASED)  # type: ignore[union-attr]
    first.join(0.05)
    assert first.is_alive(), "it waits for the device, which waits for the other rank"
    flags = waits.groups[0]._flags
    assert flags is not None and flags.value(Flag.FILLED) == 0
    if how == "lost":
        waits.groups[1].close()
    else:
        waits.left = True
    first.join(PATIENCE_S)
    error = waits.errors[0]
    if how == "lost":
        assert isinstance(error, PeerLostError) and (error.peer, error.rank) == (0, 1)
    else:
        assert isinstance(error, SupersededError)
    assert waits.groups[0]._flags is None and waits.groups[0]._table[0] == 0, "it has left the generation"
    assert [DevicePageReader(page).late() for page in waits.pages] == [(0, [])] * 2
    assert times_of(waits.groups[0]) == []

    waits.left = False
    waits.groups[1].close()
    waits.log.clear()
    for thread in waits.meet()[::-1]:
        until(lambda: waits.groups[0]._flags is not None and len(waits.log) > 1)
        waits.groups[0].releases()[0]()
        thread.join(PATIENCE_S)
    assert waits.errors == [None, None] and len(times_of(waits.groups[0])) == 3, "they meet again"


def test_the_stream_is_held_until_all_is_launched(waits: Waits) -> None:
    """So that times are those of cards, and not of the host that launches."""
    first, second = waits.meet()
    second.join(PATIENCE_S)
    until(lambda: len(waits.log) > 1 and waits.groups[0]._flags.value(Flag.READ) >= RELEASED)  # type: ignore[union-attr]
    assert waits.log == ["waits"] + ["launched, held"] * 9
    waits.groups[0].releases()[0]()
    first.join(PATIENCE_S)
    assert waits.errors == [None, None]
    assert [each.way for each in times_of(waits.groups[0])] == [ONE_SHOT, ONE_SHOT, TWO_SHOTS]


def test_a_launch_that_fails_lets_the_stream_go(waits: Waits, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        waits.log.append("fails")
        raise PeerLostError("planted", 0, 1)

    monkeypatch.setattr(collectives, "all_reduce", fails)
    for thread in waits.meet():
        thread.join(PATIENCE_S)
    assert str(waits.errors[0]) == "planted" and waits.log == ["waits", "fails"]
    assert waits.groups[0]._flags is None


def test_ranks_that_share_a_card_time_nothing(device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    waits = Waits(device, tmp_path, monkeypatch, (3, 3))
    waits.groups[0].sums = SumsInfo(times=[SumTime(bytes=1, us=1.0)])
    for thread in waits.meet():
        thread.join(PATIENCE_S)
    assert waits.errors == [None, None] and waits.log == [] and times_of(waits.groups[0]) == []


def test_boot_launches_each_timed_sum_before_ranks_meet(
    device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A kernel that is loaded when they meet could wait for a device that waits for another rank."""
    driver: Any = StandInDriver(device)
    model, launched = Layers(device, True, False), list[int]()
    model.group = group = make_group(driver, tmp_path, 0)
    monkeypatch.setattr(collectives, "all_reduce", lambda part, *args: launched.append(part.nbytes))
    StandInStage(device, tmp_path, 0, 2, model).buffers.warm_up()
    assert launched == [64, 1024, 2048] and group._lanes.next_shot == 3


def times_of(group: CardGroup) -> list[SumTime]:
    assert group.sums is not None
    return group.sums.times


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(1e-3)
