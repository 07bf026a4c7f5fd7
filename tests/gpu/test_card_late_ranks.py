"""The ranks that a card waits for, by its own memory: words and flags of calls, copies, and a thread that looks."""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from monitor_helpers import sample
from ppengine.agent.device_watch import DeviceWatch
from ppengine.agent.late_claims import settle
from ppengine.common.device_page import DevicePage, DevicePageReader, Word, word_of
from ppengine.protocol.place import Place
from ppengine.stage.backends.cuda import late_ranks
from ppengine.stage.backends.cuda.card_group import CardGroup
from ppengine.stage.backends.cuda.errors import DriverError
from ppengine.stage.backends.cuda.late_ranks import AFTER_S, TICK_S, CallMarks, LateRanks
from ppengine.stage.backends.cuda.peer_lanes import PeerLanes
from ppengine.stage.backends.cuda.streams import Order, Stream
from ppengine.stage.edge_flags import RELEASED
from ppengine.stage.ledger.actors import Buffer
from ppengine.stage.ledger.ledger import Ledger
from ppkernels.gpu import collectives
from standin_card import CPU, Device, StandInDriver
from standin_sampling import join

SIZE, PART_BYTES, BASE = 3, 1024, 5 << 40
"""Numbers of the fifth generation."""
Way = Callable[["Memory", int, int], None]


class Memory:
    """The memory of a rank, with counters, as kernels leave it."""

    def __init__(self, rank: int = 0, calls: int = 0) -> None:
        self.bytes = torch.zeros(collectives.memory_bytes(SIZE, PART_BYTES), dtype=torch.uint8)
        self.counters = torch.full((collectives.PROGRAMS,), BASE + calls)
        self.marks = CallMarks(self.bytes.data_ptr(), self.counters.data_ptr(), rank, SIZE, PART_BYTES)

    def flag(self, sender: int, call: int) -> None:
        """Have `sender` raise the flags of a call: those of the first shot."""
        (first, _), _ = collectives.newest_of(sender, SIZE, PART_BYTES)
        self._write(first, BASE + call)

    def word(self, sender: int, call: int) -> None:
        """Have `sender` send a call in words."""
        _, words = collectives.newest_of(sender, SIZE, PART_BYTES)
        self._write(words[call & 1], ((call & 0xFFFFFFFF) << 32) | 0x8000)

    def second(self, sender: int, call: int) -> None:
        """Have `sender` send its second part of a call, or this rank wait for those of the others."""
        (_, second), _ = collectives.newest_of(sender, SIZE, PART_BYTES)
        self._write(second, BASE + call)

    def _write(self, at: int, value: int) -> None:
        self.bytes[at : at + 8] = torch.frombuffer(bytearray(struct.pack("<Q", value)), dtype=torch.uint8)

    def behind(self) -> set[int]:
        """Return the ranks that are late, by the words at the addresses."""
        driver = StandInDriver(Device.__new__(Device))
        host = torch.empty(len(self.marks.addresses), dtype=torch.int64)
        driver._device.log = []
        for number, address in enumerate(self.marks.addresses):
            driver.to_host(host.data_ptr() + 8 * number, address, 8, 0)
        return self.marks.behind(host.tolist())


WAYS: dict[str, Way] = {"flags": Memory.flag, "words": Memory.word}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rank", range(SIZE))
def test_a_rank_is_late_until_it_has_sent_its_part_of_the_next_call(way: str, rank: int) -> None:
    memory, send = Memory(rank), WAYS[way]
    peers = [peer for peer in range(SIZE) if peer != rank]
    assert memory.behind() == set(peers), "of the first call"
    send(memory, peers[1], 1)
    for call in (1, 2, 3, 4):
        assert memory.behind() == {peers[0]}
        send(memory, peers[0], call)
        assert memory.behind() == set()
        send(memory, peers[1], call + 1)
        assert memory.behind() == set(), "it has gone on, before this rank has counted the call"
        memory.counters += 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rank", range(SIZE))
def test_a_rank_is_late_until_it_has_sent_its_second_part(way: str, rank: int) -> None:
    memory, (first, other) = Memory(rank), [peer for peer in range(SIZE) if peer != rank]
    for call in (1, 2, 3):
        assert memory.behind() == {first, other}
        WAYS[way](memory, first, call)
        assert memory.behind() == {other}
        WAYS[way](memory, other, call)
        assert memory.behind() == set()
        memory.second(rank, call)
        assert memory.behind() == {first, other}
        memory.second(other, call)
        assert memory.behind() == {first}
        memory.second(first, call)
        assert memory.behind() == set()
        memory.counters += 1


def test_words_count_in_32_bits_and_flags_of_older_generations_are_none() -> None:
    memory = Memory(calls=2**32 - 1)
    memory.word(1, 2**32 - 1)
    assert memory.behind() == {1, 2}
    memory.word(1, 2**32)
    assert memory.behind() == {2}
    memory = Memory(calls=3)
    (first, second), _ = collectives.newest_of(1, SIZE, PART_BYTES)
    memory._write(first, (4 << 40) + 100)
    memory._write(second, (4 << 40) + 100)
    assert memory.behind() == {1, 2}


def test_the_ways_of_a_call_may_alternate() -> None:
    memory = Memory()
    for call, send in zip(range(1, 7), itertools.cycle(WAYS.values())):
        assert memory.behind() == {1, 2}
        send(memory, 1, call)
        send(memory, 2, call)
        assert memory.behind() == set()
        memory.counters += 1


# --- copies ----------------------------------------------------------------------------------------------------


def test_copies_show_who_has_sent_fewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    ranks = []
    for rank in range(SIZE):
        compute = Stream("compute", CPU, purpose="compute", order=Order(Ledger()))
        ranks.append(PeerLanes(StandInDriver(device), "GPU-1", Place(0, rank), SIZE, tmp_path, compute))  # type: ignore[arg-type]
        ranks[-1].allocate(256, 1)
    assert ranks[0].sent() == {}
    addresses = [int.from_bytes(rank.offer.handle, "little") for rank in ranks]
    for each in ranks:
        each.begin()
    for number, each in enumerate(ranks):
        each.open({peer: address for peer, address in enumerate(addresses) if peer != number})
    assert [each.sent() for each in ranks] == [{1: (0, 0), 2: (0, 0)}, {0: (0, 0), 2: (0, 0)}, {0: (0, 0), 1: (0, 0)}]
    for rank in (0, 2):
        ranks[rank].shoot("part", 0, dict.fromkeys(ranks[rank].others, (0, torch.ones(4, 8))), Buffer("part", "", 0))
    assert [each.sent() for each in ranks] == [{1: (0, 1), 2: (1, 1)}, {0: (1, 0), 2: (1, 0)}, {0: (1, 1), 1: (0, 1)}]
    for each in ranks:
        each.close()
        assert each.sent() == {}


# --- the thread ------------------------------------------------------------------------------------------------


class World:
    """A rank that looks, and the clock that its looks are at."""

    def __init__(self, device: Device, folder: Path, rank: int = 0) -> None:
        self.device, self.memory, self.driver = device, Memory(rank), StandInDriver(device)
        self.path = folder / f"page{rank}"
        self.page = DevicePage(self.path)
        self.line = self.page.add("compute")
        self.sent: dict[int, tuple[int, int]] = {}
        self.now_s = 100.0
        self.looks = LateRanks(self.driver, self.page, self.memory.marks, lambda: self.sent)  # type: ignore[arg-type]
        self.looks.prepare()
        self.looks.active = True
        device.log.clear()

    def stream(self, begun: int, done: int) -> None:
        """Have the layers' stream begin and end pieces."""
        words = memoryview(self.page._map).cast("Q")
        for word, count in ((Word.BEGUN, begun), (Word.DONE, done)):
            words[self.line // 8 + word] = word_of(count, count + 10)
        words.release()

    def pass_s(self, seconds: float) -> tuple[int, list[int]]:
        """Let time pass with its looks; return what the page says then."""
        for _ in range(round(seconds / TICK_S)):
            self.now_s += TICK_S
            self.looks.look(self.now_s)
        return DevicePageReader(self.path).late()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    device = Device(monkeypatch)
    device.prompt = True
    return World(device, tmp_path)


NONE: tuple[int, list[int]] = (0, [])


def test_the_driver_is_asked_for_nothing_before_work_has_lasted(world: World) -> None:
    world.stream(7, 7)
    assert world.pass_s(2.0) == NONE
    for piece in range(8, 12):
        world.stream(piece, piece - 1)
        assert world.pass_s(AFTER_S) == NONE
    assert not world.device.log, "no copy"
    world.pass_s(2 * TICK_S)
    assert world.device.log


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_waits_notes_who_is_late_until_it_goes_on(world: World, way: str) -> None:
    world.stream(8, 7)
    WAYS[way](world.memory, 2, 1)
    assert world.pass_s(1.0) == (8, [1])
    WAYS[way](world.memory, 1, 1)
    assert world.pass_s(4 * TICK_S) == (8, [])
    world.memory.counters += 1
    WAYS[way](world.memory, 1, 2)
    assert world.pass_s(4 * TICK_S) == (8, [2])
    world.stream(9, 8)
    assert world.pass_s(TICK_S) == NONE
    assert world.pass_s(1.0) == (9, [2])
    world.stream(9, 9)
    assert world.pass_s(TICK_S) == NONE


def test_a_rank_that_goes_from_call_to_call_notes_no_rank(world: World) -> None:
    """A long prompt, of which each rank waits for the other now and then."""
    world.stream(8, 7)
    for _ in range(20):
        assert world.pass_s(TICK_S)[1] == []
        world.memory.counters += 1


def test_a_rank_that_hangs_itself_sees_the_others_ahead(world: World) -> None:
    world.stream(8, 7)
    world.memory.word(1, 1)
    world.memory.flag(2, 1)
    assert world.pass_s(2.0) == (8, [])


@pytest.mark.parametrize(
    ("sent", "late"),
    [
        ({1: (4, 4), 2: (4, 4)}, [1, 2]),
        ({1: (3, 4), 2: (4, 4)}, [1]),
        ({1: (3, 4), 2: (5, 4)}, [1]),
        ({1: (5, 4), 2: (5, 4)}, []),
        ({1: (RELEASED, 4), 2: (4, RELEASED)}, []),
        ({}, [1, 2]),
    ],
    ids=["equal: the calls decide", "one", "one behind, one ahead", "both ahead", "released", "no copies"],
)
def test_copies_of_a_pair_decide_before_its_calls(
    world: World, sent: dict[int, tuple[int, int]], late: list[int]
) -> None:
    """All calls are complete everywhere: by these alone all others seem to be late."""
    world.stream(8, 7)
    world.sent = sent
    assert world.pass_s(1.0) == (8, late)
    for peer in (1, 2):
        world.memory.word(peer, 1)
    behind = [peer for peer, (theirs, ours) in sent.items() if theirs < ours < RELEASED]
    assert world.pass_s(1.0) == (8, behind)


def test_copies_of_a_pair_are_known_while_the_card_can_not_be_read(world: World) -> None:
    """A stream that waits for a number of another rank holds up copies of other streams."""
    world.stream(8, 7)
    world.sent = {1: (4, 4), 2: (4, 4)}
    world.pass_s(AFTER_S + TICK_S)
    world.device.prompt = False
    world.stream(9, 8)
    world.sent = {1: (4, 5), 2: (5, 5)}
    assert world.pass_s(1.0) == (9, [1])


def test_a_copy_that_does_not_end_is_not_waited_for(world: World) -> None:
    world.stream(8, 7)
    world.device.prompt, world.device.looks = False, 0
    assert world.pass_s(3.0) == NONE
    assert world.device.log.count("copy") <= len(world.memory.marks.addresses), "one at a time"
    world.device.prompt = True
    assert world.pass_s(1.0) == (8, [1, 2])


def test_a_copy_of_the_piece_before_is_not_taken(world: World) -> None:
    """It was asked for when both were late; they have sent since, and this rank is in another piece."""
    world.stream(8, 7)
    world.pass_s(AFTER_S + TICK_S)
    world.device.prompt = False
    world.stream(9, 8)
    world.pass_s(1.0)
    for peer in (1, 2):
        world.memory.flag(peer, 1)
    world.device.prompt = True
    for _ in range(10):
        assert world.pass_s(TICK_S)[1] == []


def test_a_rank_that_has_left_its_generation_looks_at_nothing(world: World) -> None:
    world.stream(8, 7)
    assert world.pass_s(1.0) == (8, [1, 2])
    world.looks.active = False
    assert world.pass_s(TICK_S) == NONE
    world.device.log.clear()
    assert world.pass_s(2.0) == NONE and not world.device.log


def test_a_lost_context_is_not_known_and_ends_the_thread(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise DriverError("cuMemcpyDtoHAsync", "CUDA_ERROR_ILLEGAL_ADDRESS")

    world.stream(8, 7)
    assert world.pass_s(1.0) == (8, [1, 2])
    monkeypatch.setattr(late_ranks, "AFTER_S", 0.0)
    monkeypatch.setattr(world.driver, "to_host", fails)
    monkeypatch.setattr(world.looks, "prepare", lambda: None)
    world.looks.start()
    world.looks.join(60)
    assert not world.looks.is_alive()
    assert DevicePageReader(world.path).late() == NONE


# --- all ranks of a stage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("hangs", range(SIZE))
@pytest.mark.parametrize("way", [*WAYS, "copies"])
def test_all_ranks_wait_for_the_one_that_hangs(
    way: str, hangs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty calls are complete everywhere. The others have sent their parts of the next exchange."""
    device = Device(monkeypatch)
    device.prompt = True
    ranks = [World(device, tmp_path, rank) for rank in range(SIZE)]
    for rank, world in enumerate(ranks):
        world.memory.counters += 20
        for peer in world.memory.marks.peers:
            for call in (19, 20):
                Memory.flag(world.memory, peer, call)
            if way == "copies":
                world.sent[peer] = 7 - (peer == hangs), 7 - (rank == hangs)
            elif peer != hangs:
                WAYS[way](world.memory, peer, 21)
        world.stream(8, 7)
        world.pass_s(1.0)
    streams = [DeviceWatch(world.path, 1).look(os.getpid()) for world in ranks]
    settle([sample(3, rank=rank, streams=found) for rank, found in enumerate(streams)])
    assert [found[0].late_ranks for found in streams] == [[] if rank == hangs else [hangs] for rank in range(SIZE)]


class Side:
    """A rank's group over stand-ins, whose looks a test makes."""

    def __init__(self, device: Device, folder: Path, rank: int) -> None:
        self.page = DevicePage(folder / f"page{rank}")
        self.reader = DevicePageReader(folder / f"page{rank}")
        self.line = self.page.add("compute")
        compute = Stream("compute", CPU, purpose="compute", order=Order(Ledger()))
        driver: Any = StandInDriver(device)
        self.group = CardGroup(driver, "GPU-1", Place(0, rank), 2, folder, compute, 1, self.page)

    def late(self) -> tuple[int, list[int]]:
        """Return what the page says a second into a piece of work."""
        memoryview(self.page._map).cast("Q")[self.line // 8 + Word.BEGUN] = word_of(4, 14)
        looks = self.group._late
        assert looks is not None
        for tick in range(10):
            looks.look(tick * TICK_S)
        return self.reader.late()


def test_a_group_looks_from_its_meeting_until_it_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    device.prompt = True
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(LateRanks, "start", LateRanks.prepare)
    sides = [Side(device, tmp_path, rank) for rank in range(2)]
    assert sides[0].late() == NONE
    for generation in (1, 2):
        join([side.group for side in sides], generation)
        assert [side.late() for side in sides] == [(4, [1]), (4, [0])], "neither has sent anything"
        sides[0].group.send(torch.ones(4, 8), 0)
        assert [side.late() for side in sides] == [(4, [1]), (4, [])]
        for side in sides:
            side.group.close()
            assert side.late() == NONE
