"""Files of an engine that outlive it: logs, its end, and which engines' files go first."""

import os
import resource
import stat
import time

import pytest
from ppengine.protocol import discovery, kept_files, keys
from ppengine.protocol.discovery import EngineRecord, ended_engines, keep_record, list_engines, remove_engine
from ppengine.protocol.kept_files import LOG_BYTES_MOST, EngineEnd, engine_folder, read_end, write_end

NO_PID = 2**22 + 1


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "run").mkdir()


def engine(identity="aaaaaa", *, pid=NO_PID, published=True, end=None):
    """Make the files of an engine; its supervisor is `pid`."""
    run_dir = discovery.runtime_dir() / identity
    run_dir.mkdir()
    record = EngineRecord(
        id=identity, name=f"n-{identity}", epoch="x", pid=pid, pid_start=discovery.process_start(pid) or 0,
        state_endpoint="s", control_endpoint="c", bulk_endpoint="b", proto=1, model="m", pipeline_parallel_size=2,
        run_dir=str(run_dir), started_wall=time.time(),
    )  # fmt: skip
    keep_record(record)
    if published:
        discovery.write_record(record)
    (run_dir / "core.log").write_text(f"log of {identity}\n")
    (run_dir / "audit.jsonl").write_text("{}\n")
    if end is not None:
        write_end(identity, end)
    return run_dir


def ended(reason="core ended: killed by SIGKILL", *, clean=False, wall=None, by=""):
    return EngineEnd(wall=time.time() if wall is None else wall, reason=reason, clean=clean, by=by)


def test_logs_and_end_of_a_dead_engine_stay():
    run_dir = engine(end=ended())
    (run_dir / "control").write_text("a socket is not kept")
    assert list_engines() == [] and not run_dir.exists()
    (one,) = ended_engines()
    assert (one.record.name, one.end.reason) == ("n-aaaaaa", "core ended: killed by SIGKILL")
    assert sorted(path.name for path in one.folder.iterdir()) == ["audit.jsonl", "core.log", "end.json", "record.json"]
    assert (one.folder / "core.log").read_text() == "log of aaaaaa\n"
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in one.folder.iterdir())
    assert stat.S_IMODE(one.folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("write", [kept_files.write_file, keys.write_private])
def test_a_file_without_room_leaves_nothing_behind(tmp_path, write):
    """Else the parts of each try would fill the rest of the disk, and those of a key would stay."""
    path = tmp_path / "file"
    write(path, b"before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises((OSError, keys.KeyFileError), match="File too large"):
            write(path, bytes(2 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"before"
    assert path in tmp_path.iterdir() and not list(tmp_path.glob(".*"))


def test_a_live_engine_has_not_ended():
    engine(pid=os.getpid())
    assert [record.id for record in list_engines()] == ["aaaaaa"] and ended_engines() == []


def test_an_engine_whose_supervisor_still_clears_away_has_ended():
    """Otherwise it is neither live nor ended for a moment, and a list that is read then is empty."""
    engine(pid=os.getpid(), end=ended("stopped by ann", clean=True))
    assert len(list_engines()) == 1 and ended_engines() == [], "a stop that was accepted is no end yet"
    (discovery.runtime_dir() / "aaaaaa.json").unlink()
    assert list_engines() == [] and [one.record.id for one in ended_engines()] == ["aaaaaa"]


def test_the_first_note_of_an_end_counts_but_a_failure_replaces_a_request():
    engine(end=ended("stopped by command", clean=True))
    write_end("aaaaaa", ended("stopped by ann", clean=True, by="ann"))
    assert read_end("aaaaaa").reason == "stopped by ann", "the supervisor saw the core's exit before the gateway"
    write_end("aaaaaa", ended("stopped by command", clean=True))
    write_end("aaaaaa", ended("stopped by bob", clean=True, by="bob"))
    assert read_end("aaaaaa").reason == "stopped by ann"
    write_end("aaaaaa", ended("core ended: killed by SIGKILL"))
    write_end("aaaaaa", ended("stage 0 ended: killed by SIGKILL"))
    assert read_end("aaaaaa").reason == "core ended: killed by SIGKILL"


def test_an_end_that_nobody_noted_has_the_last_sign_of_life():
    run_dir = engine()
    past = time.time() - 100.0
    os.utime(run_dir / "core.log", (past + 7, past + 7))
    os.utime(run_dir / "audit.jsonl", (past, past))
    os.utime(engine_folder("aaaaaa") / "record.json", (past, past))
    list_engines()
    (one,) = ended_engines()
    assert not one.end.noted and not one.end.clean and one.end.wall == pytest.approx(past + 7, abs=0.01)
    assert "all its processes ended at once" in one.end.reason


def test_an_end_before_the_host_was_restarted_is_named():
    """The runtime folder is gone with the old boot, so no process clears away."""
    run_dir = engine(published=False)
    for path in [*run_dir.iterdir(), engine_folder("aaaaaa") / "record.json"]:
        os.utime(path, (1.0, 1.0))
    for path in run_dir.iterdir():
        path.unlink()
    run_dir.rmdir()
    (one,) = ended_engines()
    assert one.end.reason == "the host was restarted" and one.end.wall == pytest.approx(1.0)


def test_a_long_log_is_kept_from_its_end():
    run_dir = engine()
    (run_dir / "stage0.log").write_bytes(b"old " * (LOG_BYTES_MOST // 4) + b"the newest line\n")
    list_engines()
    kept = (engine_folder("aaaaaa") / "stage0.log").read_bytes()
    assert len(kept) == LOG_BYTES_MOST and kept.endswith(b"the newest line\n")


def test_the_newest_ten_stay_and_those_with_a_fault_longest():
    begun = time.time() - 1000
    for number in range(discovery.ENDED_MOST + 3):
        clean = number % 2 == 1
        engine(f"{number:06x}", end=ended("x", clean=clean, wall=begun + number))
        if number == 1:
            (engine_folder("000001") / "incidents" / "1").mkdir(parents=True)
        remove_engine(f"{number:06x}")
    left = {one.record.id for one in ended_engines()}
    assert len(left) == discovery.ENDED_MOST
    gone = {f"{number:06x}" for number in range(discovery.ENDED_MOST + 3)} - left
    assert gone == {"000003", "000005", "000007"}, "the oldest that were stopped on request and had no incident"


def test_an_end_on_request_is_kept_after_ten_faults():
    begun = time.time() - 1000
    for number in range(discovery.ENDED_MOST + 1):
        clean = number == discovery.ENDED_MOST
        engine(f"{number:06x}", end=ended("x", clean=clean, wall=begun + number))
        remove_engine(f"{number:06x}")
    left = [one.record.id for one in ended_engines()]
    assert left == [f"{number:06x}" for number in range(discovery.ENDED_MOST, 0, -1)], "the oldest fault went"


def test_an_engine_without_kept_files_leaves_none():
    (discovery.runtime_dir() / "bbbbbb").mkdir()
    (discovery.runtime_dir() / "bbbbbb" / "core.log").write_text("x")
    remove_engine("bbbbbb")
    assert not engine_folder("bbbbbb").exists()


def test_damaged_files_hide_no_other_engine():
    engine("aaaaaa", end=ended())
    engine("bbbbbb", end=ended())
    list_engines()
    (engine_folder("aaaaaa") / "record.json").write_text("{")
    assert [one.record.id for one in ended_engines()] == ["bbbbbb"]
    (engine_folder("bbbbbb") / "end.json").write_text("[]")
    assert read_end("bbbbbb") is None


def test_a_disk_that_cannot_be_written_stops_no_removal(tmp_path, monkeypatch):
    run_dir = engine()
    monkeypatch.setattr(kept_files, "write_file", lambda path, data: (_ for _ in ()).throw(OSError(28, "full")))
    list_engines()
    assert not run_dir.exists()
