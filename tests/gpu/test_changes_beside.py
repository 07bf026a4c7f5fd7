"""A GPU stage whose cache is changed beside its steps, on the stand-in of a card."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from ppengine.protocol.steps import Mapped, Step
from standin_card import Device, alone, decode, prompt, request


@pytest.mark.parametrize("blocks", [16, 4])
def test_steps_are_done_while_the_mapping_thread_is_not(
    blocks: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device, gate = Device(monkeypatch), threading.Event()
    device.prompt = True
    stage = alone(device, tmp_path)
    runner = stage.runner
    stage.step(map_blocks=8).finish()
    stage.step(prompt(), **request()).finish()
    for call in ("create", "unmap"):
        monkeypatch.setattr(stage.driver, call, lambda *_: gate.wait(20))
    begun = runner.execute(Step(1, 3, 0, map_blocks=blocks))
    assert begun.done and begun.finish().number == 3
    assert runner.changing and runner.mapped() is None
    for number in range(4, 7):
        tokens = runner.execute(Step(1, number, 0, rows=decode(number + 2))).finish().sampled
        assert len(tokens) == 1 and runner.mapped() is None
    assert stage.cache.mapped == min(8, blocks), "what goes is out of reach, what comes is not within it"
    gate.set()
    deadline = time.monotonic() + 20
    while (mapped := runner.mapped()) is None:
        assert time.monotonic() < deadline
        time.sleep(1e-3)
    assert mapped == Mapped(1, 3, 0, 0, blocks) and stage.cache.mapped == blocks
    assert not runner.changing and runner.mapped() is None, "told once"
