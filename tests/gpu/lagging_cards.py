"""Cards whose streams lag behind their hosts: hosts launch, and a lot says which stream does its next operation.

All of it is one thread. Copies take several turns, so that a write amid a copy shows. Memory of a tensor that is gone
is given to the next one at once, as torch's allocator does on the stream that it belongs to.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from standin_card import Device, StandInDriver

Floats = NDArray[np.float32]
Ready = Callable[[], bool]
Host = Iterator[Ready]
"""A program that yields, again and again, when it may go on."""
_TURNS = 2
"""Turns that a copy takes."""


def at_once() -> bool:
    """Return true."""
    return True


class Cards:
    """All streams of all ranks, by handle."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self.lots = random.Random(seed)
        self.queues: dict[int, deque[tuple[Ready, Callable[[], None]]]] = {}
        """Operations: whether one may begin, and what it does."""
        self.paces: dict[int, float] = {}
        cards, handles = self, itertools.count(1)

        class RawStream:
            def __init__(self, device: object = None, priority: int = 0) -> None:
                self.cuda_stream = next(handles)
                cards.queues[self.cuda_stream] = deque()
                cards.paces[self.cuda_stream] = 10 ** cards.lots.uniform(-2, 1)

            def wait_event(self, event: Any) -> None:
                done = event.done
                cards.launch(self.cuda_stream, lambda: None, lambda: bool(done))

        class RawEvent:
            def record(self, stream: RawStream) -> None:
                self.done = done = list[bool]()
                cards.launch(stream.cuda_stream, lambda: done.append(True))

        self.device = Device(monkeypatch)
        monkeypatch.setattr(torch.cuda, "Stream", RawStream)
        monkeypatch.setattr(torch.cuda, "Event", RawEvent)

    def launch(self, stream: int, work: Callable[[], None], ready: Ready = at_once) -> None:
        """Put an operation behind the others of a stream."""
        self.queues[stream].append((ready, work))

    def run(self, *hosts: Host) -> None:
        """Run hosts to their ends, and streams meanwhile. At the end some streams may have work left."""
        paced = {host: 10 ** self.lots.uniform(-1, 1) for host in hosts}
        waits: dict[Host, Ready] = dict.fromkeys(paced, at_once)
        while paced:
            able = {host: pace for host, pace in paced.items() if waits[host]()}
            streams = [stream for stream, queue in self.queues.items() if queue and queue[0][0]()]
            assert able or streams, "all wait for each other"
            weights = [*able.values(), *(self.paces[stream] for stream in streams)]
            (chosen,) = self.lots.choices([*able, *streams], weights)
            if isinstance(chosen, int):
                self.queues[chosen].popleft()[1]()
                continue
            try:
                waits[chosen] = next(chosen)
            except StopIteration:
                del paced[chosen]

    def blocked(self, stream: int) -> bool:
        """Return whether a stream has nothing to do, or waits."""
        queue = self.queues[stream]
        return not queue or not queue[0][0]()


class LaggingDriver(StandInDriver):
    """The driver of all cards."""

    def __init__(self, cards: Cards) -> None:
        super().__init__(cards.device)
        self._cards = cards

    def wait_for(self, word: int, value: int, stream: int) -> None:
        flag = ctypes.c_uint64.from_address(word)
        self._cards.launch(stream, lambda: None, lambda: flag.value >= value)

    def write_word(self, word: int, value: int, stream: int) -> None:
        flag = ctypes.c_uint64.from_address(word)
        self._cards.launch(stream, lambda: setattr(flag, "value", value))

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        cuts = [size * turn // _TURNS for turn in range(_TURNS + 1)]
        for first, end in itertools.pairwise(cuts):
            self._cards.launch(stream, _move(target + first, source + first, end - first))


def _move(target: int, source: int, size: int) -> Callable[[], None]:
    def move() -> None:
        ctypes.memmove(target, source, size)

    return move


class Pool:
    """Memory of one rank for tensors of up to `floats`, given out again in the order of torch's: the newest first."""

    def __init__(self, floats: int) -> None:
        self._floats, self._free, self._kept = floats, list[int](), list[Any]()

    def take(self, rows: int, width: int) -> torch.Tensor:
        """Return memory; a host that drops the tensor gives it back."""
        if not self._free:
            self._kept.append(memory := (ctypes.c_float * self._floats)())
            self._free.append(ctypes.addressof(memory))
        address = self._free.pop()
        array = floats_at(address, rows * width).reshape(rows, width)
        weakref.finalize(array, self._free.append, address)
        return torch.from_numpy(array)


def floats_at(address: int, count: int) -> Floats:
    """Return memory as an array, which keeps nothing."""
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))
