"""A stage beside its own past: what is slower, and everything that only looks so."""

import hashlib
import os
import subprocess
import sys
import threading
import time

import pytest
from monitor_helpers import record
from ppengine.agent import host_load
from ppengine.agent.pace import Pace, Totals
from ppengine.common import procfs
from ppengine.common.edge_messages import SHOWN_DONE, MessageTrack
from ppengine.common.ring import Kind

SECOND = 1_000_000_000


class Clock:
    """A stage that makes `steps` steps a second."""

    def __init__(self):
        self.pace, self.now_ns, self.waited_ns, self.throttled_us = Pace(), 5 * SECOND, 0, 0
        self.beside_ns = self.ran_ns = 0

    def totals(self):
        return Totals(self.waited_ns, self.throttled_us, self.beside_ns, self.ran_ns)

    def run(self, seconds, step_ms, tokens=8, context=800, waited=0.0, throttled=0.0, beside=0.0, ran=0.0):
        """Run on; return the newest judgement. `waited`, `throttled`, `beside`, `ran`: seconds a second."""
        for _ in range(seconds):
            for _ in range(20):
                self.pace.add(tokens, context, step_ms)
            self.now_ns += SECOND
            self.waited_ns += int(waited * 1e9)
            self.throttled_us += int(throttled * 1e6)
            self.beside_ns += int(beside * 1e9)
            self.ran_ns += int(ran * 1e9)
            self.pace.close(self.now_ns, self.totals())
        return self.pace.sample(self.now_ns)

    def rest(self, seconds):
        """Let time pass without a step."""
        self.now_ns += seconds * SECOND
        self.pace.close(self.now_ns, self.totals())


def test_a_slower_stage_is_told_with_its_baseline_and_since_when():
    clock = Clock()
    assert clock.run(20, 10.0).slow_ms == 0
    slow = clock.run(11, 16.0)
    assert (slow.step_ms, slow.baseline_ms) == (16.0, 10.0) and slow.slow_ms == 11_000
    assert clock.run(60, 16.0).slow_ms == 71_000, "what is slow does not become the baseline"
    assert clock.run(1, 10.4).slow_ms == 0


def test_less_than_a_third_slower_is_not_told():
    clock = Clock()
    clock.run(20, 10.0)
    assert clock.run(30, 12.5).slow_ms == 0


def test_one_slow_second_breaks_off():
    clock = Clock()
    clock.run(20, 10.0)
    for _ in range(6):
        assert clock.run(3, 20.0).slow_ms <= 3000
        clock.run(1, 10.0)


@pytest.mark.parametrize(("tokens", "context"), [(64, 800), (8, 9000), (2, 100), (2048, 2048)])
def test_other_work_is_not_compared(tokens, context):
    clock = Clock()
    clock.run(20, 10.0)
    assert clock.run(4, 300.0, tokens, context) is None or clock.pace.sample(clock.now_ns).slow_ms == 0


def test_a_context_that_grows_is_not_a_straggler():
    clock = Clock()
    for context in range(100, 20_000, 60):
        found = clock.run(1, 1.0 + context / 2000, context=context)
        assert found is None or found.slow_ms == 0


def test_a_straggler_stays_one_while_its_contexts_grow():
    clock = Clock()
    clock.run(20, 10.0, context=4000)
    for context in range(4000, 8000, 250):
        slow = clock.run(1, 40.0, context=context)
    assert slow.slow_ms == 16_000 and slow.step_ms == 40.0


def test_waiting_for_a_core_is_the_machines_fault_and_a_quota_is_the_stages():
    crowded, capped = Clock(), Clock()
    crowded.run(20, 10.0)
    capped.run(20, 10.0)
    assert crowded.run(12, 18.0, waited=0.16).slow_ms == 0
    slow = capped.run(12, 18.0, waited=0.16, throttled=0.16)
    assert slow.slow_ms == 12_000 and slow.throttled == pytest.approx(0.16)


def test_a_host_that_was_crowded_before_proves_nothing_when_it_is_more_so():
    """Learned while it waited for a core half of the time, so that its waits alone explain little of the rest."""
    crowded, capped = Clock(), Clock()
    for clock in (crowded, capped):
        clock.run(20, 10.0, waited=0.12)
    assert crowded.run(12, 26.0, waited=0.27).slow_ms == 0
    assert capped.run(12, 26.0, waited=0.27, throttled=0.16).slow_ms == 12_000, "but a quota is the stage's"
    assert crowded.run(12, 26.0, waited=0.12).slow_ms == 12_000, "and with a core for itself it is slow"


def test_no_host_explains_three_times_the_usual_time_on_a_core():
    slow, crowded = Clock(), Clock()
    for clock in (slow, crowded):
        clock.run(20, 10.0, waited=0.7, beside=1.0, ran=0.1)
    assert slow.run(12, 48.0, waited=1.0, beside=1.0, ran=0.7).slow_ms == 12_000, "200 ms before"
    assert crowded.run(12, 48.0, waited=1.0, beside=1.0, ran=0.4).slow_ms == 0


def test_a_main_thread_that_spins_while_it_waits_is_no_slow_one():
    clock = Clock()
    clock.run(20, 10.0, waited=0.7, ran=1.0)
    assert clock.run(12, 18.0, waited=1.0, ran=1.0).slow_ms == 0


def test_a_step_of_seconds_has_waited_in_all_of_them():
    clock = Clock()
    clock.run(20, 10.0, waited=0.1)
    for _ in range(12):  # A step of 10 ms of work takes four seconds: others have the cores.
        for last in (False, False, False, True):
            if last:
                clock.pace.add(8, 800, 3800.0)
            clock.now_ns += SECOND
            clock.waited_ns += int(0.94e9)
            clock.pace.close(clock.now_ns, clock.totals())
        assert clock.pace.sample(clock.now_ns).slow_ms == 0


def test_two_seconds_of_mixed_work_are_enough_to_know_a_stage_by():
    """A few long prompts among short steps: the mean of a second tells nothing, its steps do."""
    pace, now_ns = Pace(), 5 * SECOND
    for second in range(12):
        slower = 3.0 if second >= 3 else 1.0
        for step in range(30):
            tokens, ms = (200, 40.0) if step < second % 3 else (2, 2.0)
            pace.add(tokens, 40 * tokens, ms * slower)
        now_ns += SECOND
        pace.close(now_ns, Totals(0, 0))
    found = pace.sample(now_ns)
    assert found.slow_ms == 9_000 and found.step_ms == pytest.approx(3 * found.baseline_ms)


def test_steps_of_unknown_work_are_left_out_of_the_comparison():
    clock = Clock()
    clock.run(5, 10.0)
    for _ in range(5):
        clock.pace.add(2048, 2048, 900.0)
        found = clock.run(1, 10.0)
        assert (found.slow_ms, found.step_ms) == (0.0, 10.0)


def test_a_few_long_steps_make_a_second_slow():
    """A quota lets most steps through at full speed: the median would see nothing."""
    pace, now_ns = Pace(), 5 * SECOND
    for second in range(12):
        for step in range(20):
            pace.add(2, 80, 90.0 if second >= 5 and step % 4 == 0 else 2.0)
        now_ns += SECOND
        pace.close(now_ns, Totals(0, 0))
    assert pace.sample(now_ns).slow_ms == 7_000


def test_a_pause_and_work_without_like_forget_nothing_at_once():
    clock = Clock()
    clock.run(20, 10.0)
    clock.run(12, 16.0)
    clock.rest(300)
    assert clock.run(1, 16.0).slow_ms > 12_000
    clock.run(12, 50.0, tokens=500)
    assert clock.pace.sample(clock.now_ns) is None or clock.pace.sample(clock.now_ns).slow_ms == 0


def test_two_hangs_with_a_pause_between_them_are_no_straggler():
    clock = Clock()
    clock.run(20, 10.0)
    clock.run(1, 500.0)
    clock.rest(8)
    assert clock.run(1, 500.0).slow_ms == 2000, "one of them"


def test_steps_of_more_than_a_second_are_told_in_time():
    pace, now_ns = Pace(), 5 * SECOND
    for tick in range(1, 121):
        slow = tick > 60
        if tick % (10 if slow else 4) == 0:
            pace.add(512, 512, 2500.0 if slow else 1000.0)
        now_ns += SECOND // 4
        pace.close(now_ns, Totals(0, 0))
        if slow and pace.sample(now_ns).slow_ms >= 6000:
            break
    assert 24 <= tick - 60 <= 40, "by the tenth second"


def test_a_hang_and_a_rough_second_are_not_the_time_between_them():
    """Slow is what was judged to be: the pause between two moments adds nothing."""
    clock = Clock()
    clock.run(20, 10.0)
    clock.run(1, 500.0)
    clock.rest(2)
    assert clock.run(1, 27.0).slow_ms == 3000, "the hang counts for two seconds"


def test_waits_are_compared_with_those_of_the_seconds_in_which_the_work_was_learned():
    """Work known from a quiet host comes back on a busy one, after other work has seen that host for long."""
    clock = Clock()
    clock.run(20, 10.0, tokens=8, waited=0.0)
    clock.run(20, 10.0, tokens=64, waited=0.4)
    found = clock.run(8, 15.0, tokens=8, waited=0.4)
    assert found is None or found.slow_ms == 0


def test_who_shares_a_core_or_its_caches_explains_slowness_without_a_wait():
    """Others begin to work on a host that was quiet, as on two threads of one core: no wait, and half the speed."""
    crowded = Clock()
    crowded.run(20, 10.0, beside=0.5)
    assert crowded.run(12, 17.0, beside=0.95).slow_ms == 0
    assert crowded.run(4, 10.0, beside=0.5).slow_ms == 0


def test_what_is_much_slower_than_sharing_makes_it_is_told_beside_anybody():
    clock = Clock()
    clock.run(20, 10.0)
    assert clock.run(12, 19.0, beside=1.0).slow_ms == 0
    assert clock.run(12, 50.0, beside=1.0).slow_ms == 12_000


def test_neighbours_that_were_there_before_explain_nothing():
    clock = Clock()
    clock.run(20, 10.0, beside=0.9)
    assert clock.run(12, 17.0, beside=0.9).slow_ms == 12_000


def test_fits_of_slowness_are_one_slowness():
    clock = Clock()
    clock.run(20, 10.0)
    for second in range(1, 12, 2):
        assert clock.run(1, 50.0).slow_ms == 1000 * second
        assert clock.run(1, 10.0).slow_ms == 1000 * second, "it may be a pause"
    assert clock.run(1, 10.0).slow_ms == 0
    assert clock.run(1, 50.0).slow_ms == 1000


def test_seconds_of_less_than_three_times_the_baseline_are_no_fits():
    clock = Clock()
    clock.run(20, 10.0)
    for _ in range(6):
        assert clock.run(1, 18.0).slow_ms == 1000
        assert clock.run(1, 10.0).slow_ms == 0
    clock.run(1, 60.0)
    clock.run(1, 10.0)
    assert clock.run(1, 28.0).slow_ms == 1000, "nor does one that stands out begin them"


def test_a_quota_is_told_beside_any_neighbour():
    clock = Clock()
    clock.run(20, 10.0)
    assert clock.run(12, 17.0, throttled=0.16, beside=1.0).slow_ms == 12_000


def counted(monkeypatch, cores, *busy_s):
    """Return neighbours on a machine of so many cores, whose busy seconds are `busy_s` in turn."""
    seen = iter(busy_s)
    monkeypatch.setattr(procfs, "busy_s", lambda: next(seen))
    monkeypatch.setattr(host_load.os, "cpu_count", lambda: cores)
    return host_load.HostLoad()


def test_neighbours_are_all_but_the_stages(monkeypatch):
    """Four processors: two stages have one and a half, and others one, of which a new stage is no neighbour later."""
    watched = counted(monkeypatch, 4, 10.0, 10.0, 12.5, 15.0, 15.5)
    assert watched.beside_ns == 0
    watched.look({7: 100.0, 8: 50.0})
    watched.look({7: 101.0, 8: 50.5})
    assert watched.beside_ns == pytest.approx(1e9 / 3)
    watched.look({7: 102.0, 9: 30.0})
    assert watched.beside_ns == pytest.approx(2.5e9 / 3), "what a new process had before is not known"
    watched.look({9: 30.5})
    assert watched.beside_ns == pytest.approx(2.5e9 / 3)


def test_a_machine_that_does_not_say_or_has_one_processor_has_no_neighbours(monkeypatch):
    for watched in (counted(monkeypatch, 4, None), counted(monkeypatch, 1)):
        watched.look({7: 1.0})
        assert watched.beside_ns is None
    once = counted(monkeypatch, 2, 1.0, None, 2.0)
    once.look({})
    assert once.beside_ns == 0
    once.look({})
    assert once.beside_ns == 1e9


@pytest.mark.parametrize("text", [b"", b"cpu\n", b"cpu  1 2\n", b"intr 5\n", None])
def test_what_cannot_be_read_of_the_processors_is_not_known(monkeypatch, text):
    monkeypatch.setattr(procfs, "_read", lambda path: text)
    assert procfs.busy_s() is None


def test_busy_is_what_is_neither_idle_nor_waits_for_a_disk(monkeypatch):
    monkeypatch.setattr(procfs, "_read", lambda path: b"cpu  100 20 30 5000 700 1 2 40 9 9\ncpu0 1 2 3\n")
    assert procfs.busy_s() == (100 + 20 + 30 + 1 + 2 + 40) / os.sysconf("SC_CLK_TCK")


@pytest.mark.skipif(not procfs.busy_s() or (os.cpu_count() or 1) < 2, reason="needs two processors that are counted")
def test_a_process_beside_this_one_is_a_neighbour_and_a_stage_is_not():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            begun = procfs.read_stat(busy.pid).cpu_s
            without, with_it = host_load.HostLoad(), host_load.HostLoad()
            without.look({busy.pid: begun})
            time.sleep(1.5)
            now = procfs.read_stat(busy.pid).cpu_s
            without.look({busy.pid: now})
            with_it.look({})
        finally:
            busy.kill()
    others = os.cpu_count() - 1
    assert now - begun > 0.1
    assert with_it.beside_ns * others / 1e9 >= now - begun - 0.1
    assert (with_it.beside_ns - without.beside_ns) * others / 1e9 == pytest.approx(now - begun, abs=0.5)


# --- messages -----------------------------------------------------------------------------------------------


def message(number, begin_ms, end_ms=0.0, kind=Kind.SEND, peer=1, **more):
    return record(number, kind, begin_ms, end_ms, peer=peer, step=number + 100, size=64, detail=number, code=5, **more)


def test_open_messages_and_the_newest_done_are_shown_by_edge():
    track = MessageTrack()
    track.feed([message(n, n, n + 0.5) for n in range(1, 41)])
    track.feed([message(41, 41, returned_ns=42), message(42, 42), message(1, 5, kind=Kind.RECEIVE, peer=0)])
    track.feed([record(9, Kind.FORWARD, 1.0), record(10, Kind.SEND, 1.0)])
    sent, received = track.samples(50_000_000)
    assert (sent.kind, sent.peer, received.kind, received.peer) == ("send", 1, "receive", 0)
    assert [m.number for m in sent.messages] == [*range(41 - SHOWN_DONE, 43)]
    assert [m.state for m in sent.messages[-3:]] == [2, 1, 0] and sent.messages[-1].age_ms == 8.0
    assert (sent.messages[0].step, sent.messages[0].size, sent.messages[0].code) == (129, 64, 5)


def test_a_new_generation_of_an_edge_counts_anew():
    track = MessageTrack()
    track.feed([message(7, 1.0, 2.0)])
    track.feed([message(1, 3.0)._replace(generation=1)])
    track.feed([message(8, 2.0, 2.5)])
    (edge,) = track.samples(0)
    assert edge.generation == 1 and [m.number for m in edge.messages] == [1]


def test_old_messages_are_forgotten_and_open_ones_shown():
    track = MessageTrack()
    for first in range(1, 2001, 50):
        track.feed([message(n, n, 0.0 if n == 1990 else n + 0.5) for n in range(first, first + 50)])
    (edge,) = track.samples(0)
    assert [m.number for m in edge.messages] == [*range(1990 - 2, 2001)]
    _, known = track.edge(Kind.SEND, 1)
    assert 256 <= len(known) < 512 and max(known) == 2000
    track.feed([message(1990, 1990, 2001)])
    assert all(m.state == 2 for m in track.samples(0)[0].messages)


def test_waits_of_all_threads_are_counted():
    """One more thread that wants a core all the time, beside a process that keeps the only one busy."""
    core = {min(os.sched_getaffinity(0))}
    before, done = procfs.threads_waited_ns(os.getpid()), threading.Event()

    def spin():
        os.sched_setaffinity(0, core)
        while not done.is_set():
            hashlib.sha256(bytes(1 << 20)).digest()  # without the GIL

    threads = [threading.Thread(target=spin) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(0.5)
        grown, main = procfs.threads_waited_ns(os.getpid()) - before, procfs.waited_ns(os.getpid())
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert grown > 0.2e9, "three wanted one core for half a second"
    assert main is not None
    assert procfs.threads_waited_ns(2**22 + 1) is None
