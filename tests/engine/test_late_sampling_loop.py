"""The step loop with a runner that samples behind masks which come later: it does when they come, wherever it waits."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ppengine.common.ring import Kind, RingReader
from ppengine.protocol.frames import Codec, encode
from ppengine.protocol.steps import FromStage, LateMasks, Retired, Step
from ppengine.stage import core_link
from ppengine.stage.core_link import CoreLink
from ppengine.stage.generations import Generations
from ppengine.stage.pending_step import Pending
from ppengine.stage.recorder import Recorder
from ppengine.stage.step_loop import MOST_PENDING, StepLoop


class Waits:
    """A completion that is done when the test, or the runner, says so."""

    def __init__(self) -> None:
        self.over = False

    def done(self) -> bool:
        return self.over

    def synchronize(self) -> None: ...


class LateRunner:
    """A runner whose late steps are done once they are sampled, and the others at once."""

    changing, outgoing = False, None

    def __init__(self) -> None:
        self.lacks_masks = self.looks = 0
        """`looks`: how often the loop looks at the neighbours until a step is done behind its masks."""
        self.log: list[str] = []
        self._waits = Waits()

    def announce(self, step: Step) -> None: ...
    def prepare(self, step: Step) -> None: ...

    def check_neighbours(self) -> None:
        if not self.lacks_masks:
            self.looks -= 1
            self._waits.over = self.looks <= 0

    def execute(self, step: Step) -> Pending:
        self.log.append(f"layers {step.number}")
        pending = Pending(Retired(1, step.number, 0, 0))
        if step.late:
            self.lacks_masks, self._waits = step.number, Waits()
            pending.until(self._waits)
        return pending

    def sample_late(self, masks: list[Any]) -> None:
        self.log.append(f"sample {self.lacks_masks}")
        self.lacks_masks, self._waits.over = 0, self.looks == 0


class Core:
    """The core's end of the socket: gives one message each time that the stage looks, and a pause for None."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.coming: deque[Any] = deque()
        self.retired: list[int] = []
        self.seen: list[Kind] = []
        self.reader: RingReader | None = None
        self.stop = threading.Event()
        self._decode = Codec(FromStage).decode
        monkeypatch.setattr(core_link, "readable", lambda socket: self._look())

    def _look(self) -> bool:
        if self.reader is not None:
            self.seen += [Kind(record.kind) for record in self.reader.latest(1) if not record.done_ns]
        if not self.coming:
            self.stop.set()
        elif self.coming[0] is None:
            self.coming.popleft()
        else:
            return True
        return False

    def poll(self, timeout_ms: int) -> bool:
        return bool(self.coming) and self.coming[0] is not None

    def recv(self) -> bytes:
        return encode(self.coming.popleft())

    def send(self, payload: bytes) -> None:
        message = self._decode(payload)
        assert isinstance(message, Retired)
        self.retired.append(message.number)


def run(core: Core, folder: Path, *coming: Any, looks: int = 0) -> list[str]:
    """Let the loop take what comes; return what the runner did."""
    runner, generations = LateRunner(), Generations(1)
    runner.looks = looks
    ring = Recorder(folder / "main.ring", "main", 0, 0)
    core.reader = RingReader(folder / "main.ring")
    core.coming.extend(coming)
    socket: Any = SimpleNamespace(poll=core.poll, recv=core.recv, send=core.send)
    any_runner: Any = runner
    StepLoop(any_runner, CoreLink(socket, generations, core.stop), ring, generations).run()
    return runner.log


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Core:
    return Core(monkeypatch)


def step(number: int, late: bool = False) -> Step:
    return Step(1, number, 0, rows=[], late=[0] if late else [])


def test_it_samples_while_it_waits_for_a_step(core: Core, tmp_path: Path) -> None:
    done = run(core, tmp_path, step(1, late=True), None, None, LateMasks(1, 1, []), None, step(2), None)
    assert done == ["layers 1", "sample 1", "layers 2"]
    assert core.retired == [1, 2]
    assert Kind.MASK in core.seen and Kind.DEVICE not in core.seen, "it waits for the core, and for no device"


def test_behind_its_masks_a_step_waits_for_the_device(core: Core, tmp_path: Path) -> None:
    """A wait for masks excuses a device that does not move: a stuck kernel would not be found."""
    done = run(core, tmp_path, step(1, late=True), None, None, LateMasks(1, 1, []), *[None] * 5, looks=3)
    assert done == ["layers 1", "sample 1"] and core.retired == [1]
    assert [kind for kind in core.seen if kind in (Kind.MASK, Kind.DEVICE)][-1] is Kind.DEVICE


def test_it_samples_behind_steps_that_come_first(core: Core, tmp_path: Path) -> None:
    steps = [step(number) for number in range(2, 2 + MOST_PENDING)]
    done = run(core, tmp_path, step(1, late=True), *steps, *[None] * 4, LateMasks(1, 1, []), None)
    assert done == ["layers 1", *(f"layers {one.number}" for one in steps), "sample 1"]
    assert core.retired == [1, 2, 3], "acknowledgements are in order"


def test_masks_may_come_before_their_step(core: Core, tmp_path: Path) -> None:
    done = run(core, tmp_path, LateMasks(1, 1, []), step(1, late=True), None, None)
    assert done == ["layers 1", "sample 1"] and core.retired == [1]


def test_a_wait_for_a_neighbour_takes_masks(core: Core, tmp_path: Path) -> None:
    """The stage before may need the tokens of a late step for its next message."""
    runner, generations = LateRunner(), Generations(1)
    socket: Any = SimpleNamespace(poll=core.poll, recv=core.recv, send=core.send)
    any_runner: Any = runner
    ring = Recorder(tmp_path / "main.ring", "main", 0, 0)
    loop = StepLoop(any_runner, CoreLink(socket, generations, core.stop), ring, generations)
    loop._execute(step(1, late=True))
    core.coming.extend([None, LateMasks(1, 1, []), None])
    assert loop.meanwhile() and runner.lacks_masks == 1
    assert loop.meanwhile() and not runner.lacks_masks
    assert not loop.meanwhile() and core.retired == [1]
