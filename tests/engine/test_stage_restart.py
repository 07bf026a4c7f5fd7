"""Real stage processes that lose a neighbour: they leave, keep what they may keep, meet again and compute the same."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint, reference_greedy
from ppengine.common.ring import Gauge, Kind, Phase, RingReader, Word
from ppengine.protocol.steps import TOKEN_REGISTERED, Row
from stage_core import FakeCore, Sequence
from stage_helpers import resident

PROMPT = [7, 99, 3, 45, 12, 80, 33, 5, 6, 64, 111, 20, 9, 17, 52, 71, 88, 41, 13]
BLOCKS = [3, 1, 9, 4, 12, 6, 2, 20]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("restart") / "llama", "llama", dtype="float64", layers=4)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    return reference_greedy(model, PROMPT, 6, torch.float64)


def again(core: FakeCore, expected: list[int]) -> None:
    """Map, register and compute from the beginning."""
    core.map(64)
    sequence = Sequence(core, 0, PROMPT, BLOCKS)
    sequence.prefill(7)
    sequence.decode(5)
    assert sequence.outputs == expected


def left_open(core: FakeCore) -> list[str]:
    """Return what rings show as under way although its generation is over."""
    return [
        f"{path.name}: {Kind(record.kind).name} m{record.step}"
        for path in Path(core.config.ring_dir).glob("*.ring")
        for record in RingReader(path).latest(500)
        if not record.done_ns and record.generation < core.generation
    ]


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
def test_whichever_is_lost_the_others_stay_and_compute_the_same(model: Path, expected: list[int], ahead: bool) -> None:
    with FakeCore(model, stages=4, scheduler={"schedule_ahead": ahead}) as core:
        core.serve()
        again(core, expected)
        for stage in (1, 0, 3):
            # In flight: everybody behind the first stage waits in a receive, which nothing can interrupt.
            os.kill(core.children[0].pid, signal.SIGSTOP)
            rows = [Row(0, 0, 5, False, TOKEN_REGISTERED)]
            core.send(rows=rows)
            last = RingReader(Path(core.config.ring_dir) / "s3.0.main.ring")
            core.until(lambda ring=last: Kind(ring.latest(1)[0].kind) is Kind.RECEIVE, "the last stage waits")
            if stage:
                os.kill(core.children[0].pid, signal.SIGCONT)
            pids = {other: child.pid for other, child in core.children.items() if other != stage}
            core.drained.clear()
            core.restart(stage)
            assert sorted(message.stage for message in core.drained) == sorted(pids)
            assert {other: core.children[other].pid for other in pids} == pids
            again(core, expected)
            assert left_open(core) == [], "what was under way then is under way no more"


def test_a_survivor_keeps_its_mapping_and_gives_up_its_host_copies(model: Path, expected: list[int]) -> None:
    with FakeCore(model, stages=2) as core:
        core.serve(blocks=48)
        again(core, expected)
        ring = RingReader(Path(core.config.ring_dir) / "s0.0.main.ring")
        base, length = ring.gauge(Gauge.KV_BASE), ring.gauge(Gauge.KV_LENGTH)
        before = resident(base, length, core.children[0].pid)
        core.restart(1)
        assert ring.gauge(Gauge.MAPPED_BLOCKS) == 64
        assert ring.word(Word.PHASE) == Phase.SERVING
        assert ring.gauge(Gauge.INBOX) == ring.gauge(Gauge.OUTBOX) == 0
        assert ring.gauge(Gauge.STEP_BEGUN) == ring.gauge(Gauge.STEP_FINISHED)
        assert resident(base, length, core.children[0].pid) == before > 0
        again(core, expected)


def test_leaving_takes_milliseconds_and_a_waiting_rendezvous_can_be_left(model: Path, expected: list[int]) -> None:
    with FakeCore(model, stages=3) as core:
        core.serve()
        begun = time.monotonic()
        child = core.children.pop(2)
        child.kill()
        child.wait(60)
        child.close()
        core.generation = 2
        core.tell_all()
        core.until(lambda: len(core.drained) == 2, "both have drained", 2.0)
        print(f"quiet after {time.monotonic() - begun:.3f} s")
        # They wait for stage 2 of generation 2, which never comes: a newer one does.
        core.children[2] = child
        core.restart(2)
        assert core.generation == 3
        again(core, expected)
