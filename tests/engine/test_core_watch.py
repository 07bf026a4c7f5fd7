"""A main thread that waits for a core while others idle, and the counts of idle time behind it."""

import os
import subprocess
import sys

import pytest
from ppengine.agent import host_load
from ppengine.agent.core_watch import CoreWatch, Waits
from ppengine.common import procfs

SECOND = 1_000_000_000


class Stage:
    """A main thread whose waits grow."""

    def __init__(self):
        self.watch, self.now_ns, self.waits = CoreWatch(), 5 * SECOND, Waits(0, 0, 0)
        self.watch.look(self.now_ns, self.waits, os.getpid())

    def run(self, seconds, main=0.0, throttled=0.0, full=0.0):
        """Run on with these seconds of each in a second; return the state."""
        for _ in range(seconds):
            self.now_ns += SECOND
            grown = int(main * 1e9), int(throttled * 1e6), int(full * 1e9)
            self.waits = Waits(*(before + more for before, more in zip(self.waits, grown, strict=True)))
            found = self.watch.look(self.now_ns, self.waits, os.getpid())
        return found


def test_a_stage_that_waits_for_a_core_while_others_idle_is_starved():
    """Two processors: a busy process has one of them, and with it a stage that may not use the other one."""
    found = Stage().run(5, main=0.9, full=0.55)
    assert found.for_ms == 5000 and found.share == 0.35 and found.scheduling == procfs.scheduling(os.getpid())


@pytest.mark.parametrize("waits", [
    {"main": 0.9, "full": 0.95},
    {"main": 0.6, "full": 0.45},
    {"main": 0.9, "throttled": 0.85},
    {"main": 0.15},
])  # fmt: skip
def test_a_full_host_and_a_quota_explain_a_wait(waits):
    assert Stage().run(8, **waits) is None


def test_one_second_of_its_share_does_not_end_it_and_two_do():
    stage = Stage()
    stage.run(3, main=0.8)
    found = stage.run(1)
    assert (found.for_ms, found.share) == (4000, 0.8), "the share is of a second that counts"
    assert stage.run(1, main=0.8).for_ms == 5000
    assert stage.run(2) is None
    assert stage.run(1, main=0.8).for_ms == 1000


def test_idle_time_is_that_of_the_usable_processors(monkeypatch):
    rows = b"cpu  1 2 3 400 50 6 7 8\ncpu0 1 2 3 100 20 0 0 0 0 0\ncpu1 1 2 3 300 30 0 0 0 0 0\nintr 5\n"
    monkeypatch.setattr(procfs, "_read", lambda path, most: rows)
    tick = os.sysconf("SC_CLK_TCK")
    assert procfs.idle_s({1}) == 330 / tick and procfs.idle_s({0, 1}) == 450 / tick
    assert procfs.idle_s({0, 2}) is None, "one that is not listed is not known"


def test_processors_are_full_for_the_time_in_which_none_can_have_idled(monkeypatch):
    """Two of four processors are usable; they idle for 0.5 s of 1 s in all, so that each can be busy for 0.75 s."""
    times, idle = iter([10.0, 10.1, 11.0]), iter([5.0, 5.5])
    monkeypatch.setattr(host_load.os, "sched_getaffinity", lambda pid: {1, 3})
    monkeypatch.setattr(host_load.time, "monotonic", lambda: next(times))
    monkeypatch.setattr(procfs, "idle_s", lambda usable: next(idle) if usable == {1, 3} else None)
    watched = host_load.HostLoad()
    watched.look_idle()
    assert watched.full_ns == 0, "it is too early to read again"
    watched.look_idle()
    assert watched.full_ns == pytest.approx(0.75e9)


def test_scheduling_is_that_of_the_main_thread():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        core = min(os.sched_getaffinity(0))
        os.sched_setaffinity(child.pid, {core})
        os.setpriority(os.PRIO_PROCESS, child.pid, 19)
        assert procfs.scheduling(child.pid) == f"may use processors {core}, nice value 19"
        child.kill()
    assert procfs.scheduling(child.pid) == ""
