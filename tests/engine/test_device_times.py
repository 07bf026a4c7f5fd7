"""What is said of a stage by what its device did: long chunks, a card that slows down, a kernel that never ends."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from diagnosis_world import evidence, healthy, pipeline_held_at, stuck, with_stage
from monitor_helpers import record
from ppengine.agent.pace import Totals
from ppengine.agent.step_history import History
from ppengine.common.ring import Kind
from ppengine.diagnosis import diagnose
from ppengine.diagnosis.budgets import expected_ms
from ppengine.diagnosis.evidence import StageEvidence
from ppengine.protocol.snapshot import Verdict
from ppengine.protocol.stage_info import StreamInfo

MS, SECOND = 1_000_000, 1_000_000_000
LAUNCH_MS = 1.5
"""Of every step, however long the device is at it."""


class Stage:
    """The main ring of a stage on a device as its reader has it."""

    def __init__(self) -> None:
        self.history, self.now_ms = History(), 1000.0
        self._seq, self._step = itertools.count(1), itertools.count(1)
        self.history.pace.close(int(self.now_ms * MS), Totals())

    def boot(self, tokens: int, ms: float) -> None:
        """Have boot try so many tokens."""
        self._feed(0, tokens, 0, ms)

    def steps(self, count: int, tokens: int, ms: float, context: int = 800) -> None:
        """Let steps be launched and done, one after the other; seconds end as they come."""
        for _ in range(count):
            self._feed(next(self._step), tokens, context, ms)
            self.history.pace.close(int(self.now_ms * MS), Totals(waited_ns=0))

    def seen(self, stage: StageEvidence, tokens: int = 1) -> StageEvidence:
        """Return the evidence with what this ring has told, while a step of `tokens` is at the device."""
        expected = expected_ms(self.history.work_ms(), tokens)
        pace = self.history.pace.sample(int(self.now_ms * MS))
        return msgspec.structs.replace(
            stage, expected_s=None if expected is None else expected / 1e3, unretired_tokens=tokens, pace=pace
        )

    def _feed(self, step: int, tokens: int, context: int, ms: float) -> None:
        begun, over = self.now_ms, self.now_ms + max(ms, LAUNCH_MS + 0.1)
        what = {"step": step, "size": tokens, "detail": context}
        kinds = (Kind.STEP, Kind.FORWARD) if step else (Kind.FORWARD,)
        rows = [record(next(self._seq), kind, begun, begun + LAUNCH_MS, **what) for kind in kinds]
        rows.append(record(next(self._seq), Kind.ON_DEVICE, over - ms, over, returned_ns=int(over * MS), **what))
        self.history.feed(rows)
        self.now_ms = over


def at_device(ring: Stage, tokens: int, seconds: float) -> list[Verdict]:
    """Return what is said of two stages whose second has had a step of `tokens` at its device for so long."""
    stream = StreamInfo(
        name="compute", owner="main", op="device m8", age_ms=seconds * 1e3, pending=1, on_device=True, begun_step=8,
        done_step=7,
    )  # fmt: skip
    stages = with_stage(pipeline_held_at(2, 1, seconds), 1, op="device", streams=(stream,))
    return diagnose(stuck([stages[0], ring.seen(stages[1], tokens)], seconds))


def test_a_chunk_that_takes_seconds_here_is_not_told_and_one_that_hangs_is() -> None:
    ring = Stage()
    ring.boot(1, 12.0)
    ring.boot(2048, 4000.0)
    assert at_device(ring, 2048, 9.0) == []
    ring.steps(3, 2048, 3900.0)
    ring.steps(200, 8, 12.0)
    assert at_device(ring, 2048, 9.0) == [], "steps that are short make no chunk shorter"
    assert at_device(ring, 1500, 9.0) == [], "nor one of a size that has not been"
    assert at_device(ring, 2048, 20.0)[0].cause == "stream_stuck"


@pytest.mark.parametrize("steps", [0, 200])
def test_a_kernel_that_hangs_in_a_decode_is_told_within_two_seconds(steps: int) -> None:
    ring = Stage()
    ring.boot(1, 12.0)
    ring.boot(2048, 4000.0)
    ring.steps(1, 2048, 4000.0)
    ring.steps(steps, 8, 12.0)
    assert at_device(ring, 8, 1.3) == []
    root = at_device(ring, 8, 1.5)[0]
    assert (root.stage, root.cause, root.root) == (1, "stream_stuck", True)


@pytest.mark.parametrize(("tokens", "quick"), [(8, 30), (64, 2)], ids=["usual", "rare"])
def test_hangs_one_after_the_other_have_the_same_limit(tokens: int, quick: int) -> None:
    """Also at a rank that waits on its device for another one: to its ring that is a step as long."""
    ring = Stage()
    ring.boot(1, 12.0)
    ring.boot(2048, 4000.0)
    for seconds in (4.0, 6.4, 15.0, 1.5):
        ring.steps(quick, tokens, 12.0)
        assert at_device(ring, tokens, 1.3) == []
        assert "nothing retired for 1.5s; the limit for this work is 1.4s" in at_device(ring, tokens, 1.5)[0].evidence
        ring.steps(1, tokens, seconds * 1e3)


def test_the_first_step_of_a_stage_that_hangs_raises_no_limit() -> None:
    ring = Stage()
    ring.steps(1, 8, 30_000.0)
    assert ring.history.work_ms() == []
    assert at_device(ring, 8, 1.5)[0].cause == "stream_stuck"


def test_work_that_is_longer_than_before_raises_the_limit() -> None:
    ring = Stage()
    ring.boot(1, 12.0)
    ring.boot(2048, 4000.0)
    ring.steps(1, 8, 1200.0)
    assert at_device(ring, 8, 5.0) == [], "it was within its limit"
    ring.steps(1, 2048, 9000.0)
    assert at_device(ring, 2048, 40.0) == [], "five times as long is the limit, and it is longer now"
    ring.steps(1, 16_384, 90_000.0)
    assert expected_ms(ring.history.work_ms(), 16_384) == 90_000.0, "the largest so far"


def test_a_second_step_in_a_row_beyond_the_limit_is_work() -> None:
    ring = Stage()
    ring.boot(1, 12.0)
    ring.steps(2, 8, 3000.0)
    assert at_device(ring, 8, 14.0) == []
    assert at_device(ring, 8, 14.5)[0].cause == "stream_stuck"


def test_a_first_compile_raises_no_alarm_and_the_limit() -> None:
    ring = Stage()
    ring.boot(8, 30_000.0)
    assert at_device(ring, 8, 100.0) == []
    ring.steps(1, 8, 25_000.0)
    assert at_device(ring, 8, 100.0) == []


def test_a_card_that_is_slower_than_it_was_is_a_straggler_though_launches_are_as_fast() -> None:
    rings = [Stage(), Stage()]
    for ring in rings:
        ring.boot(1, 10.0)
        ring.steps(600, 8, 10.0)
    assert [root for root in say(rings) if root.root] == []
    rings[0].steps(800, 8, 10.2)
    rings[1].steps(540, 8, 15.0)
    (root,) = say(rings)
    assert (root.stage, root.cause) == (1, "straggler")
    assert root.summary == "stage 1 is 1.5x slower than it was"
    assert "own time of a step 15.0 ms; like steps took 10.0 ms here before" in root.evidence


def test_a_host_is_a_straggler_only_where_its_launches_take_longer_than_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ring = Stage()
    ring.steps(600, 8, 10.0)
    monkeypatch.setattr("test_device_times.LAUNCH_MS", 9.0)
    ring.steps(800, 8, 10.0)
    assert say([ring]) == []
    monkeypatch.setattr("test_device_times.LAUNCH_MS", 15.0)
    ring.steps(800, 8, 10.0)
    assert [root.summary for root in say([ring])] == ["stage 0 is 1.5x slower than it was"]


def say(rings: list[Stage]) -> list[Verdict]:
    return diagnose(evidence([ring.seen(stage) for ring, stage in zip(rings, healthy(len(rings)), strict=True)]))
