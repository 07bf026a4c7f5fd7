"""Masks that come behind their step, on a GPU stage: its own runner, the device a stand-in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ppengine.common.ring import Kind, RingReader
from ppengine.protocol.steps import Mask, Row, Step
from ppengine.protocol.token_mask import TokenMask
from standin_card import WIDTH, Device, Pair, StandInStage, alone, decode, prompt, request
from standin_sampling import booted, sampling_card

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in's tensors are not on a card")


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StandInStage:
    stage = alone(Device(monkeypatch), tmp_path)
    stage.step(map_blocks=8).finish()
    stage.step(prompt(), **request()).finish()
    return stage


def mask(token: int) -> Mask:
    words = np.zeros(-(-WIDTH // 32), "<i4")
    words[token // 32] = 1 << token % 32
    return Mask([0], TokenMask(words.tobytes()))


def test_layers_are_launched_before_the_masks_are_waited_for(stage: StandInStage, tmp_path: Path) -> None:
    seen: list[list[Kind]] = []

    def bring(number: int) -> list[Mask]:
        records = RingReader(tmp_path / "s0.main.ring").latest(100)
        seen.append([Kind(record.kind) for record in records if record.step == number])
        return [mask(2)]

    stage.runner._late_masks = bring
    pending = stage.step(decode(6), late=[0])
    pending.finish()
    assert [one.token for one in pending.retired.sampled] == [2]
    assert seen and Kind.FORWARD in seen[0] and Kind.SAMPLE not in seen[0]
    (wait,) = (record for record in RingReader(tmp_path / "s0.main.ring").latest(100) if record.kind == Kind.MASK)
    assert wait.done_ns and wait.size == 1


def test_a_late_row_without_a_mask_is_free(stage: StandInStage) -> None:
    stage.runner._late_masks = lambda number: []
    free = stage.step(decode(6)).finish()
    assert stage.step(decode(6), late=[0]).finish().sampled == free.sampled


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

    runner._late_masks = bring if prepares else lambda number: [mask(2)]
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
