"""Masks that come behind their step, on a GPU stage: its own runner, the device a stand-in."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ppengine.common.ring import Kind, RingReader
from ppengine.protocol.steps import TOKEN_REGISTERED, Check, Mask, Row, Step
from ppengine.protocol.token_mask import TokenMask
from ppengine.stage.backends.cuda import device_buffers
from ppengine.stage.backends.cuda.device_timing import TimedWork
from ppengine.stage.backends.cuda.streams import Event, Stream
from ppengine.stage.wire import SupersededError
from standin_card import WIDTH, Device, Pair, StandInStage, alone, decode, prompt, request
from standin_sampling import booted, sampling_card

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in's tensors are not on a card")


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StandInStage:
    stage = alone(Device(monkeypatch), tmp_path)
    stage.step(map_blocks=8).finish()
    stage.step(prompt(), **request()).finish()
    return stage


def mask(token: int, slot: int = 0) -> Mask:
    words = np.zeros(-(-WIDTH // 32), "<i4")
    words[token // 32] = 1 << token % 32
    return Mask([slot], TokenMask(words.tobytes()))


def test_layers_are_launched_before_the_masks_are_waited_for(stage: StandInStage, tmp_path: Path) -> None:
    seen: list[list[Kind]] = []

    def bring(number: int) -> list[Mask]:
        records = RingReader(tmp_path / "s0.main.ring").latest(100)
        seen.append([Kind(record.kind) for record in records if record.step == number])
        return [mask(2)]

    stage.runner._late._late_masks = bring
    pending = stage.step(decode(6), late=[0])
    pending.finish()
    assert [one.token for one in pending.retired.sampled] == [2]
    assert seen and Kind.FORWARD in seen[0] and Kind.SAMPLE not in seen[0]
    (wait,) = (record for record in RingReader(tmp_path / "s0.main.ring").latest(100) if record.kind == Kind.MASK)
    assert wait.done_ns and wait.size == 1


def test_a_late_row_without_a_mask_is_free(stage: StandInStage) -> None:
    stage.runner._late._late_masks = lambda number: []
    free = stage.step(decode(6)).finish()
    assert stage.step(decode(6), late=[0]).finish().sampled == free.sampled


@pytest.fixture(params=[False, True], ids=["by wire", "by device"])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pair:
    """Two stages with two requests whose prompts are computed."""
    pair = Pair(Device(monkeypatch), tmp_path, request.param)
    for one in (pair.first, pair.last):
        one.step(map_blocks=16, checks=Check.LEDGER).finish()
    pair.step(prompt(), **begun(0))
    pair.step(prompt(1), **begun(1))
    return pair


def begun(slot: int, sample: int = 0) -> dict[str, Any]:
    """Return what makes a request known in `slot`."""
    more = request(slot, blocks=(1 + 3 * slot, 2 + 3 * slot, 3 + 3 * slot))
    more["register"][0].sample = sample
    return more


def chosen(pending: Any) -> list[int]:
    return [sampled.token for sampled in pending.finish().sampled]


def quiet(pair: Pair) -> bool:
    """Return whether the ledgers have found nothing."""
    return not [*pair.first.ledger.findings(), *pair.last.ledger.findings()]


def test_the_next_layers_do_not_wait_for_masks(pair: Pair) -> None:
    card, runner = pair.last.device, pair.last.runner
    late = pair.launch(decode(6), late=[0])[1]
    assert card.log.count("choose") == 2 and runner.lacks_masks == pair.last.steps and not late.done
    parts = card.log.count("part")
    card.prompt = True
    asked: list[tuple[int, int]] = []

    def bring(number: int) -> list[Mask]:
        asked.append((number, card.log.count("part") - parts))
        return [mask(2)]

    runner._late._late_masks = bring
    behind = pair.launch(decode(6, slot=1))[1]
    assert asked == [(pair.last.steps - 1, 8)], "both stages have launched the next layers"
    assert card.log[-2:] == ["choose", "choose"] and not runner.lacks_masks
    assert (chosen(late), len(chosen(behind))) == ([2], 1) and quiet(pair)


def test_masks_that_come_first_are_used_at_once(pair: Pair) -> None:
    card, runner = pair.last.device, pair.last.runner
    card.prompt = True
    runner._late._late_masks = lambda number: pytest.fail("nothing is waited for")
    for position, token in ((6, 2), (7, 5), (8, 1)):
        late = pair.launch(decode(position), late=[0])[1]
        assert not late.done
        runner.sample_late([mask(token)])
        assert late.done and chosen(late) == [token]
    assert len(pair.step(decode(9))) == 1 and quiet(pair)


def test_a_slot_is_not_given_away_before_its_row_is_sampled(pair: Pair) -> None:
    card, runner = pair.last.device, pair.last.runner
    card.prompt = True
    asked: list[int] = []

    def bring(number: int) -> list[Mask]:
        asked.append(card.log.count("parameters"))
        return [mask(2)]

    runner._late._late_masks = bring
    before = card.log.count("parameters")
    late = pair.launch(decode(6), late=[0])[1]
    pair.last.step(**begun(2))
    assert not asked and runner.lacks_masks, "another slot is free"
    kept = pair.last.step(release=[0], **begun(0))
    assert asked == [before + 1], "the tables had the old request"
    assert chosen(late) == [2] and kept.done and quiet(pair)


def test_a_row_behind_late_ones_is_sampled_behind_them(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of the device have one order, on two streams."""
    card, order, wait = pair.last.device, list[str](), Stream.wait

    def noted(stream: Stream, event: Event) -> None:
        order.append(f"{stream.name} behind {event.name}")
        wait(stream, event)

    pair.last.runner._late._late_masks = lambda number: [mask(2, 0), mask(5, 1)]
    monkeypatch.setattr(Stream, "wait", noted)
    monkeypatch.setattr(TimedWork, "goes_on", lambda work: order.append("goes on"))
    late = [pair.launch(decode(6), late=[0])[1], pair.launch(decode(6, slot=1), late=[1])[1]]
    assert "compute behind sampled late" not in order, "layers and copies need none of it"
    free = pair.launch(decode(7))[1]
    assert order.count("late sampling behind logits kept") == 2
    assert order[-2:] == ["compute behind sampled late", "goes on"], "that wait is no work of the step"
    card.prompt = True
    assert [chosen(one) for one in late] == [[2], [5]] and chosen(free) and quiet(pair)


def test_what_sampling_needs_outlasts_the_next_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Graphs leave logits and integers where the next ones overwrite them."""
    pair = Pair(sampling_card(monkeypatch, (4, 8)), tmp_path, by_device=False)
    booted(pair.first, pair.last)
    for slot in (0, 1):
        pair.step(prompt(slot), **begun(slot))
    newest = pair.last.buffers.latest
    assert newest is not None
    before = newest[:2].tolist()
    late = pair.launch(decode(6), late=[0])[1]
    pair.last.runner._late._late_masks = lambda number: [mask(2)]
    pair.launch(decode(6, slot=1))
    assert chosen(late) == [2] and newest[:2].tolist() == [2, before[1]]


def test_copies_go_with_their_step(pair: Pair) -> None:
    """Not later: those of 256 rows are 65 MB, and many steps go by before Python looks for cycles."""
    card, runner = pair.last.device, pair.last.runner
    card.prompt = True
    late = pair.launch(decode(6), late=[0])[1]
    kept = weakref.ref(runner._late._waiting.kept.out)
    gc.disable()
    try:
        runner.sample_late([mask(2)])
        assert kept() is not None, "the stream still reads them"
        assert chosen(late) == [2]
        del late
        assert kept() is None
    finally:
        gc.enable()


def test_a_generation_is_left_while_a_step_waits(pair: Pair) -> None:
    card, runner = pair.last.device, pair.last.runner

    def superseded(number: int) -> list[Mask]:
        raise SupersededError(f"step {number} waited for its masks")

    runner._late._late_masks = superseded
    card.prompt = True
    late = pair.launch(decode(6), late=[0])[1]
    with pytest.raises(SupersededError):
        pair.launch(decode(6, slot=1))
    sampled = card.log.count("choose")
    runner.leave()
    assert card.log.count("choose") == sampled and not late.done and quiet(pair)


def test_boot_takes_the_memory_of_late_sampling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The tensors are of the most rows: torch keeps memory for each stream, and boot counts what it has taken."""
    card, using, taken = sampling_card(monkeypatch, (4, 8)), list[Any](), list[tuple[Any, int]]()

    @contextmanager
    def use(raw: Any) -> Iterator[None]:
        using.append(raw)
        yield
        using.pop()

    def noted(logits: torch.Tensor, masks: Any) -> torch.Tensor:
        taken.append((using[-1], len(logits)))
        return logits

    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(device_buffers, "masked", noted)
    pair = Pair(card, tmp_path, by_device=False)
    booted(pair.first, pair.last)
    late = pair.last.buffers.late_sampling
    assert late is not None and (late.raw, 4) in taken, "the stand-in has four requests at most"
    (tmp_path / "alone").mkdir()
    taken.clear()
    booted(alone(card, tmp_path / "alone"))
    assert [rows for _, rows in taken] == [1], "it waits for masks before the next layers"


def test_no_step_is_prepared_before_its_tables_are_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A step that gives a slot away waits for its row, and the step behind it may have come."""
    card = sampling_card(monkeypatch, (4, 8))
    pair = Pair(card, tmp_path, by_device=False)
    for one in (pair.first, pair.last):
        one.step(map_blocks=16).finish()
    pair.step(prompt(), **begun(0))
    runner, behind = pair.last.runner, [Row(0, 0, 6, True, TOKEN_REGISTERED)]

    def bring(number: int) -> list[Mask]:
        runner.prepare(Step(1, pair.last.steps + 1, 0, rows=behind))
        return [mask(2)]

    runner._late._late_masks = bring
    late = pair.launch(decode(6), late=[0])[1]
    again = request(0, blocks=(7, 8, 9))
    pair.first.step(release=[0], **again).finish()
    pair.last.step(release=[0], **again)
    planned = runner._prepared
    assert planned is not None and planned.number == pair.last.steps + 1
    assert planned.plan.batch.block_tables[0, :2].tolist() == [7, 8]
    pair.launch(behind)
    assert chosen(late) == [2]


BEGUN = {"register": request(1)["register"], "tables": [(1, 0, [4, 5, 6])]}
LATER: list[tuple[list[Row], dict[str, Any]]] = [
    (decode(7), {}),
    ([*decode(8), *prompt(1)], BEGUN),
    ([*decode(9), *decode(6, slot=1)], {"tables": [(0, 0, [1, 2, 3])]}),
]


def run(pair: Pair, card: Device, *, prepares: bool) -> tuple[list[list[int]], list[int | None]]:
    """Take steps with late masks; return their tokens, and what was prepared while the last stage waited."""
    runner, prepared = pair.last.runner, list[int | None]()

    def bring(number: int) -> list[Mask]:
        rows, fields = LATER[len(prepared)]
        before = card.log.copy()
        for _ in range(3):
            runner.prepare(Step(1, number + 1, 0, rows=rows, **fields))
        assert card.log == before, "nothing is launched"
        prepared.append(None if runner._prepared is None else runner._prepared.number - number)
        return [mask(2)]

    runner._late._late_masks = bring if prepares else lambda number: [mask(2)]
    tokens = [pair.step(prompt(), **request()), pair.step(decode(6), late=[0])]
    for place, (rows, fields) in enumerate(LATER, 1):
        tokens.append(pair.step(rows, **fields, late=[0] if place < len(LATER) else []))
    return tokens, prepared


def test_the_next_step_is_prepared_while_masks_are_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    card, found = sampling_card(monkeypatch, (4, 8)), list[list[list[int]]]()
    for prepares in (False, True):
        (tmp_path / str(prepares)).mkdir()
        pair = Pair(card, tmp_path / str(prepares), by_device=False)
        booted(pair.first, pair.last)
        tokens, prepared = run(pair, card, prepares=prepares)
        found.append(tokens)
    assert prepared == [1, None, 1], "a step that begins a request is not prepared"
    assert found[0] == found[1] and len(found[0]) == 5


def test_the_first_stage_prepares_nothing(stage: StandInStage) -> None:
    stage.runner.prepare(Step(1, stage.steps + 1, 0, rows=decode(6)))
    assert stage.runner._prepared is None
