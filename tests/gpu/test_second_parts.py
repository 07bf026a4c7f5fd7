"""A rank that stops between the two exchanges of a call is late, by the memory of the rank that waits for it."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, which has no macOS build")

from interpreted_ranks import PART_BYTES, Member, interpret_few_programs
from ppengine.stage.backends.cuda.late_ranks import CallMarks
from ppkernels.gpu import collectives, rank_memory
from ppkernels.gpu.sampling import DeviceSampling, Parameters
from test_greedy_ranks import columns_of

SIZE, ROWS, BASE = 2, 3, 5 << 40
NUMBER = BASE + 1


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("a rank that waits here is interpreted")
    interpret_few_programs(monkeypatch)
    monkeypatch.setattr(collectives, "TWO_SHOT_BYTES", 512)
    monkeypatch.setattr(collectives, "SHARE_TILE", 64)


class Waiting:
    """Memory of two ranks, of which one runs in a process of its own. A test plays the other."""

    def __init__(self) -> None:
        one = collectives.memory_bytes(SIZE, PART_BYTES)
        self._shared = torch.frombuffer(mmap.mmap(-1, SIZE * one + 4096), dtype=torch.uint8)
        begin = self._shared.data_ptr()
        self.own, self.release = begin, begin + SIZE * one
        self._addresses = [begin, begin + one]
        self._counters = torch.full((collectives.PROGRAMS,), BASE)
        self._marks = CallMarks(begin, self._counters.data_ptr(), 0, SIZE, PART_BYTES)

    @contextmanager
    def running(self, call: Callable[[Member], object]) -> Iterator[int]:
        pid = os.fork()
        if pid == 0:
            call(Member(0, SIZE, self._addresses, self.release, BASE))
            os._exit(0)
        try:
            yield pid
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise

    def behind(self) -> set[int]:
        return self._marks.behind([value(address) for address in self._marks.addresses])


def value(address: int) -> int:
    return ctypes.c_int64.from_address(address).value


def write(address: int, number: int) -> None:
    ctypes.c_int64.from_address(address).value = number


def draw(member: Member) -> None:
    sampling = DeviceSampling(ROWS, torch.device("cpu"), banned=1)
    sampling.set(range(ROWS), [Parameters(1.0, 1.0, 3, seed=row) for row in range(ROWS)])
    rows = torch.arange(ROWS, dtype=torch.int32)
    member.choose_below(torch.randn(ROWS, 32), columns_of(64, 0, SIZE), sampling, rows, rows, 3)


def add(member: Member) -> None:
    member.reduce(torch.ones(8, 32))


def send_pairs(memory: int) -> None:
    _, words = collectives.newest_of(1, SIZE, PART_BYTES)
    for word in range(2 * ROWS):
        write(memory + words[NUMBER & 1] + 8 * word, (NUMBER & 0xFFFFFFFF) << 32)


def raise_flags(memory: int) -> None:
    (first, _), _ = collectives.newest_of(1, SIZE, PART_BYTES)
    for program in range(collectives.PROGRAMS):
        write(memory + first + 8 * program, NUMBER)


@pytest.mark.parametrize(("call", "send_first"), [(draw, send_pairs), (add, raise_flags)], ids=["top-k", "two shots"])
def test_a_rank_waits_for_first_parts_and_then_for_second_ones(
    call: Callable[[Member], None], send_first: Callable[[int], None]
) -> None:
    waiting = Waiting()
    (own_first, own_second), own_words = collectives.newest_of(0, SIZE, PART_BYTES)
    theirs = waiting.own + collectives.memory_bytes(SIZE, PART_BYTES)
    with waiting.running(call) as pid:
        until(lambda: any(value(theirs + at) for at in (own_first, *own_words)))
        time.sleep(0.2)
        assert waiting.behind() == {1} and value(waiting.own + own_second) == 0, "it waits for a first part"
        send_first(waiting.own)
        until(lambda: value(waiting.own + own_second) == NUMBER)
        assert waiting.behind() == {1}, "and for a second one"
        until(lambda: value(theirs + own_second) == NUMBER)
        (_, second), _ = collectives.newest_of(1, SIZE, PART_BYTES)
        write(waiting.own + second, NUMBER)
        assert waiting.behind() == set()
        write(waiting.release, rank_memory.RELEASED)
        assert os.waitpid(pid, 0)[1] == 0


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)
