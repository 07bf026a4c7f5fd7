"""Memory that grows without end, and all that grows for a while and is no leak."""

import math
import os
from pathlib import Path

import pytest
from diagnosis_world import PLACES, evidence, healthy, pipeline_held_at, stuck, with_stage
from ppengine.agent import memory_watch
from ppengine.agent.growth_watch import LEAST_BYTES, SHARED_WINDOWS_S, GrowthWatch
from ppengine.agent.memory_watch import MemoryWatch
from ppengine.common import procfs
from ppengine.common.cgroup_limits import MemoryLimit
from ppengine.common.ring import Gauge, Phase, RingReader, RingWriter
from ppengine.diagnosis import diagnose
from ppengine.protocol.stage_samples import GrowthSample

MIB, GIB = 1 << 20, 1 << 30
BASE = 300 * MIB


class Process:
    """A process whose memory follows a function of the seconds since it serves."""

    def __init__(self, left=20 * GIB, activations=0, limits=()) -> None:
        self.watch, self.now_s, self.left, self.limits = GrowthWatch(), 0.0, left, limits
        self.activations = activations

    def run(self, seconds, size, serving=True):
        """Return the first growth that is seen, with its second."""
        for second in range(seconds):
            self.now_s += 1.0
            self.watch.look(self.now_s, int(BASE + size(second)), serving=serving, activations=self.activations)
            found = self.watch.sample(self.limits, self.left)
            if found is not None:
                return second, found
        return None


def leak(mib_s):
    return lambda second: second * mib_s * MIB


@pytest.mark.parametrize(
    ("mib_s", "left", "within_s"), [(400, 20 * GIB, 7), (40, 20 * GIB, 11), (10, 2 * GIB, 7), (1, 10 * GIB, 181)]
)
def test_even_growth_is_a_leak_the_sooner_the_nearer_its_end(mib_s, left, within_s):
    process = Process(left)
    assert process.run(30, lambda second: 0) is None
    second, found = process.run(300, leak(mib_s))
    assert second <= within_s
    assert found.rate == pytest.approx(mib_s * MIB, rel=0.2)
    assert (found.left, found.file) == (left, "")
    again, found = process.run(10, lambda later: (second + 1 + later) * mib_s * MIB)
    assert again == 0 and found.for_ms >= 5000.0


@pytest.mark.parametrize(("mib_s", "within_s"), [(35, 7), (6, 10), (1, 60)])
def test_shared_memory_that_grows_evenly_is_a_leak_however_much_room_there_is(mib_s, within_s):
    process = Process(left=900 * GIB)
    process.watch = GrowthWatch(SHARED_WINDOWS_S)
    assert process.run(30, lambda second: 8 * MIB * (second > 9)) is None, "rings, as they are first written"
    second, found = process.run(100, leak(mib_s))
    assert second <= within_s and found.left == 900 * GIB
    assert Process(left=900 * GIB).run(40, leak(35)) is None, "its own memory may settle"


def test_nearest_limit_is_named():
    cgroup = MemoryLimit(Path("/sys/fs/cgroup/a/memory.max"), 4 * GIB, GIB)
    _, found = Process(limits=[cgroup]).run(20, leak(40))
    assert (found.left, found.file) == (GIB, "/sys/fs/cgroup/a/memory.max")


@pytest.mark.parametrize("tau_s", [1, 3, 10, 30])
@pytest.mark.parametrize("size", [100 * MIB, 900 * MIB])
def test_cache_that_settles_is_no_leak(tau_s, size):
    assert Process().run(200, lambda second: size * (1 - math.exp(-second / tau_s))) is None


def test_growth_that_meets_no_limit_for_long_is_none():
    assert Process(left=200 * GIB).run(200, leak(1)) is None


def test_steps_up_and_down_are_no_leak():
    assert Process().run(120, lambda second: (second % 7) * 60 * MIB) is None
    assert Process().run(60, lambda second: 500 * MIB * (second > 20)) is None, "one large batch"


def test_loading_is_no_leak_and_its_height_is_not_grown_above():
    process = Process(left=2 * GIB)
    assert process.run(30, leak(100), serving=False) is None
    assert process.run(20, leak(100)) is None, "no more than while it loaded"


def test_activations_of_the_largest_batch_are_allowed():
    process = Process(activations=800 * MIB)
    assert process.run(30, lambda second: 0) is None
    assert process.run(18, leak(40)) is None
    assert process.run(10, lambda second: (second + 18) * 40 * MIB) is not None


def test_another_generation_starts_from_the_present():
    process = Process()
    assert process.run(6, leak(60)) is None
    assert process.run(2, lambda second: 6 * 60 * MIB, serving=False) is None
    assert process.run(30, lambda second: 6 * 60 * MIB) is None


# --- a real process -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_memory_of_this_process_beside_its_pools(tmp_path, shared):
    import mmap

    import numpy as np

    path, flags = tmp_path / "s0.0.main.ring", mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    cache = mmap.mmap(-1, 32 * MIB, flags=flags)
    swap = mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS if shared else flags)
    cache.madvise(mmap.MADV_NOHUGEPAGE)  # As a stage's: the two are not merged.
    pools = [np.frombuffer(pool, np.uint8) for pool in (cache, swap)]
    writer = RingWriter(path, "main", 0, 0)
    writer.phase(Phase.SERVING)
    writer.gauge(Gauge.KV_BASE, pools[0].ctypes.data)
    writer.gauge(Gauge.KV_LENGTH, 32 * MIB)
    writer.gauge(Gauge.SWAP_BASE, pools[1].ctypes.data)
    writer.gauge(Gauge.SWAP_LENGTH, 32 * MIB)
    writer.gauge(Gauge.SWAP_SHARED, shared)
    watch, reader = MemoryWatch(), RingReader(path)
    sizes, watch._growth.look = [], lambda now, size, **more: sizes.append(size)
    parts, watch._shared.look = [], lambda now, size, **more: parts.append(size)
    for touched in (0, 8 * MIB, 48 * MIB):
        pools[0][:touched] = pools[1][: touched // 2] = 1
        writer.gauge(Gauge.KV_MAPPED_BYTES, touched)
        watch.look(os.getpid(), reader, "", serving=True)
        assert watch.resident == min(touched, 32 * MIB)
    assert max(sizes) - min(sizes) < 4 * MIB, "cache and swap space are no growth"
    assert max(parts) - min(parts) < 4 * MIB, "nor is a swap space that a store maps"
    assert procfs.unbacked(os.getpid()).total > 48 * MIB
    reader.close()
    writer.close()


def test_a_stage_that_leaks_shared_memory_on_a_large_host(tmp_path, monkeypatch):
    import mmap

    before = procfs.unbacked(os.getpid())
    with mmap.mmap(-1, 16 * MIB) as shared:
        shared.write(bytes(16 * MIB))
        assert procfs.unbacked(os.getpid()).shared - before.shared >= 16 * MIB
    path = tmp_path / "s0.0.main.ring"
    RingWriter(path, "main", 0, 0).close()
    watch, reader, now = MemoryWatch(), RingReader(path), [0.0]
    monkeypatch.setattr(memory_watch.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(memory_watch, "host_available", lambda: 900 * GIB)
    for now[0] in range(9):
        leaked = now[0] * 35 * MIB
        monkeypatch.setattr(memory_watch.procfs, "unbacked", lambda pid, b=leaked: procfs.Unbacked(BASE + b, b))
        watch.look(7, reader, "", serving=True)
    assert watch.growth.rate == pytest.approx(35 * MIB) and watch.growth.left == 900 * GIB
    reader.close()


# --- the verdict --------------------------------------------------------------------------------------------


def growth(**changes):
    fields = {"rate": 48.2 * MIB, "grown": 482 * MIB, "over_s": 10.0, "for_ms": 10_000.0, "left": 9 * GIB, "file": ""}
    return GrowthSample(**fields | changes)


@pytest.mark.parametrize(("count", "k"), PLACES)
def test_leak_has_rate_and_end(count, k):
    (verdict,) = diagnose(evidence(with_stage(healthy(count), k, growth=growth())))
    assert (verdict.stage, verdict.cause, verdict.root) == (k, "leak", True)
    assert verdict.summary == f"stage {k} leaks memory: +48.2 MiB/s, the host's memory is used up in 3m11"
    assert verdict.suggest.startswith(f"ppconsole restart-stage {k} ")


def test_limit_of_a_cgroup_is_named_with_its_file():
    stages = with_stage(healthy(2), 1, growth=growth(file="/sys/fs/cgroup/a/memory.max", left=GIB))
    (verdict,) = diagnose(evidence(stages))
    assert verdict.summary == "stage 1 leaks memory: +48.2 MiB/s, its cgroup's limit is used up in 21s"
    assert any("/sys/fs/cgroup/a/memory.max" in line for line in verdict.evidence)


def test_leak_explains_a_held_gil_and_not_a_death():
    late = {"tick_age_s": 3.0, "tick_stale_for_s": 2.0, "progress_age_s": 3.0}
    stages = with_stage(pipeline_held_at(2, 1), 1, growth=growth(), **late)
    assert [(v.stage, v.cause) for v in diagnose(stuck(stages)) if v.root] == [(1, "leak")]
    dead = with_stage(healthy(2), 1, growth=growth(), exit_code=-9, dead_for_s=0.3, oom_kills=1)
    assert [v.cause for v in diagnose(evidence(dead)) if v.root] == ["killed_oom"]
    assert LEAST_BYTES > 32 * MIB
