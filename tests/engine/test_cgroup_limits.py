"""Quotas, freezers and memory limits of a process's cgroups, on trees like those of versions 1 and 2."""

import pytest
from diagnosis_world import evidence, healthy, pipeline_held_at, stuck, with_stage
from monitor_helpers import sample, stage
from ppengine.agent.agent import is_calm
from ppengine.agent.quota_watch import QuotaWatch
from ppengine.common.cgroup_limits import Quota, frozen_by, memory_limits, quotas
from ppengine.diagnosis import diagnose
from ppengine.diagnosis.budgets import QUOTA_AFTER_S, QUOTA_ALONE_S
from ppengine.diagnosis.evidence import CoreEvidence
from ppengine.diagnosis.process_history import Sighting
from ppengine.diagnosis.tracker import EvidenceTracker
from ppengine.protocol.stage_samples import PaceSample, QuotaSample

SECOND = 1_000_000_000


@pytest.fixture
def tree(tmp_path):
    """Return `write(folder, file=content ...)`, with `__` for the dot of a file's name; the tree is at `write.root`."""

    def write(folder, **files):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (tmp_path / folder / name.replace("__", ".", 1)).write_text(f"{content}\n")

    write.root = tmp_path
    return write


def test_quota_of_the_second_version_is_that_of_every_group_up_to_the_root(tree):
    tree("a/b", cpu__max="50000 100000", cpu__stat="nr_throttled 4\nthrottled_usec 1700")
    tree("a", cpu__max="max 100000")
    tree(".", cpu__max="200000 100000", cpu__stat="nr_throttled 0\nthrottled_usec 0")
    found = quotas("0::/a/b\n", tree.root)
    assert [(each.cores, each.nr_throttled, each.throttled_us, each.none) for each in found] == [
        (0.5, 4, 1700, "max"), (2.0, 0, 0, "max"),
    ]  # fmt: skip
    assert found[0].file == tree.root / "a" / "b" / "cpu.max"


def test_quota_of_the_first_version(tree):
    tree("cpu,cpuacct/a", cpu__cfs_quota_us=10000, cpu__cfs_period_us=100000,
         cpu__stat="nr_periods 9\nnr_throttled 2\nthrottled_time 3000000")  # fmt: skip
    tree("cpu,cpuacct", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    (found,) = quotas("3:cpu,cpuacct:/a\n0::/\n", tree.root)
    assert found == Quota(tree.root / "cpu,cpuacct/a/cpu.cfs_quota_us", "-1", 0.1, 2, 3000)


@pytest.mark.parametrize("groups", ["", "0::/gone\n", "3:cpu:/gone\n"])
def test_process_without_limits_has_none(tree, groups):
    assert quotas(groups, tree.root) == memory_limits(groups, tree.root) == []
    assert frozen_by(groups, tree.root) is None


def test_frozen_group_of_either_version_is_found_also_above(tree):
    tree("a/b", cgroup__freeze=0, cgroup__events="populated 1\nfrozen 1")
    tree("a", cgroup__freeze=1, cgroup__events="populated 1\nfrozen 1")
    assert frozen_by("0::/a/b\n", tree.root) == tree.root / "a" / "cgroup.freeze"
    assert frozen_by("0::/a\n", tree.root) == tree.root / "a" / "cgroup.freeze"
    tree("freezer/x/y", freezer__state="FROZEN", freezer__self_freezing=0)
    tree("freezer/x", freezer__state="FREEZING", freezer__self_freezing=1)
    assert frozen_by("6:freezer:/x/y\n0::/\n", tree.root) == tree.root / "freezer/x/freezer.state"


def test_thawed_group_is_none_and_both_versions_count(tree):
    tree("unified/a", cgroup__freeze=0, cgroup__events="frozen 0")
    tree("freezer/a", freezer__state="THAWED", freezer__self_freezing=0)
    listing = "6:freezer:/a\n0::/a\n"
    assert frozen_by(listing, tree.root) is None
    tree("unified/a", cgroup__freeze=1, cgroup__events="frozen 1")
    assert frozen_by(listing, tree.root) == tree.root / "unified/a/cgroup.freeze"


def test_memory_limits_leave_out_cache_that_can_be_dropped(tree):
    tree("a", memory__max=1000, memory__current=700, memory__stat="anon 500\ninactive_file 100")
    tree(".", memory__max="max", memory__current=9000)
    (found,) = memory_limits("0::/a\n", tree.root)
    assert (found.limit, found.left) == (1000, 400)
    tree("memory/a", memory__limit_in_bytes=1000, memory__usage_in_bytes=1200)
    tree("memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=1)
    (found,) = memory_limits("4:memory:/a\n0::/\n", tree.root)
    assert (found.limit, found.left) == (1000, 0), "version 1 writes a large number for none"


# --- how much a quota holds back ----------------------------------------------------------------------------


class Held:
    """A process under one quota, or two."""

    def __init__(self, tmp_path) -> None:
        self.watch, self.now_s, self.counts, self.path = QuotaWatch(), 0, {"own": (0, 0), "above": (0, 0)}, tmp_path

    def run(self, seconds, own=0.0, above=0.0):
        for _ in range(seconds):
            self.now_s += 1
            for name, share in (("own", own), ("above", above)):
                number, us = self.counts[name]
                self.counts[name] = number + (share > 0), us + int(share * 1e6)
            found = [Quota(self.path / name, "max", 0.5, *counts) for name, counts in self.counts.items()]
            self.watch.look(self.now_s * SECOND, found)
        return self.watch.sample


@pytest.mark.parametrize("which", ["own", "above"])
def test_time_under_a_quota_is_counted_from_its_begin(tmp_path, which):
    held = Held(tmp_path)
    assert held.run(10) is None
    seen = held.run(3, **{which: 0.8})
    assert seen == QuotaSample(
        file=str(tmp_path / which), none="max", cores=0.5, share=0.8, before=0.0, nr_throttled=3,
        throttled_us=2_400_000, for_ms=3000.0,
    )  # fmt: skip
    assert held.run(1) is None, "a second without it ends the run"


def test_counts_from_before_the_process_came_in_are_not_its_own(tmp_path):
    held = Held(tmp_path)
    held.counts["own"] = 1000, 900_000_000
    assert held.run(1) is None


# --- verdicts -----------------------------------------------------------------------------------------------


def quota(seconds=QUOTA_AFTER_S, **changes):
    fields = {"file": "/sys/fs/cgroup/a/cpu.max", "none": "max", "cores": 0.1, "share": 0.87, "before": 0.0,
              "nr_throttled": 20, "throttled_us": 1_740_000, "for_ms": seconds * 1e3}  # fmt: skip
    return QuotaSample(**fields | changes)


def pace(slow_s, age_s=0.5):
    return PaceSample(step_ms=16.0, baseline_ms=10.0, slow_ms=slow_s * 1e3, throttled=0.87, age_ms=age_s * 1e3)


@pytest.mark.parametrize("k", [0, 1])
def test_throttled_stage_has_the_counts_and_the_command(k):
    stages = with_stage(healthy(2), k, quota=quota(), pace=pace(1.0))
    (verdict,) = diagnose(evidence(stages))
    assert (verdict.stage, verdict.cause) == (k, "straggler")
    assert verdict.summary == f"stage {k} is throttled 87 % of the time: its cgroup's cpu quota holds it back"
    assert "nr_throttled +20, throttled_usec +1740000 in 2.0s" in verdict.evidence[0]
    assert verdict.suggest == "echo max > /sys/fs/cgroup/a/cpu.max"


def test_quota_explains_work_that_seems_blocked():
    stages = with_stage(pipeline_held_at(2, 1), 1, quota=quota(QUOTA_ALONE_S, share=0.99))
    assert [(v.stage, v.cause) for v in diagnose(stuck(stages)) if v.root] == [(1, "straggler")]


@pytest.mark.parametrize(
    "changes",
    [
        {"quota": quota(QUOTA_AFTER_S - 0.1), "pace": pace(1.0)},
        {"quota": quota(9.0), "pace": pace(0.0)},
        {"quota": quota(QUOTA_ALONE_S - 0.1)},
        {"quota": quota(9.0, before=0.8), "pace": pace(2.0)},
        {"quota": quota(9.0), "phase": "load"},
    ],
    ids=["for a moment", "as fast as before", "pace not known", "a container's own", "loading"],
)
def test_quota_that_costs_nothing_new_is_no_verdict(changes):
    assert diagnose(evidence(with_stage(healthy(2), 1, **changes))) == []


@pytest.mark.parametrize(
    ("file", "command"),
    [
        ("/sys/fs/cgroup/a/cgroup.freeze", "echo 0 > /sys/fs/cgroup/a/cgroup.freeze"),
        ("/sys/fs/cgroup/freezer/a/freezer.state", "echo THAWED > /sys/fs/cgroup/freezer/a/freezer.state"),
    ],
)
def test_frozen_stage_is_stopped_by_its_cgroup(file, command):
    stages = with_stage(pipeline_held_at(3, 1), 1, frozen=file, process_state="D", stopped_for_s=0.3)
    (verdict,) = (each for each in diagnose(stuck(stages)) if each.root)
    assert (verdict.stage, verdict.cause, verdict.suggest) == (1, "stopped", command)
    assert verdict.summary.startswith("stage 1 is stopped by its cgroup, which is frozen (/sys/fs/cgroup/")


def test_frozen_core_is_named():
    core = CoreEvidence(pid=7, process_state="T", frozen="/sys/fs/cgroup/a/cgroup.freeze", stopped_for_s=0.3)
    (verdict,) = diagnose(evidence(healthy(2), core=core))
    assert verdict.summary == "the engine core (pid 7) is frozen by its cgroup (/sys/fs/cgroup/a)"
    assert verdict.suggest == "echo 0 > /sys/fs/cgroup/a/cgroup.freeze"


def test_frost_is_a_stop_from_its_first_to_its_newest_sample():
    tracker, file = EvidenceTracker(1, 10.0), "/sys/fs/cgroup/a/cgroup.freeze"

    def seen(at_s, frozen):
        sighting = Sighting(sample(0, frozen=frozen, process_state="S"), int(at_s * SECOND))
        return tracker.build(int(at_s * SECOND), None, {(0, 0): sighting}, None, None).stages[0]

    assert seen(1.0, "").stopped_for_s is None
    assert seen(1.3, file).stopped_for_s == 0.0
    assert seen(1.6, file).stopped_for_s == pytest.approx(0.3)
    assert seen(1.9, "").stopped_for_s is None
    assert stage(0).frozen == ""


def test_frozen_stage_is_looked_at_often():
    assert is_calm(sample(0))
    assert not is_calm(sample(0, frozen="/sys/fs/cgroup/a/cgroup.freeze"))
