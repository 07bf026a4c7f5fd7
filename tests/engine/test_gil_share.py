"""A GIL that is held for a part of the time: the stage's own probe, the agent's figures, the verdict, the stacks."""

import ctypes
import threading
import time
from bisect import bisect
from random import Random

import msgspec
import pytest
from diagnosis_world import PLACES, SPINS, evidence, healthy, with_stage
from monitor_helpers import TRIES
from ppengine.agent.gil_watch import TURN_MS, TURNS, WINDOW_NS, Counts, GilWatch
from ppengine.common.ring import RingReader, Word
from ppengine.diagnosis import diagnose
from ppengine.diagnosis.budgets import GIL_SHARE
from ppengine.diagnosis.evidence import Stack
from ppengine.protocol.stage_samples import GilSample, PaceSample, QuotaSample
from ppengine.stage import gil_probe
from ppengine.stage.gil_probe import GilProbe
from ppengine.stage.recorder import Recorder

SECOND = 1_000_000_000
WORDS = (
    Word.GIL_PROBES, Word.GIL_WAITS, Word.GIL_WAIT_NS, Word.GIL_HOLDS, Word.GIL_HOLD_NS, Word.GIL_SLEEP_NS,
)  # fmt: skip


# --- the probe, on a real GIL -------------------------------------------------------------------------------


def hold_in_c(over):
    libc = ctypes.PyDLL(None)
    while not over.wait(0.02):
        libc.usleep(20_000)


def take_turns(over):
    while not over.is_set():
        pass


def ask(over):
    while not over.is_set():
        time.sleep(0.001)


def take_turns_with_another(over):
    """The other one asks for the GIL all the time, as a main thread does that waits for its peers in each layer."""
    asks = threading.Thread(target=ask, args=(over,))
    asks.start()
    take_turns(over)
    asks.join()


def in_turns(found):
    return found.waits >= TURNS * found.probes and found.wait_ns >= TURN_MS * 1e6 * found.probes


def probed(path, holder, looks=60):
    """Return what a probe counts beside a thread."""
    ring, over = Recorder(path, "control", 0, 0), threading.Event()
    thread, probe = threading.Thread(target=holder or threading.Event.is_set, args=(over,)), GilProbe(ring)
    thread.start()
    for look in range(looks):
        time.sleep(0.007 * (look % 5))
        with probe.asleep(20):
            time.sleep(0.02)
    over.set()
    thread.join()
    probe.close()
    reader = RingReader(path)
    counts = Counts._make(reader.word(word) for word in WORDS)
    reader.close()
    ring.close()
    return counts


@pytest.mark.parametrize(
    ("holder", "judge"),
    [
        (None, lambda found: found.holds <= 6 and not in_turns(found)),
        (hold_in_c, lambda found: found.holds >= 9 and 8e6 <= found.hold_ns / found.holds <= 30e6),
        (take_turns, in_turns),
        (take_turns_with_another, in_turns),
    ],
    ids=["free", "held in C", "in turns", "in turns of three"],
)
def test_probe_sees_who_holds_the_gil(tmp_path, holder, judge):
    found = []
    for number in range(TRIES):
        found.append(probed(tmp_path / f"{number}.ring", holder))
        assert found[-1].probes >= 50
        if judge(found[-1]):
            return
    pytest.fail(f"{found}")


def test_sleeps_are_spread_around_a_twelfth_of_a_second(tmp_path):
    probe = GilProbe(Recorder(tmp_path / "x.ring", "control", 0, 0))
    sleeps = [probe.sleep_ms() for _ in range(200)]
    assert 40 <= min(sleeps) < 45 and 115 < max(sleeps) <= 120 and 75 < sum(sleeps) / 200 < 85


def test_a_sleep_that_is_late_without_a_wait_is_no_hold(tmp_path):
    """A host takes the core of a guest: the thread is late, and has not waited for anything."""
    ring = Recorder(tmp_path / "x.ring", "control", 0, 0)
    probe, reader = GilProbe(ring), RingReader(tmp_path / "x.ring")
    for _ in range(20):
        with probe.asleep(20):
            time.sleep(0.035)
    assert reader.word(Word.GIL_PROBES) == 20
    assert reader.word(Word.GIL_HOLDS) <= 2 and reader.word(Word.GIL_WAITS) <= 8
    reader.close()
    ring.close()


def test_a_main_thread_without_a_core_makes_the_next_sleep_short(tmp_path, monkeypatch):
    """The long sleep counts for nothing then; the short one does, and is followed by a long one."""
    ring, waited = Recorder(tmp_path / "x.ring", "control", 0, 0), iter([0, 0, 0, 5_000_000] + [0] * 12)
    monkeypatch.setattr(gil_probe, "_waited_ns", lambda file: next(waited))
    probe, reader = GilProbe(ring), RingReader(tmp_path / "x.ring")
    for crowded, count in ((True, 0), (False, 1), (False, 2)):
        ms = probe.sleep_ms()
        with probe.asleep(ms):
            time.sleep(ms / 1e3)
        assert reader.word(Word.GIL_PROBES) == count
        assert (ms == 20) == (count == 1), "only behind the crowded one"
        assert probe._crowded == crowded
    reader.close()
    ring.close()


# --- the agent's figures ------------------------------------------------------------------------------------


def run(watch, *rates, seconds=6, start=0, paused=lambda second: 0, sleep_ms=80):
    """Feed counts that grow by `rates` a second, with sleeps of `sleep_ms`; return the last figure."""
    rates = *rates, rates[0] * sleep_ms * 1e6
    found = None
    for second in range(start, start + seconds):
        found = watch.look(second * SECOND, Counts(*(int(rate * second) for rate in rates)), paused(second))
    return found


def test_share_is_estimated_from_the_waits():
    # Held for 50 ms in each 100: half of 10 probes a second meet it and wait for 29 ms if for more than 8.
    found = run(GilWatch(), 10, 5, 25e6, 0.5 * 10 * 42 / 50, 0.5 * 10 * 42 / 50 * 29e6)
    assert found.share == pytest.approx(0.5, abs=0.05)
    assert found.hold_ms == pytest.approx(50.0, abs=4.0)


def test_short_sleeps_find_less_for_which_the_share_makes_up():
    """Simulated: a probe that sleeps, and waits for the end of the hold in which a sleep ends."""
    random, now, ends = Random(7), 0.0, [0.0]
    while ends[-1] < 600e3:
        ends += [ends[-1] + (free := random.uniform(40, 60)), ends[-1] + free + random.uniform(40, 60)]
    probes, holds, waited = 0, 0, 0.0
    while now < 590e3:
        probes, now = probes + 1, now + 20
        at = bisect(ends, now)
        if at % 2 == 0:  # Between the begin of a hold and its end.
            wait, now = ends[at] - now, ends[at]
            holds, waited = holds + (wait > 8), waited + (wait if wait > 8 else 0)
    rates = (count / 590 for count in (probes, holds, holds * 5e6, holds, waited * 1e6))
    found = run(GilWatch(), *rates, seconds=60, sleep_ms=20)
    assert holds / probes < 0.36 and found.share == pytest.approx(0.5, abs=0.02)


def test_one_or_two_waits_are_no_holds():
    assert run(GilWatch(), 10, 0.6, 3e6, 0.6, 0.6 * 9e6).share == 0.0
    assert run(GilWatch(), 10, 1.1, 5e6, 1.1, 1.1 * 9e6).share > 0.25


def test_turns_are_a_share_of_all():
    found = run(GilWatch(), 10, 9.5, 45e6, 0, 0)
    assert (found.share, found.hold_ms) == (pytest.approx(0.95, abs=0.03), None)
    assert run(GilWatch(), 10, 8.5, 25e6, 0, 0).share > 0.8, "a main thread that asked before shortens the wait"
    assert run(GilWatch(), 10, 5, 25e6, 0, 0).share == 0.0, "Python code of its own runs for a turn now and then"
    assert run(GilWatch(), 10, 9.5, 4e6, 0, 0).share == 0.0, "a main thread that lets go soon takes no turns"


def test_too_few_probes_and_pauses_prove_nothing():
    assert run(GilWatch(), 10, 5, 25e6, 5, 5 * 29e6, seconds=WINDOW_NS // SECOND) is None
    assert run(GilWatch(), 2, 2, 10e6, 2, 2 * 29e6) is None
    assert run(GilWatch(), 10, 5, 25e6, 5, 5 * 29e6, seconds=20, paused=lambda second: second // 3) is None


def test_new_process_starts_from_nothing():
    watch = GilWatch()
    assert run(watch, 10, 5, 25e6, 5, 5 * 29e6).share > 0.4
    assert watch.look(7 * SECOND, Counts(3, 0, 0, 0, 0, 0)) is None


# --- the verdict --------------------------------------------------------------------------------------------


def gil(share=0.48, hold_ms=50.2):
    return GilSample(share=share, hold_ms=hold_ms, over_s=4.0)


@pytest.mark.parametrize(("count", "k"), PLACES)
def test_held_share_is_named_with_its_holder(count, k):
    stack = Stack(pid=1000 + k, main=("forward a.py:1",), gil_owner="parser at scan p.py:7 < run p.py:9")
    late = PaceSample(step_ms=9.0, baseline_ms=5.0, slow_ms=9000.0)
    (verdict,) = diagnose(evidence(with_stage(healthy(count), k, gil=gil(), stack=stack, pace=late)))
    assert (verdict.stage, verdict.cause, verdict.root) == (k, "gil_held", True)
    assert verdict.summary == f"stage {k}: the GIL is held by parser 48 % of the time, 50 ms at a time"
    assert "GIL owner: parser at scan p.py:7 < run p.py:9" in verdict.evidence
    assert verdict.suggest.startswith(f"ppconsole restart-stage {k}")


def test_turns_are_named_without_a_length():
    (verdict,) = diagnose(evidence(with_stage(healthy(2), 0, gil=gil(0.97, None))))
    assert verdict.summary == "stage 0: the GIL is held 97 % of the time, in turns with its other threads"


def test_turns_of_a_main_thread_that_computes_alone_are_no_verdict():
    assert diagnose(evidence(with_stage(healthy(2), 0, gil=gil(0.97, None), cpu=SPINS))) == []
    shared = msgspec.structs.replace(SPINS, main_user=0.5)
    (verdict,) = diagnose(evidence(with_stage(healthy(2), 0, gil=gil(0.97, None), cpu=shared)))
    assert verdict.cause == "gil_held"


@pytest.mark.parametrize(
    "changes",
    [{"gil": gil(GIL_SHARE - 0.01)}, {"gil": gil(), "phase": "load"}, {"gil": gil(), "sample_age_s": 3.0}],
    ids=["little", "loading", "old"],
)
def test_other_shares_are_no_verdict(changes):
    assert not [each for each in diagnose(evidence(with_stage(healthy(2), 1, **changes))) if each.cause == "gil_held"]


def test_quota_explains_a_share():
    quota = QuotaSample(file="/x/cpu.max", none="max", cores=0.1, share=0.9, before=0.0, nr_throttled=9,
                        throttled_us=9, for_ms=1000.0)  # fmt: skip
    assert diagnose(evidence(with_stage(healthy(2), 1, gil=gil(), quota=quota))) == []
