"""The ledger on the streams of a GPU stage: silent on the stage as it is; each wait that is left out is one finding.

What is launched is done at once, so nothing computes wrong: the ledger judges by the order of the program.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ppengine.protocol.steps import TOKEN_ON_DEVICE, Check, Move, MoveKind, Row
from ppengine.stage.backends.cuda.device_tokens import LocalTokenTable
from ppengine.stage.backends.cuda.signals import Signals
from ppengine.stage.backends.cuda.staging import STAGED as KEPT
from ppengine.stage.backends.cuda.staging import Staging
from ppengine.stage.backends.cuda.streams import Event, Order, Stream
from ppengine.stage.edge_flags import Flag
from ppengine.stage.ledger.ledger import Ledger
from ppengine.stage.ledger.picture import picture
from ppengine.stage.pending_step import Pending
from standin_card import CPU, Device, Pair, StandInStage, alone, decode, prompt, request

OUT, IN = MoveKind.OUT, MoveKind.IN
ROUNDS = 8
"""More than there are slots."""
Found = tuple[int, str, list[str]]
"""Stage, summary and evidence."""


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


class Leave:
    """Leaves waits out, each named by its event or word."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch

    def _out(self, owner: type, method: str, is_left: Callable[..., bool]) -> None:
        whole = getattr(owner, method)
        self._patch.setattr(owner, method, lambda *args: None if is_left(*args) else whole(*args))

    def stream(self, name: str, event: str) -> None:
        """Let a stream not wait for an event."""
        self._out(Stream, "wait", lambda stream, waited: (stream.name, waited.name) == (name, event))

    def host(self, event: str) -> None:
        """Let the step loop not wait for an event."""
        self._out(Event, "synchronize", lambda waited: waited.name == event)
        self._out(Pending, "until", lambda pending, waited: getattr(waited, "name", "") == event)

    def flag(self, flag: Flag, which: int | None = None) -> None:
        """Let streams not wait for a flag: each time, or the time `which` alone."""
        times = itertools.count()
        self._out(Signals, "wait", lambda signals, waited, number: waited is flag and which in (None, next(times)))


@pytest.fixture
def leave(monkeypatch: pytest.MonkeyPatch) -> Leave:
    return Leave(monkeypatch)


def ledger_on(pair: Pair) -> None:
    for stage in (pair.first, pair.last):
        stage.step(checks=Check.LEDGER).finish()


def serve(pair: Pair) -> list[Found]:
    """Run a prompt and decodes through both stages; return all findings."""
    ledger_on(pair)
    pair.step(prompt(), **request())
    for position in range(6, 6 + ROUNDS):
        pair.step(decode(position))
    return found(pair.first) + found(pair.last)


def found(stage: StandInStage) -> list[Found]:
    return [(stage.number, one.summary.partition(": ")[2], one.evidence) for one in stage.ledger.findings()]


def sites(evidence: list[str]) -> list[str]:
    """Return the files, with the functions, of both call sites."""
    text = [line.rpartition(", at ")[2] for line in evidence[:2]]
    return [f"{site.partition(':')[0]} {site.split()[1]}" for site in text]


@pytest.mark.parametrize("by_device", [False, True])
def test_a_stage_as_it_is_gives_no_finding(by_device: bool, device: Device, tmp_path: Path) -> None:
    pair = Pair(device, tmp_path, by_device)
    assert serve(pair) == []
    shown = picture(pair.last.ledger, stage=1, rank=0)
    assert [(one.name, one.owner, one.purpose) for one in shown.streams if one.device == "cpu"][:7] == [
        ("compute", "main", "steps"),
        ("kv fill", "kv-map", "zeroing"),
        ("upload", "main", "upload"),
        ("swap out", "main", "swap"),
        ("swap out kernels", "main", "swap"),
        ("swap in", "main", "swap"),
        ("swap in kernels", "main", "swap"),
    ]
    used = {one.name: one for one in shown.buffers}
    landing = used["landing 1"]
    assert landing.generation >= 2
    handed = {(one.producer, one.consumer, one.event): one.count for one in shown.handoffs}
    if by_device:
        assert landing.writer.startswith("send of m") and landing.writer.endswith("(stage 0)")
        assert landing.readers[0].startswith("receive of m")
        assert handed["stage 0", "stream compute", "FILLED"] == ROUNDS + 1
        assert handed["stream compute", "stage 0", "READ"] == ROUNDS + 1 - 3
        sent = {one.name for one in picture(pair.first.ledger, stage=0, rank=0).buffers}
        assert {"slot 0 of stage 1", "slot 1 of stage 1", "slot 2 of stage 1"} <= sent
    else:
        assert landing.writer.endswith("(stream upload)") and landing.readers[0].startswith("taking in of m")
        assert handed["stream upload", "stream compute", "uploaded"] == ROUNDS + 1
        assert handed["stream upload", "thread main", "uploaded"] == ROUNDS + 1


def test_off_nothing_is_declared(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(device, tmp_path, True)
    for ledger in (pair.first.ledger, pair.last.ledger):
        for name in ("launch", "record", "wait", "sync", "peer_does", "read", "write", "issue", "free"):
            monkeypatch.setattr(ledger, name, None)
    pair.step(prompt(), **request())
    pair.step(decode(6))
    pair.last.step(map_blocks=8).finish()
    pair.last.step(moves=[Move(OUT, 1, 0)]).finish()


@pytest.mark.parametrize("by_device", [False, True])
def test_switched_in_the_middle_it_finds_nothing(by_device: bool, device: Device, tmp_path: Path) -> None:
    pair = Pair(device, tmp_path, by_device)
    pair.step(prompt(), **request())
    for position in range(6, 40):
        on = Check.LEDGER | Check.STRICT if position % 10 > 4 else Check.LEDGER
        more = {"checks": on if position // 5 % 2 else 0} if position % 5 == 0 else {}
        device.looks = 1
        pair.step(decode(position), **more)
        assert found(pair.first) + found(pair.last) == []


# --- one wait is left out -----------------------------------------------------------------------------------


def messages(by_device: bool, steps: int, row: Callable[[int], list[Row]] = decode) -> Callable[..., list[Found]]:
    """Return what takes a prompt and some decodes through two stages, all under way at once."""

    def run(device: Device, folder: Path) -> list[Found]:
        pair = Pair(device, folder, by_device)
        ledger_on(pair)
        kept = [pair.launch(prompt(), **request())]
        kept += [pair.launch(row(position)) for position in range(6, 5 + steps)]
        return found(pair.first) + found(pair.last)

    return run


def swaps(*steps: dict[str, Any]) -> Callable[..., list[Found]]:
    """Return what takes steps through a stage that is alone, all under way at once, behind a prompt."""

    def run(device: Device, folder: Path) -> list[Found]:
        stage = alone(device, folder)
        stage.step(map_blocks=8, checks=Check.LEDGER).finish()
        kept = [stage.step(prompt(), **request())]
        for step in steps:
            pending = stage.step(**step)
            # The core hears of a swap that is done before it uses the blocks, and of nothing else here.
            kept.append(pending.finish() if step.get("moves") else pending)
        return found(stage)

    return run


def on_device(position: int) -> list[Row]:
    return decode(position, TOKEN_ON_DEVICE)


def late(device: Device, folder: Path) -> list[Found]:
    """Take a step through two stages whose masks come later; what each stream does is done when it is looked at."""
    pair = Pair(device, folder, True)
    ledger_on(pair)
    pair.step(prompt(), **request())
    under_way = pair.launch(decode(6), late=[0])
    pair.last.runner.sample_late([])
    seen = found(pair.first) + found(pair.last)
    del under_way  # The step loop has it until then: its memory would be freed too early.
    return seen


RUNNER, LANES, EDGES = "cuda/cuda_runner.py", "cuda/copy_lanes.py", "cuda/device_edges.py"
STAGED, TOKENS = "cuda/staged_edges.py", "cuda/device_tokens.py"
CASES: dict[str, tuple[Callable[[Leave], None], Callable[..., list[Found]], int, str, list[str]]] = {
    "upload to layers": (
        lambda leave: leave.stream("compute", "uploaded"), messages(False, 1),
        1, "compute reads landing 1 without waiting for upload, which writes it",
        [f"{STAGED} _upload", f"{STAGED} _upload"],
    ),
    "landing slot read to filled again": (
        lambda leave: leave.stream("upload", "arrived read"), messages(False, 4),
        1, "upload rewrites landing 1 while compute may still read it",
        [f"{STAGED} _upload", f"{STAGED} _upload"],
    ),
    "receive buffer uploaded to filled again": (
        lambda leave: leave.host("uploaded"), messages(False, 2),
        1, "recv<0 rewrites recv<0 buffer while upload may still read it",
        [f"{STAGED} _upload", "stage/transport.py take"],
    ),
    "layers to send": (
        lambda leave: leave.host("copied out"), messages(False, 1),
        0, "main reads copy out 0 without waiting for compute, which writes it",
        [f"{STAGED} send", f"{STAGED} <lambda>"],
    ),
    "message to layers, by device": (
        lambda leave: leave.flag(Flag.FILLED), messages(True, 1),
        1, "compute reads landing 1 without waiting for stage 0, which writes it",
        [f"{EDGES} take", f"{EDGES} take"],
    ),
    "slot read to filled again, by device": (
        lambda leave: leave.flag(Flag.READ), messages(True, 4),
        0, "compute rewrites slot 1 of stage 1 while stage 1 may still read it",
        [f"{EDGES} put", f"{EDGES} put"],
    ),
    "sampled tokens to layers, by device": (
        lambda leave: leave.flag(Flag.FILLED, which=1), messages(True, 2, on_device),
        0, "compute reads newest tokens without waiting for stage 1, which writes it",
        [f"{TOKENS} arrive", f"{RUNNER} _rows"],
    ),
    "layers to late sampling": (
        lambda leave: leave.stream("late sampling", "logits kept"), late,
        1, "late sampling reads kept logits 1 without waiting for compute, which writes it",
        ["cuda/late_sampling.py keep", "cuda/late_sampling.py sample"],
    ),
    "layers to swap out": (
        lambda leave: leave.stream("swap out", "compute before swap"), swaps({"moves": [Move(OUT, 1, 0)]}),
        0, "swap out reads KV block 1 without waiting for compute, which writes it",
        [f"{RUNNER} _rows", f"{LANES} copy"],
    ),
    "swap out to reuse": (
        lambda leave: leave.host("swapped out"), swaps({"moves": [Move(OUT, 2, 0)]}, {"rows": decode(6)}),
        0, "compute rewrites KV block 2 while swap out may still read it",
        [f"{LANES} copy", f"{RUNNER} _rows"],
    ),
    "swap in to layers": (
        lambda leave: (leave.stream("compute", "swapped in"), leave.host("swapped in")),
        swaps({"moves": [Move(OUT, 1, 0)]}, {"moves": [Move(IN, 0, 1)]}, {"rows": decode(6)}),
        0, "compute reads KV block 1 without waiting for swap in, which writes it",
        [f"{LANES} copy", f"{RUNNER} _rows"],
    ),
    "swap out to swap in": (
        lambda leave: (leave.stream("swap in", "swapped out"), leave.host("swapped out")),
        swaps({"moves": [Move(OUT, 1, 0), Move(IN, 0, 4)]}),
        0, "swap in reads host slot 0 without waiting for swap out, which writes it",
        [f"{LANES} copy", f"{LANES} copy"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_wait_that_is_left_out_is_one_finding(name: str, device: Device, leave: Leave, tmp_path: Path) -> None:
    leave_out, run, stage, summary, places = CASES[name]
    (tmp_path / "whole").mkdir()
    assert run(device, tmp_path / "whole") == []
    leave_out(leave)
    ((found_at, said, evidence),) = run(device, tmp_path)
    assert (found_at, said) == (stage, summary)
    assert sites(evidence) == places


def test_a_step_touches_the_blocks_of_its_rows_as_far_as_they_are_used(device: Device, tmp_path: Path) -> None:
    """Behind a row's last block its table has what was there before, and may be another's by now."""
    stage = alone(device, tmp_path)
    stage.step(map_blocks=8, checks=Check.LEDGER, **request(blocks=(1, 2, 7))).finish()
    stage.step(moves=[Move(OUT, 2, 0), Move(OUT, 7, 1), Move(OUT, 5, 2)]).finish()
    reads, writes = stage.runner._touched(stage.runner._state.plan(decode(6)))
    assert [buffer.name for buffer in reads] == ["newest tokens", "KV block 2"]
    assert [buffer.name for buffer in writes] == ["KV blocks", "KV block 2"]


def test_a_swap_that_a_generation_leaves_under_way_is_nobodys(device: Device, tmp_path: Path) -> None:
    stage = alone(device, tmp_path)
    stage.step(map_blocks=8, checks=Check.LEDGER, **request()).finish()
    stage.step(moves=[Move(OUT, 1, 0)])
    device.prompt = True
    stage.runner.leave()
    stage.run_on(tokens=LocalTokenTable())
    under_way = stage.step(prompt(), **request())
    assert found(stage) == [] and under_way.retired.number == 3


@pytest.mark.parametrize(("move", "lane"), [(Move(OUT, 1, 0), "swap out"), (Move(MoveKind.LOAD, 0, 1), "swap in")])
def test_a_generation_is_left_when_its_swaps_are_done(
    move: Move, lane: str, device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stage, record, looks = alone(device, tmp_path), Stream.record, 0
    device.prompt = True

    def late(stream: Stream, *arguments: Any) -> Event:
        point = record(stream, *arguments)

        def query() -> bool:
            nonlocal looks
            looks += 1
            return looks > 9

        if stream.name == lane:
            point.raw.query = query  # type: ignore[method-assign]
        return point

    stage.step(map_blocks=8, **request()).finish()
    monkeypatch.setattr(Stream, "record", late)
    stage.step(moves=[move])
    stage.runner.leave()
    assert looks > 9


def test_integers_that_are_overwritten_on_their_way(device: Device, leave: Leave) -> None:
    for left in (False, True):
        ledger = Ledger(0)
        ledger.thread("main", "cpu")
        ledger.switch(True)
        if left:
            leave.host("integers copied")
        staging = Staging("integers", 4, Stream("compute", CPU, order=Order(ledger)), CPU)
        for step in range(KEPT + 1):
            staging.next()[:] = np.full(4, step, np.int32)
            staging.send(4)
        assert torch.equal(staging.on_device, torch.full((4,), KEPT, dtype=torch.int32))
        summaries = [finding.summary for finding in ledger.findings()]
        assert summaries == ["stage 0: main rewrites integers 1 while compute may still read it"] * left


def test_a_thread_that_launches_on_a_stream_of_the_step_loop_is_told(device: Device, tmp_path: Path) -> None:
    stage = alone(device, tmp_path)
    stage.step(checks=Check.LEDGER).finish()

    def stray() -> None:
        stage.ledger.thread("connector", "cpu")
        stage.buffers.upload.declare("upload")

    thread = threading.Thread(target=stray)
    thread.start()
    thread.join()
    assert [summary for _, summary, _ in found(stage)] == [
        "thread connector launches on stream upload, which thread main owns"
    ]
