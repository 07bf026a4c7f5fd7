"""The ledger in real stage processes and on real edges: silent on the engine as it is, loud on a planted mistake."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from ppengine.protocol.check_messages import StageFindings
from ppengine.protocol.steps import Check
from ppengine.stage.edge import Edge
from ppengine.stage.edge_addresses import FolderBook
from ppengine.stage.ledger.ledger import Ledger
from ppengine.stage.meeting import meet
from ppengine.stage.transport import WireReceiver, WireSender
from stage_core import FakeCore, Sequence
from stage_helpers import WIDTH, make_ring, until

SENT = 12
BIG = 60_000
"""Tokens of a message that does not fit into the kernel: 23 MB."""


class Pair:
    """Both ends of one edge in this process, with one ledger."""

    def __init__(self, folder: Path, ledger: Ledger | None = None) -> None:
        self.ledger = ledger or Ledger(0)
        self.ledger.thread("main")
        ends: dict[bool, Edge] = {}

        def open_end(upstream: bool) -> None:
            wire = meet(FolderBook(folder, 1), "e0", upstream, int(upstream), lambda: False)
            ends[upstream] = Edge(wire, upstream, make_ring(folder, "send" if upstream else "receive"))

        other = threading.Thread(target=open_end, args=(False,))
        other.start()
        open_end(True)
        other.join()
        self.receiver = WireReceiver(ends[False], BIG, WIDTH, torch.float64, self.ledger)
        self.sender = WireSender(ends[True], make_ring(folder, "main"), self.ledger)

    def round(self, step: int, tensor: torch.Tensor) -> torch.Tensor:
        """Send one tensor and return what arrives."""
        self.receiver.expect(step, len(tensor))
        self.sender.put(step, tensor)
        return self.receiver.take(step).clone()


def forward(step: int) -> torch.Tensor:
    return torch.full((4, WIDTH), float(step), dtype=torch.float64)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def test_the_transport_as_it_is_gives_no_finding(pair: Pair) -> None:
    pair.ledger.switch(True)
    for step in range(1, SENT):
        assert torch.equal(pair.round(step, forward(step)), forward(step))
    pair.sender.finish(10)
    assert pair.ledger.findings() == []
    known = {(p.name, c.name, via): n for p, c, via, n in pair.ledger.handoffs}
    assert known["recv<0", "main", "receive"] == SENT - 1
    assert known["stage 0", "recv<0", "message"] == known["send>1", "stage 1", "message"] == SENT - 1
    assert known["send>1", "main", "send"] == SENT - 1
    written = [buffer for buffer in pair.ledger.buffers if buffer.generation]
    assert {buffer.name.split()[0] for buffer in written} == {"recv<0", "send>1"}


class Untouched(Ledger):
    """A ledger that fails the test when somebody declares anything to it."""

    def __getattribute__(self, name: str) -> Any:
        assert name not in ("launch", "sync", "read", "write", "release", "acquire", "issue", "free", "passed"), name
        return super().__getattribute__(name)


def test_off_is_one_look_at_it(tmp_path: Path) -> None:
    pair = Pair(tmp_path, Untouched(0))
    for step in range(1, SENT):
        assert torch.equal(pair.round(step, forward(step)), forward(step))
    pair.sender.finish(10)
    pair.ledger.switch(True)
    with pytest.raises(AssertionError, match="launch"):
        pair.round(SENT, forward(SENT))


def test_a_send_buffer_that_is_reused_too_early_is_found(pair: Pair) -> None:
    """The mistake of persistent send buffers: filled for the next micro-batch before the last one is delivered."""
    pair.ledger.switch(True)
    persistent = torch.zeros(BIG, WIDTH, dtype=torch.float64)
    for step in (1, 2):
        pair.sender.put(step, persistent.fill_(step))
    for step in (1, 2):
        pair.receiver.expect(step, BIG)
        pair.receiver.take(step)
    pair.sender.finish(10)
    (finding,) = pair.ledger.findings()
    assert finding.cause == "stream_order"
    assert finding.summary == "stage 0: main rewrites send>1 buffer 0 while send>1 may still read it"
    text = "\n".join(finding.evidence)
    assert "read by: send of m1 on stream send>1 (cpu, owner main, for send), at stage/transport.py:" in text
    assert "rewritten by: result of m2 on thread main, at engine/test_stage_ledger.py:" in text
    known = {(p.name, c.name, via): n for p, c, via, n in pair.ledger.handoffs}
    assert known["send>1", "send", "send"] == 2


def test_a_send_buffer_that_is_reused_in_time_is_none(pair: Pair) -> None:
    """What the kernel has taken whole may be filled again."""
    pair.ledger.switch(True)
    persistent = torch.zeros(4, WIDTH, dtype=torch.float64)
    for step in range(1, SENT):
        assert torch.equal(pair.round(step, persistent.fill_(step)), forward(step))
    assert pair.ledger.findings() == []


def test_a_receive_buffer_that_is_given_back_too_early_is_found(pair: Pair) -> None:
    """The step loop puts the buffer that it computes from back among the free ones, and lets another read go on."""
    pair.ledger.switch(True)
    pair.round(1, forward(1))

    def late_reader() -> None:
        pair.ledger.read(pair.receiver.buffer, "forward on a helper thread")

    mark = pair.ledger.release("helper")
    thread = threading.Thread(target=lambda: (pair.ledger.acquire(mark), late_reader()), name="helper")
    thread.start()
    thread.join()  # In time by luck: nothing that the program waits for says so.
    for step in range(2, 6):
        pair.round(step, forward(step))
    pair.sender.finish(10)
    (finding,) = pair.ledger.findings()
    assert finding.summary == "stage 0: recv<0 rewrites recv<0 buffer while helper may still read it"


def test_switched_in_the_middle_of_sends_it_finds_nothing(pair: Pair) -> None:
    for step in range(1, 40):
        if step % 5 == 0:
            pair.ledger.switch(not pair.ledger.on)
        assert torch.equal(pair.round(step, forward(step)), forward(step))
        assert pair.ledger.findings() == []
    pair.sender.finish(10)


def greedy(core: FakeCore, switch: bool) -> tuple[list[list[int]], list[StageFindings]]:
    """Decode three requests together, two tokens ahead, with the checks switched on the way."""
    vocabulary = 100
    prompts = [np.random.default_rng(seed).integers(4, vocabulary, 11).tolist() for seed in range(3)]
    sequences = [Sequence(core, slot, prompt, [1 + 4 * slot, 2 + 4 * slot, 3 + 4 * slot, 4 + 4 * slot])
                 for slot, prompt in enumerate(prompts)]  # fmt: skip
    for sequence in sequences:
        sequence.prefill(5)
    for turn in range(12):
        checks = {}
        if switch and turn % 2:
            checks = {"checks": (Check.LEDGER, Check.LEDGER | Check.STRICT, 0, Check.STRICT)[turn // 2 % 4]}
        numbers = [
            core.send(rows=[sequence.row() for sequence in sequences], **checks),
            core.send(rows=[sequence.row(-1, ahead=1) for sequence in sequences]),
        ]
        for number in numbers:
            sampled = core.result(number)
            for sequence in sequences:
                sequence.take(sampled)
    if switch:
        core.run(checks=0)
    return [sequence.outputs for sequence in sequences], core.findings


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_stages_switch_at_a_step_boundary_with_the_same_tokens(stages: int, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "opt", dtype="float64", layers=3)
    outputs = []
    for switch in (False, True):
        with FakeCore(folder, stages, scheduler={"schedule_ahead": True}) as core:
            core.serve()
            tokens, findings = greedy(core, switch)
            outputs.append(tokens)
            assert all(not message.findings for message in findings)
            if switch:
                until(lambda: core.pump() or len({m.stage for m in core.findings}) == stages, "each stage has told")
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("planted", [True, False])
def test_a_live_stage_that_reuses_its_send_buffer_too_early_is_found(planted: bool, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "opt", dtype="float64", layers=3)
    modules = {1: "standins.reusing_stage"} if planted else {}
    with FakeCore(folder, 3, modules=modules) as core:
        core.serve()
        core.run(checks=Check.LEDGER)
        sequence = Sequence(core, 0, list(range(10, 21)), [1, 2, 3])
        sequence.prefill(4)
        sequence.decode(8)
        found = [message for message in core.findings if message.findings]
        if not planted:
            assert not found
            return
        until(lambda: core.pump() or any(message.findings for message in core.findings), "the stage tells")
        message = next(message for message in core.findings if message.findings)
        assert (message.stage, message.check) == (1, Check.LEDGER)
        (finding,) = message.findings
        assert finding.summary == "stage 1: main rewrites send>2 buffer 0 while send>2 may still read it"
        text = "\n".join(finding.evidence)
        assert "on stream send>2 (cpu, owner main, for send), at stage/transport.py:" in text
        assert "standins/reusing_stage.py:" in text
