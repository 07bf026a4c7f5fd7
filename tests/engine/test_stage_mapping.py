"""A cache that is changed beside the steps: stages go on, answer once and in time, and forget what is of no account."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, reference_greedy
from ppengine.common.ring import RingReader, Word
from ppengine.protocol.frames import encode
from ppengine.protocol.steps import Mapped
from ppengine.stage.core_link import CoreLink
from ppengine.stage.generations import Generations
from ppengine.stage.step_loop import StepLoop
from stage_core import FakeCore, Sequence

PROMPT = [7, 99, 3, 45, 12, 80, 33, 5, 6, 64, 111, 20, 9, 17, 52, 71, 88, 41, 13]
BLOCKS = [3, 1, 9, 4, 12, 6, 2, 20]
SLOW = {0: "standins.slow_mapping_stage"}
"""Stage 0 alone: the other one changes at once."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("mapping") / "llama", "llama", dtype="float64", layers=2)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    return reference_greedy(model, PROMPT, 6, torch.float64)


@pytest.fixture
def core(model: Path) -> Iterator[FakeCore]:
    with FakeCore(model, modules=SLOW) as core:
        prepare(core)
        core.serve()
        prepare(core, False)
        yield core


def prepare(core: FakeCore, done: bool = True) -> None:
    """Let changes be prepared from here on, or not."""
    gate = Path(core.config.run_dir) / "prepared"
    if done:
        gate.touch()
    else:
        gate.unlink()


def begin(core: FakeCore, blocks: int) -> int:
    """Send a step that changes the mapping, and wait until it has retired everywhere and stage 1 has answered."""
    number = core.send(map_blocks=blocks)
    core.result(number)
    core.until(lambda: number in core.mapped, "stage 1 has ended it")
    assert set(core.mapped[number]) == {1}
    return number


def compute(core: FakeCore, expected: list[int]) -> None:
    sequence = Sequence(core, 0, PROMPT, BLOCKS)
    sequence.prefill(7)
    sequence.decode(5)
    assert sequence.outputs == expected
    core.release()


@pytest.mark.parametrize("blocks", [200, 32])
def test_steps_go_on_beside_a_change_and_it_is_answered_once(core: FakeCore, expected: list[int], blocks: int) -> None:
    number = begin(core, blocks)
    compute(core, expected)
    assert set(core.mapped[number]) == {1}
    prepare(core)
    compute(core, expected)
    assert core.mapped.pop(number)[0] == Mapped(1, number, 0, 0, blocks, "")
    compute(core, expected)
    assert number not in core.mapped


def test_a_stage_without_work_looks_often_until_a_change_has_ended(core: FakeCore) -> None:
    number = begin(core, 200)
    ring = RingReader(Path(core.config.ring_dir) / "s0.0.main.ring")
    turns = ring.word(Word.MAIN_TICKS)
    core.until(lambda: ring.word(Word.MAIN_TICKS) >= turns + 50, "50 turns; idle ones take 5 s", 2.5)
    prepare(core)
    core.until(lambda: 0 in core.mapped[number], "stage 0 has ended it")


def test_what_cannot_be_is_answered_like_all_else(core: FakeCore) -> None:
    too_many = core.ready[0].reserved_blocks + 100_000
    number = begin(core, too_many)
    prepare(core)
    core.until(lambda: 0 in core.mapped[number], "stage 0 has ended it")
    refused = core.mapped[number][0]
    assert refused.blocks == 64 and refused.error.startswith(f"cannot map {too_many} blocks")


def test_in_a_new_generation_only_its_own_change_is_answered(core: FakeCore, expected: list[int]) -> None:
    old = begin(core, 200)
    core.restart(1)
    new = begin(core, 64)
    prepare(core)
    core.until(lambda: 0 in core.mapped[new], "stage 0 has ended it")
    assert set(core.mapped[old]) == {1} and core.mapped[new][0] == Mapped(2, new, 0, 0, 64, "")
    compute(core, expected)


def test_a_stage_leaves_in_the_middle_of_a_change(core: FakeCore) -> None:
    begin(core, 200)
    core.shutdown(0)
    assert core.children[0].wait(60) == 0
    assert core.complaints(0) == []


class ChangingRunner:
    """A runner whose change ends when the test says so."""

    changing, ended, lacks_masks = True, False, 0

    def mapped(self) -> Mapped | None:
        if not self.ended:
            return None
        self.changing = False
        return Mapped(1, 8, 0, 0, 64)


def test_who_waits_for_a_neighbour_looks_until_the_change_has_ended() -> None:
    """As a stage on a GPU does inside of a receive."""
    sent: list[Any] = []
    generations, runner = Generations(1), ChangingRunner()
    link: Any = CoreLink(SimpleNamespace(send=sent.append), generations, threading.Event())  # type: ignore[arg-type]
    loop = StepLoop(runner, link, None, generations)  # type: ignore[arg-type]
    assert loop.meanwhile() and loop.meanwhile() and not sent
    runner.ended = True
    assert not loop.meanwhile() and sent == [encode(Mapped(1, 8, 0, 0, 64))]
    runner.changing, runner.ended = True, False
    generations.announce(2, 1)
    assert not loop.meanwhile(), "there is no use in waiting for a generation that is over"
