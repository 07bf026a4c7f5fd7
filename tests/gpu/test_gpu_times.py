"""What the devices of a real engine did, by its rings, and what a card's own clock says of work of known length.

Stages share a card where there are fewer cards than stages.
"""

from __future__ import annotations

import os
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from real import needs_gpu, pipelines

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "engine"), str(HERE.parent / "end_to_end")]
pytest.importorskip("msgspec", reason="needs the engine's packages")
pytest.importorskip("transformers", reason="makes the checkpoint")

import reference  # noqa: E402
from checkpoints import make_checkpoint  # noqa: E402
from monitor_helpers import until  # noqa: E402
from ppengine import LLM, SamplingParams  # noqa: E402
from ppengine.common.config import EngineConfig, build_profile  # noqa: E402
from ppengine.common.ring import Gauge, Kind, Record, RingReader, RingWriter  # noqa: E402
from ppengine.stage.backends.cuda.device_timing import DeviceTimer  # noqa: E402
from ppengine.stage.backends.cuda.streams import Stream  # noqa: E402

pytestmark = needs_gpu
STEPS, REQUESTS = 24, 12
GLANCE_NS = 5_000_000
"""Between two looks of a host at its device, with what the machine does in between."""


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("stages", pipelines)
def test_every_step_with_tokens_has_what_its_device_did(tmp_path: Path, stages: int, eager: bool) -> None:
    folder = make_checkpoint(tmp_path / "llama", "llama", layers=4)
    profile = build_profile(
        {
            "name": f"times-{os.getpid()}",
            "model": {"path": str(folder), "dtype": "float32", "max_model_len": 256, "skip_tokenizer": True},
            "parallel": {"pipeline": stages, "device": "cuda", "eager": eager},
            "memory": {"device_mib": 4096, "swap_space_gib": 0.01},
            "scheduler": {"max_num_seqs": 32, "max_num_batched_tokens": 64, "schedule_ahead": True},
        },
        base=Path(),
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in reference.prompts(REQUESTS, 100, low=3, high=90, seed=5)]
    with LLM(profile) as llm:
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True), use_tqdm=False)
        config = EngineConfig.load(Path(llm.llm_engine.run_dir) / "engine.json")
        for stage in range(stages):
            check(RingReader(Path(config.ring_dir) / f"s{stage}.0.main.ring"))


def check(ring: RingReader) -> None:
    """Judge the main ring of one stage, once it has retired all that it was given."""
    until(lambda: ring.gauge(Gauge.STEP_FINISHED) == ring.gauge(Gauge.STEP_BEGUN), what="all is retired")
    records, now_ns = ring.since(0), time.monotonic_ns()
    assert records[0].seq == 1, "the ring has lapped nothing"
    tried = [record.size for record in records if record.kind == Kind.ON_DEVICE and not record.step]
    assert tried[0] == 1 and 64 in tried, "boot has tried a decode and the largest batches"
    launches = [record for record in records if record.kind == Kind.STEP]
    steps = {record.step: record for record in launches if record.size}
    works = [record for record in records if record.kind == Kind.ON_DEVICE and record.step]
    assert [work.step for work in works] == sorted(steps) and len(works) >= STEPS
    for work in works:
        step = steps[work.step]
        assert (work.size, work.detail) == (step.size, step.detail)
        assert work.enqueued_ns < work.returned_ns <= work.done_ns <= now_ns
        assert work.enqueued_ns > step.enqueued_ns - GLANCE_NS, "no device begins before its host"
    for earlier, later in pairwise(works):
        overlap = earlier.done_ns - later.enqueued_ns
        assert overlap <= launching_ns(launches, earlier.done_ns) + GLANCE_NS, f"m{earlier.step} and m{later.step}"
    wall_ns = works[-1].done_ns - min(step.enqueued_ns for step in steps.values())
    assert 0 < sum(work.done_ns - work.enqueued_ns for work in works) < wall_ns


def launching_ns(launches: list[Record], at_ns: int) -> int:
    """Return for how long the host may not have looked when it did at `at_ns`: it launched another step."""
    newest = [step for step in launches if step.enqueued_ns < at_ns][-1]
    return min(newest.done_ns, at_ns) - newest.enqueued_ns


def test_a_card_measures_its_own_work_and_not_what_it_waits_for(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    stream, ring = Stream("compute", device), RingWriter(tmp_path / "r", "main", 0, 0)
    timer = DeviceTimer(ring)
    times = []
    for step, cycles in enumerate([0, 40_000_000, 80_000_000, 40_000_000], 1):
        with stream.use():
            torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
        work = timer.work(stream, step, 1, 1)
        with work, stream.use():
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
            work.sampling()
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        assert not work.done(), "nobody has waited"
        work.synchronize()
        work.publish()
        record = RingReader(tmp_path / "r").record(step)
        assert record is not None
        times.append((record.done_ns - record.enqueued_ns, record.returned_ns - record.enqueued_ns))
    nothing, short, long, again = times
    assert nothing[0] < short[0] / 4
    assert long[0] == pytest.approx(2 * short[0], rel=0.3) and again[0] == pytest.approx(short[0], rel=0.3)
    assert all(half == pytest.approx(whole / 2, rel=0.3) for whole, half in times[1:])
