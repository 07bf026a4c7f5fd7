"""Masks that come behind their step, on a GPU stage: its own runner, the device a stand-in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from ppengine.common.ring import Kind, RingReader
from ppengine.protocol.steps import Mask
from ppengine.protocol.token_mask import TokenMask
from standin_card import WIDTH, Device, StandInStage, alone, decode, prompt, request

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
