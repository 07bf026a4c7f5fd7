"""A release that comes late: the control thread is held up in it, and its stage is in the next generation by then."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from ppengine.protocol.place import Place
from ppengine.stage.backends.cuda.card_group import CardGroup
from ppengine.stage.backends.cuda.device_tokens import LocalTokenTable
from ppengine.stage.backends.cuda.streams import Order, Stream
from ppengine.stage.edge_flags import RELEASED, EdgeFlags, Flag
from ppengine.stage.generations import Generations
from ppengine.stage.ledger.ledger import Ledger
from standin_card import CPU, Device, StandInDriver, StandInStage, _edge

PATIENCE_S = 60.0
SIZE = 2


class HeldUp:
    """A point in a release at which the thread that makes it is held up, once."""

    def __init__(self) -> None:
        self.there, self.go_on = threading.Event(), threading.Event()

    def __call__(self) -> None:
        if not self.there.is_set():
            self.there.set()
            assert self.go_on.wait(PATIENCE_S)


class HeldUpTokens(LocalTokenTable):
    """An end whose release is held up; that of the group comes after it."""

    def __init__(self, held_up: HeldUp) -> None:
        super().__init__()
        self._held_up = held_up

    def release(self) -> None:
        self._held_up()


class Stage:
    """Two ranks of a stage over stand-ins. The first has a runner, which `Generations` releases."""

    def __init__(self, device: Device, folder: Path) -> None:
        driver: Any = StandInDriver(device)
        self.groups = [
            CardGroup(
                driver, "GPU-1", Place(0, rank), SIZE, folder, Stream("compute", CPU, order=Order(Ledger())), 1
            )
            for rank in range(SIZE)
        ]  # fmt: skip
        self.stage = StandInStage(device, folder, 0, 1)
        self.generations = Generations(1)

    def meet(self) -> None:
        """Have both join the present generation, each in a thread: they wait for each other."""
        wires = [end.wire for end in _edge(1, 0)]
        with ThreadPoolExecutor(SIZE) as pool:
            joins = [
                pool.submit(group.join, self.generations.current, lambda rank=rank: {1 - rank: wires[rank]})  # type: ignore[misc]
                for rank, group in enumerate(self.groups)
            ]
        for join in joins:
            join.result()

    def serve(self, tokens: LocalTokenTable | None = None) -> None:
        """Make the runner of the present generation, as the step loop does."""
        self.stage.run_on(tokens=tokens or LocalTokenTable(), group=self.groups[0])
        self.generations.on_newer = self.stage.runner.release

    def leave(self) -> None:
        """Leave the generation, as the step loop does."""
        self.generations.on_newer = None
        for group in self.groups:
            group.close()
        self.generations.enter()

    @property
    def words(self) -> list[ctypes.c_uint64]:
        """The words that the device of the first rank waits for: of sums by kernels, and of those by copies."""
        group = self.groups[0]
        (peer,) = group._lanes._peers
        assert group._flags is not None and peer.signals is not None
        at = [group._flags.address + Flag.FILLED, peer.signals._flags.address + group._lanes._flag(peer, theirs=False)]
        return [ctypes.c_uint64.from_address(address) for address in at]


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Stage]:
    device = Device(monkeypatch)
    device.prompt = True
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    made = Stage(device, tmp_path)
    made.meet()
    yield made
    made.leave()


@pytest.mark.parametrize("point", ["before", "between"])
def test_a_late_release_reaches_nothing_of_the_next_generation(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """Ranks keep their group for life. Released waits of the next generation would make its sums wrong."""
    held_up = HeldUp()
    if point == "between":  # the words of the group and those of its lanes
        release = EdgeFlags.release

        def slowly(flags: EdgeFlags, flag: Flag) -> None:
            release(flags, flag)
            held_up()

        monkeypatch.setattr(EdgeFlags, "release", slowly)
    stage.serve(HeldUpTokens(held_up) if point == "before" else None)
    control = threading.Thread(target=stage.generations.announce, args=(2, 1))
    control.start()
    assert held_up.there.wait(PATIENCE_S)
    stage.leave()
    stage.meet()
    stage.serve()
    held_up.go_on.set()
    control.join(PATIENCE_S)
    assert not control.is_alive()
    assert [word.value for word in stage.words] == [0, 0]


@pytest.mark.parametrize("generation", [1, 2])
def test_a_release_lets_a_device_run_on_that_waits(stage: Stage, generation: int) -> None:
    for _ in range(1, generation):
        stage.serve()
        stage.generations.announce(2, 1)
        stage.leave()
        stage.meet()
    stage.serve()
    words, looks, done = stage.words, threading.Barrier(2, timeout=PATIENCE_S), threading.Event()

    def wait_on_the_device() -> None:
        looks.wait()
        while any(word.value < RELEASED for word in words):
            if done.wait(0.001):
                return
        done.set()

    device = threading.Thread(target=wait_on_the_device)
    device.start()
    looks.wait()
    assert not done.wait(0.05), "it waits"
    stage.generations.announce(generation + 1, 1)
    assert done.wait(PATIENCE_S)
    device.join(PATIENCE_S)


def test_a_release_after_the_end_of_its_generation_does_nothing(stage: Stage) -> None:
    stage.serve()
    late = stage.stage.runner.release
    stage.generations.announce(2, 1)
    stage.leave()
    late()
    stage.meet()
    late()
    assert [word.value for word in stage.words] == [0, 0]
