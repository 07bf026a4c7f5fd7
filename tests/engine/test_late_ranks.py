"""Ranks on cards that wait for each other: claims of a device's page, which of them hold, and who is named."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from diagnosis_world import SLEEPS, stuck
from monitor_helpers import make_config, remove, sample, stage
from ppengine.agent.agent import Sampler
from ppengine.agent.device_watch import DeviceWatch
from ppengine.agent.late_claims import settle
from ppengine.common.device_page import DevicePage, Word, word_of
from ppengine.common.ring import RingWriter
from ppengine.diagnosis import diagnose, waits
from ppengine.diagnosis.evidence import Evidence, Key
from ppengine.protocol.stage_info import StreamInfo
from ppengine.protocol.stage_samples import StageSample

PLACES = [(0, 0), (0, 1), (1, 0), (1, 1)]
AGE_S = 6.0


# --- from the page to a claim ----------------------------------------------------------------------------------


class Device:
    """A page, and what the device would write into it."""

    def __init__(self, path: Path) -> None:
        self.page = DevicePage(path)
        self.lines = {name: self.page.add(name) for name in ("upload", "compute")}

    def write(self, name: str, begun: int, done: int) -> None:
        """Have launched and begun the pieces up to `begun`, for steps 100 later."""
        words = memoryview(self.page._map).cast("Q")
        for word, count in ((Word.LAUNCHED, begun), (Word.BEGUN, begun), (Word.DONE, done)):
            words[self.lines[name] // 8 + word] = word_of(count, count + 100)
        words.release()


def test_a_claim_is_of_one_piece_of_work_of_the_layers(tmp_path: Path) -> None:
    device = Device(tmp_path / "page")
    watch = DeviceWatch(tmp_path / "page", 1)

    def late() -> list[list[int]]:
        return [stream.late_ranks for stream in watch.look(os.getpid())]

    device.write("upload", 5, 4)
    device.write("compute", 5, 4)
    assert late() == [[], []], "not known"
    device.page.late(5, (0, 3, 31))
    assert late() == [[], [0, 3, 31]]
    device.write("compute", 5, 5)
    assert late() == [[], []], "the piece is done"
    device.write("compute", 6, 5)
    assert late() == [[], []], "a claim of the piece before"
    device.page.late(6, (1,))
    assert late() == [[], [1]]
    device.page.late(0, ())
    assert late() == [[], []]


def test_the_agent_compares_the_claims_of_a_stage() -> None:
    """Rank 1 waits for rank 0, which hangs, and takes rank 2 for late, which has done the step."""
    config = make_config(1)
    try:
        folder, rings = Path(config.ring_dir), []
        for rank, (done, late) in enumerate([(7, [2]), (7, [0]), (8, [])]):
            rings.append(RingWriter(folder / f"s0.{rank}.main.ring", "main", 0, 0))
            device = Device(folder / f"s0.{rank}.device.page")
            device.write("compute", 8, done)
            device.page.late(8, late)
        seen = Sampler(config).look().stages
        shown = [[(one.late_ranks, one.waits_for) for one in each.streams if one.name == "compute"] for each in seen]
        assert shown == [[([], None)], [([0], "stage 0 rank 0")], [([], None)]]
        for ring in rings:
            ring.close()
    finally:
        remove(config)


def at_work(late: list[int], begun: int = 8, done: int | None = 7) -> StreamInfo:
    op = f"device m{begun}" if begun != done else None
    return StreamInfo(
        name="compute", owner="main", op=op, age_ms=AGE_S * 1e3, pending=3, on_device=True, begun_step=begun,
        done_step=done, late_ranks=late, waits_for=None if op else "another stream",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("streams", "holds"),
    [
        ([at_work([1]), at_work([])], [[1], []]),
        ([at_work([1]), at_work([0])], [[], []]),
        ([at_work([1]), at_work([], 8, 8)], [[], []]),
        ([at_work([1]), at_work([], 9, 8)], [[], []]),
        ([at_work([1]), at_work([], 7, 7)], [[1], []]),
        ([at_work([1]), at_work([], 7, None)], [[1], []]),
        ([at_work([1, 2]), at_work([2]), at_work([])], [[1, 2], [2], []]),
        ([at_work([1, 2]), at_work([0, 2]), at_work([])], [[2], [2], []]),
        ([at_work([1], 2**32 - 1, 2**32 - 2), at_work([], 1, 0)], [[], []]),
        ([at_work([1], 1, 0), at_work([], 2**32 - 1, 2**32 - 2)], [[1], []]),
    ],
    ids=[
        "late", "both", "it has done the step", "it is in the next", "it waits for input", "its first step",
        "one behind the other", "two of three", "steps wrap", "steps wrap and it is late",
    ],
)  # fmt: skip
def test_which_claims_hold(streams: list[StreamInfo], holds: list[list[int]]) -> None:
    settle([sample(3, rank=rank, streams=[stream]) for rank, stream in enumerate(streams)])
    assert [stream.late_ranks for stream in streams] == holds
    for stream, late in zip(streams, holds, strict=True):
        if late:
            assert stream.waits_for == ("stage 3 ranks 1, 2" if late == [1, 2] else f"stage 3 rank {late[0]}")


def test_claims_of_ranks_of_other_stages_are_not_compared() -> None:
    streams = [at_work([1]), at_work([0])]
    settle([sample(number, rank=number, streams=[stream]) for number, stream in enumerate(streams)])
    assert [stream.late_ranks for stream in streams] == [[1], [0]]


# --- who is named ----------------------------------------------------------------------------------------------


Picture = dict[Key, StreamInfo]


def waits_for_input(done: int) -> StreamInfo:
    """A device that has work, and waits for another stage before it begins."""
    return at_work([], done, done)


def hang(key: Key, next_step: bool) -> Picture:
    """A kernel behind the layers of step 8 hangs at `key`, all calls of which are complete there.

    With `next_step`, its peer has gone on to a call of the next step. Otherwise it waits for input, and has sent as
    many parts as the rank that hangs, which takes it for late.
    """
    k, r = key
    ahead, other = at_work([r], 9, 8), 1 - r
    if k == 0:
        peer = ahead if next_step else at_work([], 8, 8)
        return {
            key: at_work([] if next_step else [other]), (0, other): peer,
            (1, r): waits_for_input(7), (1, other): at_work([r]),
        }  # fmt: skip
    done = 10 if next_step else 8
    return {
        (0, r): waits_for_input(done), (0, other): at_work([r], done + 1, done),
        key: at_work([] if next_step else [other]), (1, other): ahead if next_step else waits_for_input(8),
    }  # fmt: skip


def picture(streams: Picture, **hosts: Any) -> Evidence:
    """Return the evidence of all places, with the claims as the agent leaves them."""
    samples: list[StageSample] = [
        sample(k, rank=rank, streams=[stream]) for (k, rank), stream in sorted(streams.items())
    ]
    settle(samples)
    stages = []
    for k, rank in PLACES:
        stream = streams[k, rank]
        done = stream.done_step or 0
        fields = {
            "op": "device", "op_step": done + 1, "op_age_s": AGE_S, "progress_age_s": AGE_S, "retired_step": done,
            "finished_step": done, "unretired_age_s": AGE_S, "unretired_step": done + 1, "unretired_tokens": 1,
            "main_state": "S", "wchan": "hrtimer_nanosleep", "cpu": SLEEPS, "tick_age_s": 0.05, "outbox": 0,
        }  # fmt: skip
        fields |= hosts.get(f"at{k}{rank}", {})
        stages.append(stage(k, rank=rank, ranks=2, pid=1000 + 10 * k + rank, streams=(stream,), **fields))
    return stuck(stages, AGE_S, steps_in_flight=(8, 9, 10))


def named(evidence: Evidence) -> list[tuple[int | None, int | None, str]]:
    return [(verdict.stage, verdict.rank, verdict.cause) for verdict in diagnose(evidence) if verdict.root]


@pytest.mark.parametrize("key", PLACES)
@pytest.mark.parametrize("next_step", [True, False])
def test_a_kernel_that_hangs_is_the_one_root_of_all_ranks_that_wait(key: Key, next_step: bool) -> None:
    evidence = picture(hang(key, next_step))
    assert named(evidence) == [(*key, "stream_stuck")]
    first, *others = diagnose(evidence)
    assert first.summary.startswith(f"stage {key[0]} rank {key[1]}: stream compute is stuck in m8")
    assert {(verdict.stage, verdict.rank) for verdict in others} == {place for place in PLACES if place != key}
    assert {verdict.cause for verdict in others} == {"starved"}


def test_the_waits_lead_from_collective_to_collective() -> None:
    shown = {wait.waiter: (wait.on, wait.what) for wait in waits(picture(hang((1, 0), next_step=True)))}
    late = "its part of a collective on the device"
    assert shown["stage 0 rank 1"] == ("stage 0 rank 0", f"{late} (m11)")
    assert shown["stage 0 rank 0"] == ("stage 1 rank 0", "tokens that its device samples")
    assert shown["stage 1 rank 1"] == ("stage 1 rank 0", f"{late} (m9)")
    assert "stage 1 rank 0" not in shown


@pytest.mark.parametrize("key", PLACES)
def test_kernels_that_hang_on_both_ranks_are_two_roots(key: Key) -> None:
    """Each has sent as many parts as the other, so each takes the other for late."""
    k, r = key
    streams = hang(key, next_step=False) | {key: at_work([1 - r]), (k, 1 - r): at_work([r])}
    if k == 0:
        streams |= {(1, 1 - r): waits_for_input(7)}
    assert set(named(picture(streams))) == {(k, 0, "stream_stuck"), (k, 1, "stream_stuck")}


SLEEPS_IN = {"op": "forward", "op_step": 8, "wchan": "futex_do_wait"}


def sleeps_in_forward(key: Key) -> Picture:
    """The host of `key` sleeps in launching step 8, so its device has done all that it has: `begun`, and not done."""
    return hang(key, next_step=False) | {key: at_work([]), (key[0], 1 - key[1]): at_work([key[1]])}


@pytest.mark.parametrize("key", PLACES)
def test_a_host_that_sleeps_in_launching_is_named_and_not_its_device(key: Key) -> None:
    streams = sleeps_in_forward(key)
    streams[key].pending = 1
    if key[0] == 0:
        streams[1, 1 - key[1]] = waits_for_input(7)
    host = {f"at{key[0]}{key[1]}": SLEEPS_IN}
    assert named(picture(streams, **host)) == [(*key, "self_stuck")]
    (first, *_) = diagnose(picture(streams, **host))
    assert f"stage {key[0]} rank {key[1]} is stuck in forward m8" in first.summary


@pytest.mark.parametrize("pending", [1, 2])
def test_a_host_that_is_in_another_step_or_spins_does_not_excuse_its_device(pending: int) -> None:
    streams = sleeps_in_forward((0, 0))
    streams[0, 0].pending, streams[1, 1] = pending, waits_for_input(7)
    spins = {"cpu": SLEEPS.__class__(user=1.0, system=0.0, main_user=0.98, main_system=0.0, main_waited=0.0)}
    for host in [SLEEPS_IN] if pending > 1 else [SLEEPS_IN | spins, SLEEPS_IN | {"op_step": 9}]:
        assert named(picture(streams, at00=host)) == [(0, 0, "stream_stuck")]
