"""The last hour on disk: readable while it is written, bounded in minutes and bytes, and never a reason to stop."""

import os
import resource
import secrets
import signal
import time

import pytest
from ppengine.gateway import history as module
from ppengine.gateway.history import SEGMENT_S, History
from ppengine.protocol.recording import Recording, RecordingError
from ppengine.protocol.snapshot import EngineInfo, Event, Snapshot, Verdict


class Clock:
    """Time that a test sets."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0
        self.set_by = 0.0

    def time(self) -> float:
        return self.now + self.set_by

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def snapshot(step, text=""):
    engine = EngineInfo(
        id="e", name="n", epoch="x", state="serving", model="m", pipeline_parallel_size=1, tensor_parallel_size=1,
        executor="local", memory_utilization=0.9, memory_revision=0, uptime_s=1.0, step=step, message=text,
    )  # fmt: skip
    return Snapshot(engine=engine)


def frames(path):
    found = []
    try:
        for frame in Recording(path).frames():
            found.append(frame.update)
    except RecordingError:
        pass
    return found


def segments(folder):
    return sorted(folder.glob("*.rec"))


def test_a_reader_sees_every_update_while_the_segment_is_open(tmp_path, clock):
    history = History(tmp_path / "history", "e", "n", 60, 2**20)
    history.write(Event(seq=1, wall=clock.now, kind="a.b", text="before"))
    history.write(snapshot(7))
    (path,) = segments(tmp_path / "history")
    event, seen = frames(path)
    assert event.text == "before" and seen.engine.step == 7
    assert path.stat().st_mode & 0o077 == 0


def test_minutes_that_are_over_go(tmp_path, clock):
    history = History(tmp_path, "e", "n", 3, 2**20)
    for step in range(10):
        history.write(snapshot(step))
        clock.now += SEGMENT_S
    history.close()
    assert [frames(path)[0].engine.step for path in segments(tmp_path)] == [6, 7, 8, 9]


def test_a_clock_that_is_set_costs_no_minute_and_no_snapshot(tmp_path, clock):
    """Back by an hour, to a time at which a segment begins, and two days ahead."""
    history = History(tmp_path, "e", "n", 6, 2**20)
    for step in range(10 * 4):
        clock.set_by = {20: -4 * SEGMENT_S, 28: 2 * 86_400.0}.get(step, clock.set_by)
        history.write(snapshot(step))
        clock.now += SEGMENT_S / 4
    history.close()
    steps = {frame.engine.step for path in segments(tmp_path) for frame in frames(path)}
    assert steps == set(range(3 * 4, 10 * 4)), "six minutes and the present one"


def test_a_large_engine_gets_fewer_snapshots_not_fewer_minutes(tmp_path, clock):
    """A second each, of sizes whose hour is far beyond the bytes: the minutes stay, the bytes do too."""
    import random

    source, most = random.Random(1), 200_000
    history = History(tmp_path, "e", "n", 10, most)
    for step in range(10 * 60):
        history.write(snapshot(step, "".join(source.choices("0123456789abcdef", k=2000))))
        clock.now += 1.0
    history.close()
    kept = segments(tmp_path)
    assert sum(path.stat().st_size for path in kept) <= most * 1.3
    last = [frames(path) for path in kept[-3:]]
    assert all(2 <= len(each) < 30 for each in last), "a snapshot a second does not fit"
    assert len(kept) >= 5


def test_a_large_engine_keeps_the_begin_and_the_end_of_a_fault(tmp_path, clock):
    """Its snapshots are up to ten seconds apart: an incident would show a picture without its fault."""
    history = History(tmp_path, "e", "n", 60, 2**16)
    for step in range(60):
        history.write(snapshot(step, secrets.token_hex(4000)))
        clock.now += 1.0
    history.write(snapshot(60, secrets.token_hex(4000)))
    clock.now += 0.5
    history.write(snapshot(61))
    for step, age_s in ((62, 0.0), (63, 0.2)):
        clock.now += 0.2
        picture = snapshot(step)
        picture.verdicts = [Verdict(stage=1, cause="dead", summary="stage 1 was killed", since_s=age_s)]
        history.write(picture)
    clock.now += 0.2
    history.write(snapshot(64))
    history.write(snapshot(65))
    history.close()
    assert [update.engine.step for path in segments(tmp_path) for update in frames(path)][-2:] == [62, 64]


def test_nothing_is_kept_without_minutes(tmp_path, clock):
    history = History(tmp_path / "history", "e", "n", 0, 2**20)
    history.write(snapshot(1))
    assert not (tmp_path / "history").exists()


def test_a_disk_error_costs_a_segment_and_never_raises(tmp_path, clock):
    folder = tmp_path / "history"
    folder.write_text("a file where the folder belongs")
    history = History(folder, "e", "n", 60, 2**20)
    history.write(snapshot(1))
    assert "history" in history.problem
    folder.unlink()
    clock.now += SEGMENT_S
    history.write(snapshot(2))
    assert not history.problem and frames(segments(folder)[0])[0].engine.step == 2


def test_a_full_disk_costs_what_does_not_fit_and_never_raises(tmp_path, clock):
    """Not even when the file is closed with what did not fit; a limit on the size of files stands in for the disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    history = History(tmp_path / "history", "e", "n", 60, 2**20)
    try:
        history.write(snapshot(1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
        for step in range(2, 400):
            history.write(snapshot(step, text=secrets.token_hex(200)))
        assert "too large" in history.problem
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    clock.now += SEGMENT_S
    history.write(snapshot(400))
    assert history.problem == "" and [one.engine.step for one in frames(segments(tmp_path / "history")[-1])] == [400]


def test_the_minutes_around_an_incident_stay(tmp_path, clock):
    history = History(tmp_path / "history", "e", "n", 5, 2**20)
    begun = clock.now
    for step in range(12):
        history.write(snapshot(step))
        if step == 6:
            (tmp_path / "kept").mkdir()
            history.around(begun + 3.5 * SEGMENT_S, begun + 4.5 * SEGMENT_S, tmp_path / "kept")
        clock.now += SEGMENT_S
    history.close()
    assert [frames(path)[0].engine.step for path in segments(tmp_path / "kept")] == [3, 4]
    assert frames(segments(tmp_path / "history")[0])[0].engine.step > 4


def test_without_a_descriptor_an_incident_keeps_no_minutes(tmp_path, clock):
    """It must not raise: the diagnosis would be reported as failed."""
    history = History(tmp_path / "history", "e", "n", 5, 2**20)
    history.write(snapshot(1))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        history.around(clock.now - 1.0, clock.now + 1.0, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    history.close()
    assert segments(tmp_path) == []


def test_the_clock_of_the_files_is_the_wall(tmp_path):
    history = History(tmp_path, "e", "n", 60, 2**20)
    before = time.time()
    history.write(snapshot(1))
    history.close()
    header = Recording(segments(tmp_path)[0]).header
    assert before <= header.recorded_at <= time.time()
