"""What the benchmark adds up: the limit of a device, and where the time of a micro-batch goes."""

from __future__ import annotations

import dataclasses
import itertools
import signal
import time
from pathlib import Path

import msgspec
import pytest
import torch
from checkpoints import make_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from ppengine.bench import __main__ as bench_main
from ppengine.bench import command_line
from ppengine.bench.__main__ import advice
from ppengine.bench.breakdown import Breakdown, DeviceTimes, StageTimes, Times, slowest, table
from ppengine.bench.rates import limit_seconds
from ppengine.bench.workload import Job
from ppengine.checkpoint.model_spec import ModelSpec, read_spec
from ppengine.common.config import EngineConfig, Profile, load_profile
from ppengine.common.partition import best_partition, longest_ms
from ppengine.common.profile_sections import MemoryConfig, ModelConfig, ParallelConfig
from ppengine.common.ring import Gauge, Kind, Record, RingWriter
from ppengine.offline.arguments import make_profile
from transformers import AutoConfig, AutoModelForCausalLM

MS = 1_000_000


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return read_spec(make_checkpoint(tmp_path_factory.mktemp("bench") / "m", "llama", dtype="float32"))


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize(("model", "billions"), [("opt-6.7b", 6.658), ("llama-8b", 8.030)])
def test_profiles_to_measure_with_have_the_shape_of_their_name(model: str, billions: float, stages: int) -> None:
    profile = load_profile(f"{model}-pp{stages}")
    assert (profile.name, profile.parallel.pipeline) == (f"{model}-pp{stages}", stages)
    as_offline = make_profile(profile.model.path, pipeline_parallel_size=stages).scheduler
    assert profile.scheduler == as_offline, "what is measured is what LLM does"
    assert read_spec(Path(profile.model.path)).num_layers == 32
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(profile.model.path))
    assert shape.num_parameters() / 1e9 == pytest.approx(billions, abs=0.001)


@given(
    st.integers(1, 6).flatmap(
        lambda stages: st.tuples(
            st.integers(stages, 14), st.floats(0.1, 5), st.lists(st.floats(0, 9), min_size=stages, max_size=stages)
        )
    )
)
@settings(max_examples=150, deadline=None)
def test_no_other_partition_is_faster(case: tuple[int, float, list[float]]) -> None:
    layers, layer_ms, extra_ms = case
    best = best_partition(layers, layer_ms, extra_ms)
    assert sum(best) == layers and min(best) >= 1
    cuts = itertools.combinations(range(1, layers), len(extra_ms) - 1)
    others = ([b - a for a, b in itertools.pairwise((0, *cut, layers))] for cut in cuts)
    least = min(longest_ms(counts, layer_ms, extra_ms) for counts in others)
    assert longest_ms(best, layer_ms, extra_ms) == pytest.approx(least)


def test_a_partition_of_too_few_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="2 layers are too few for 3 stages"):
        best_partition(2, 1.0, [0.0] * 3)


def row(seq: int, kind: Kind, begun_ms: float, over_ms: float, *, detail: int = 0) -> Record:
    return Record(seq, kind, -1, 1, int(begun_ms * MS), 0, int(over_ms * MS), 4, detail, 0, 0, 1)


def test_operations_are_summed_as_far_as_they_lie_behind_the_beginning() -> None:
    times = Times(since_ns=100 * MS)
    times.feed(
        [
            row(1, Kind.FORWARD, 50, 99),
            row(2, Kind.IDLE, 20, 104),
            row(3, Kind.STEP, 104, 130, detail=17),
            row(4, Kind.RECEIVE, 105, 111),
            row(5, Kind.FORWARD, 112, 129),
            row(6, Kind.IDLE, 130, 0),
        ]
    )
    assert (times.steps, times.context, times.lost) == (1, 17, 0)
    assert times.total_s([Kind.IDLE]) == pytest.approx(0.004)
    assert times.total_s([Kind.IDLE], now_ns=160 * MS) == pytest.approx(0.034), "with the one that is open"
    assert times.total_s([Kind.RECEIVE]) == pytest.approx(0.006)
    assert times.total_s([Kind.FORWARD]) == pytest.approx(0.017)
    assert times.total_s([Kind.STEP]) == pytest.approx(0.003), "what is inside is not its own"


def test_what_lies_in_another_operation_or_beside_the_step_is_counted_once() -> None:
    """On a GPU a message is sent inside sampling, or while another one, or the device, is waited for."""
    times = Times(since_ns=0)
    times.feed([row(1, Kind.STEP, 0, 0), row(2, Kind.SAMPLE, 1, 0), row(3, Kind.SEND, 2, 0), row(4, Kind.ROOM, 3, 0)])
    times.feed([row(1, Kind.STEP, 0, 10), row(2, Kind.SAMPLE, 1, 9), row(3, Kind.SEND, 2, 6), row(4, Kind.ROOM, 3, 5)])
    times.feed([row(5, Kind.DEVICE, 10, 20), row(6, Kind.SEND, 12, 15), row(7, Kind.STEP, 20, 30)])
    times.feed([row(8, Kind.SEND, 31, 33), row(9, Kind.IDLE, 34, 40)])
    times.feed([row(12, Kind.STEP, 40, 50)])
    own = {kind.name: round(1e3 * times.total_s([kind])) for kind in Kind if times.total_s([kind])}
    assert own == {"STEP": 22, "SAMPLE": 4, "SEND": 7, "ROOM": 2, "DEVICE": 7, "IDLE": 6}
    assert times.lost == 2


def one_stage(folder: Path) -> EngineConfig:
    profile = Profile(
        name="x", model=ModelConfig(path="/m"), parallel=ParallelConfig(pipeline=1), memory=MemoryConfig(block_size=16)
    )
    return EngineConfig(
        id="abcdef", name="x", epoch="e", profile=profile, model_path="/m", model_type="llama", layers=[(0, 1)],
        max_model_len=8, run_dir=str(folder), ring_dir=str(folder), started_wall=0.0,
    )  # fmt: skip


def test_a_run_is_broken_down_by_what_its_rings_record(tmp_path: Path) -> None:
    ring = RingWriter(tmp_path / "s0.0.main.ring", "main", 0, 0, capacity=64)
    ring.gauge(Gauge.WEIGHTS_BYTES, 10**9)
    ring.gauge(Gauge.BLOCK_BYTES, 16 * 10**8)
    idle = ring.begin(Kind.IDLE)
    entered = time.monotonic()
    with Breakdown(one_stage(tmp_path)) as seen:
        begun = time.monotonic()
        for number in range(1, 41):  # more records than the ring holds
            ring.end(idle)
            step = ring.begin(Kind.STEP, number, size=1, detail=5)
            forward = ring.begin(Kind.FORWARD, number)
            time.sleep(0.004)
            ring.end(forward)
            send = ring.begin(Kind.SEND, number)
            room = ring.begin(Kind.ROOM, number)
            time.sleep(0.001)
            ring.end(room)
            ring.end(send)
            ring.end(step)
            idle = ring.begin(Kind.IDLE)
            time.sleep(0.005)
        least_s = time.monotonic() - begun
    most_s = time.monotonic() - entered
    (stage,) = seen.stages
    assert stage.micro_batches == 40
    assert stage.compute_ms >= 4
    assert stage.own_ms == pytest.approx(stage.compute_ms + stage.send_ms + stage.other_ms, abs=0.01)
    assert stage.send_ms < 1 < stage.compute_ms, "waiting for room is no work"
    # A crowded machine stretches the run between records and at its ends: in these bounds the share holds on any.
    assert stage.own_ms * 40 / 1e3 / most_s - 1e-3 < 1 - stage.idle < 1 - 40 * (0.001 + 0.005) / most_s + 1e-3
    assert 40 * 1.5 / most_s - 0.01 < stage.gbps < 40 * 1.5 / least_s + 0.01
    assert (stage.device, stage.sample_ms, stage.memory_ms) == (0, 0, 0)
    assert [len(line) for line in table(seen.stages, 10.0)] == [79, 79, 79]
    ring.close()


def test_what_a_device_did_is_beside_what_its_host_did_meanwhile() -> None:
    times = Times(since_ns=100 * MS)
    times.feed([row(1, Kind.STEP, 104, 110), row(2, Kind.FORWARD, 105, 109), row(3, Kind.ON_DEVICE, 60, 112)])
    times.feed([row(4, Kind.IDLE, 110, 130), row(5, Kind.ON_DEVICE, 112, 125)])
    own = {kind.name: round(1e3 * times.total_s([kind])) for kind in Kind if times.total_s([kind])}
    assert own == {"STEP": 2, "FORWARD": 4, "IDLE": 20, "ON_DEVICE": 25}
    assert times.steps == 1


def test_a_run_on_gpus_says_how_long_their_devices_worked(tmp_path: Path) -> None:
    ring = RingWriter(tmp_path / "s0.0.main.ring", "main", 0, 0)
    ring.gauge(Gauge.WEIGHTS_BYTES, 10**9)
    entered = time.monotonic()
    with Breakdown(one_stage(tmp_path)) as seen:
        begun = time.monotonic()
        for number in range(1, 11):
            ring.end(ring.begin(Kind.STEP, number, size=1))
            time.sleep(0.01)
            now = time.monotonic_ns()
            ring.begin(Kind.ON_DEVICE, number, size=1, begun_ns=now - 4 * MS, returned_ns=now, done_ns=now)
        least_s = time.monotonic() - begun
    most_s = time.monotonic() - entered
    (stage,) = seen.stages
    device = stage.on_device
    assert device is not None and device.ms == pytest.approx(4)
    assert 0.04 / most_s - 1e-3 < device.busy < 0.04 / least_s + 1e-3
    assert stage.idle == pytest.approx(1 - device.busy, abs=1e-3)
    assert device.gbps == pytest.approx(10 / 0.04) and 10 / most_s - 0.01 < stage.gbps < 10 / least_s + 0.01
    assert stage.own_ms == pytest.approx(stage.other_ms) and stage.own_ms < 1, "the host has only launched"
    heads = "stage  device: busy   ms a micro-batch   read GB/s while busy   of a copy"
    line = f"    0{device.busy:14.2f}               4.00                  250.0        0.25"
    assert table(seen.stages, 1000.0)[-2:] == [heads, line]
    ring.close()


def test_work_beside_other_work_makes_no_device_more_than_busy(tmp_path: Path) -> None:
    """Late sampling goes on beside the layers of the next step."""
    ring = RingWriter(tmp_path / "s0.0.main.ring", "main", 0, 0)
    with Breakdown(one_stage(tmp_path)) as seen:
        time.sleep(0.02)
        for number in range(1, 4):
            now = time.monotonic_ns()
            ring.begin(Kind.ON_DEVICE, number, size=1, begun_ns=now - 60_000 * MS, returned_ns=now, done_ns=now)
    (stage,) = seen.stages
    assert stage.on_device is not None and (stage.on_device.busy, stage.idle) == (1.0, 0.0)
    ring.close()


def test_layers_are_spread_by_what_devices_took() -> None:
    """Of 10 ms a layer, and 20 ms for the head: its stage is to have fewer layers."""
    stages = [on_device(0, 40.0), on_device(1, 40.0), on_device(2, 60.0)]
    assert advice([4, 4, 4], stages) == (
        "layers [4, 4, 4]: 60.00 ms on the longest stage; 50.00 with --set 'parallel.partition=[5, 5, 2]'"
    )
    assert advice([5, 4, 3], [on_device(0, 50.0), on_device(1, 40.0), on_device(2, 50.0)]).startswith(
        "layers [5, 4, 3] are spread as well as can be: the longest stage has 50.00 ms"
    )
    assert advice([2, 2], [on_device(0, 20.0), on_device(1, 19.0)]).startswith("layers [2, 2] are spread as well")


def on_device(stage: int, ms: float) -> StageTimes:
    """A stage whose host takes 1 ms for launches."""
    host = {"own_ms": 1.0, "compute_ms": 1.0, "layers_ms": 1.0, "sample_ms": 0.0, "send_ms": 0.0, "memory_ms": 0.0}
    device = DeviceTimes(busy=0.9, ms=ms, gbps=3000.0)
    return StageTimes(stage, 10, idle=0.1, device=0.5, other_ms=0.0, gbps=1.0, on_device=device, **host)


def test_ranks_are_shown_with_the_one_that_comes_late(tmp_path: Path) -> None:
    rings = [RingWriter(tmp_path / f"s0.{rank}.main.ring", "main", 0, rank) for rank in range(2)]
    profile = Profile(name="x", model=ModelConfig(path="m"), parallel=ParallelConfig(tensor=2))
    with Breakdown(msgspec.structs.replace(one_stage(tmp_path), profile=profile)) as seen:
        for ring, wait_ms in zip(rings, (1, 20), strict=True):
            begun = time.monotonic_ns()
            for kind, since_ms, ms in ((Kind.STEP, 0, 30), (Kind.FORWARD, 1, 28), (Kind.ALL_REDUCE, 2, wait_ms)):
                at = begun + since_ms * MS
                ring.begin(kind, 1, size=1, begun_ns=at, returned_ns=at, done_ns=at + ms * MS)
    first, second = seen.stages
    assert (first.rank, first.ranks_ms, second.rank, second.ranks_ms) == (0, 1, 1, 20)
    assert (first.own_ms, second.own_ms) == (29, 10), "a wait for another rank is no work"
    lines = table(seen.stages, 10.0)
    assert [line.split()[0] for line in lines[2:4]] == ["0.0", "0.1"] and max(map(len, lines)) <= 80
    assert ["comes last" in line for line in lines[-2:]] == [True, False]
    assert [each.rank for each in slowest(seen.stages)] == [0]
    alike = [dataclasses.replace(first, ranks_ms=7.66), dataclasses.replace(second, ranks_ms=7.71)]
    assert "comes last" not in "\n".join(table(alike, 10.0)), "ranks of one pace"
    for ring in rings:
        ring.close()


def test_the_tables_of_gpus_fit_a_terminal() -> None:
    wide = DeviceTimes(busy=1.0, ms=12_345.67, gbps=12_345.6)
    stages = [dataclasses.replace(on_device(k, 1.0), on_device=wide) for k in range(2)]
    lines = table(stages, 4000.0)
    assert len(lines) == 2 + 2 + 1 + 2 and max(map(len, lines)) <= 80


def test_the_limit_is_what_must_be_read_and_multiplied(spec: ModelSpec) -> None:
    """By hand, for the shape of the checkpoint."""
    shape = msgspec.structs.replace(
        spec, hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4, intermediate_size=16, num_layers=3, vocab_size=10
    )
    layer = 8 * 8 * 2 + 8 * 4 * 2 + 3 * 8 * 16
    read = 5 * 2 * (3 * layer + 80) * 4 / 2 + 2 * (2 * 3 * 4 * 4) * (7 * 5 + 12) / 2
    flops = 2 * 3 * layer * 14 / 2
    jobs = [Job([first] * 7, 5) for first in (1, 2)]
    assert limit_seconds(shape, 4, jobs, 2, 1e-9, 1e-12) == pytest.approx(read + flops)
    behind = [Job([9] * 3 + job.prompt, 5) for job in jobs]
    read += 5 * 2 * 3 * (2 * 3 * 4 * 4) / 2
    flops += 2 * 3 * layer * 3 / 2
    assert limit_seconds(shape, 4, behind, 2, 1e-9, 1e-12) == pytest.approx(read + flops), "a prefix counts once"
    alone = limit_seconds(shape, 4, jobs[:1], 2, 1e-9, 1e-12)
    assert alone == pytest.approx(limit_seconds(shape, 4, jobs[:1], 1, 1e-9, 1e-12)), "one request keeps one stage busy"


class Slow:
    """A side of a comparison that takes a while to get going."""

    def __init__(self) -> None:
        self.seen: list[list[Job]] = []

    def run(self, jobs: list[Job]) -> float:
        self.seen.append(jobs)
        return 50.0 if len(self.seen) == 1 else 0.5 * len(jobs)


def test_both_sides_have_a_round_that_does_not_count(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    engine, baseline = Slow(), Slow()
    monkeypatch.setattr(bench_main, "run_engine", lambda llm, jobs: engine.run(jobs) / 2)
    rounds = [[Job([number], 10)] for number in range(9)]
    bench_main.against_baseline(None, iter(rounds), baseline, 1)  # type: ignore[arg-type]
    assert engine.seen == baseline.seen == rounds[:2]
    out = capfd.readouterr().out
    assert '"ratio": 2.0' in out and "2.00 (from one pair; --rounds 3 gives a spread)" in out
    bench_main.against_baseline(None, iter(rounds), baseline, 2)  # type: ignore[arg-type]
    assert "2.00 (pairs 2.00 to 2.00)" in capfd.readouterr().out


def test_a_ctrl_c_that_comes_twice_interrupts_once() -> None:
    interrupts = []

    def command() -> int:
        for _ in range(2):  # The terminal sends one to the whole group, and the command passes its own on.
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                interrupts.append(1)
        return 130

    before = signal.getsignal(signal.SIGINT)
    try:
        assert command_line.run(command) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(interrupts) == 1
