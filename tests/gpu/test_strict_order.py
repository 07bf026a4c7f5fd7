"""Strict order on a GPU stage: each launch is waited for, by looking, and no wait outlives its generation."""

from __future__ import annotations

from pathlib import Path

import pytest
from ppengine.common.ring import Kind, RingReader
from ppengine.protocol.steps import Check, Move, MoveKind
from ppengine.stage.backends.cuda.device_tokens import LocalTokenTable
from ppengine.stage.wire import PeerLostError, SupersededError
from standin_card import Device, Pair, alone, decode, prompt, request


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def in_order(log: list[str]) -> list[str]:
    """Return what was launched without a wait before what came next."""
    return [one for one, after in zip(log, [*log[1:], "end"], strict=True) if one != "waited" and after != "waited"]


def test_every_launch_is_waited_for(device: Device, tmp_path: Path) -> None:
    stage = alone(device, tmp_path)
    stage.step(map_blocks=8).finish()
    device.looks = 3
    device.log.clear()
    stage.step(prompt(), checks=Check.STRICT, **request()).finish()
    assert device.log == [
        word
        for name in ("parameters", "embed", "part", "part", "part", "part", "head", "choose", "copied")
        for word in ((name, "waited") if name != "copied" else ("waited",))
    ]
    device.log.clear()
    stage.step(decode(6), checks=0).finish()
    assert "waited" not in device.log


def test_swaps_and_zeroing_are_waited_for(device: Device, tmp_path: Path) -> None:
    stage = alone(device, tmp_path)
    stage.step(map_blocks=8, **request()).finish()
    stage.step(checks=Check.STRICT).finish()
    device.looks = 3
    device.log.clear()
    stage.step(map_blocks=16).finish()
    assert device.log[-1] == "waited" and set(device.log[:-1]) == {"zero"}, "the layers' new memory as one"
    for kind, pairs in ((MoveKind.OUT, (1, 0)), (MoveKind.IN, (0, 4)), (MoveKind.DEVICE, (4, 5))):
        device.log.clear()
        stage.step(moves=[Move(kind, *pairs)])
        assert device.log.count("waited") == 1 and device.log[-1] == "waited", kind


@pytest.mark.parametrize("by_device", [False, True])
def test_two_stages_give_the_same_tokens_one_operation_at_a_time(
    by_device: bool, device: Device, tmp_path: Path
) -> None:
    tokens = []
    for name, checks in (("free", 0), ("strict", Check.STRICT)):
        (tmp_path / name).mkdir()
        pair = Pair(device, tmp_path / name, by_device)
        device.looks = 2
        tokens.append([pair.step(prompt(), checks=checks, **request())])
        device.log.clear()
        tokens[-1] += [pair.step(decode(position, position)) for position in range(6, 12)]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 7
    alone_by_device = {"copy"} if by_device else set()
    assert set(in_order(device.log)) <= alone_by_device, "what comes from a device is waited for with the layers"


def test_steps_run_without_graphs_meanwhile(device: Device, tmp_path: Path) -> None:
    stage, asked = alone(device, tmp_path), []

    class Graphs:
        def serves(self, plan: object) -> bool:
            asked.append(plan)
            return False

    stage.buffers.graphs = [Graphs()]  # type: ignore[list-item]
    stage.step(prompt(), **request()).finish()
    assert len(asked) == 1
    device.looks = 1
    stage.step(decode(6), checks=Check.STRICT).finish()
    assert len(asked) == 1
    stage.step(decode(7), checks=0).finish()
    assert len(asked) == 2


def test_a_device_that_does_not_come_to_an_end_is_left_with_the_generation(device: Device, tmp_path: Path) -> None:
    stage, looks = alone(device, tmp_path), []
    stage.step(checks=Check.STRICT)

    def over() -> bool:
        looks.append(len(looks))
        return len(looks) > 20

    stage.run_on(over, tokens=LocalTokenTable())
    with pytest.raises(SupersededError, match="device was waited for"):
        stage.step(prompt(), **request())
    assert len(looks) == 21
    assert RingReader(tmp_path / "s0.main.ring").latest(1)[0].kind == Kind.DEVICE, "a long wait is seen from outside"


def test_a_neighbour_that_is_gone_ends_the_wait(device: Device, tmp_path: Path) -> None:
    pair = Pair(device, tmp_path, by_device=True)
    pair.first.step(checks=Check.STRICT)
    device.looks = 0
    pair.last.runner._receiver.edge.close()  # type: ignore[union-attr]
    with pytest.raises(PeerLostError):
        pair.first.step(prompt(), **request())
