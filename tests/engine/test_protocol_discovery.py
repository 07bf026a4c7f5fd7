"""How engines are found: only live ones, only ours, and nothing is removed that a record merely names."""

import os
import stat
import subprocess
import time
from pathlib import Path

import msgspec
import pytest
from ppengine.protocol import discovery
from ppengine.protocol.discovery import EngineRecord, RuntimeDirError, list_engines, process_start, write_record


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return discovery.runtime_dir()


def record(identity="e1", pid=None, pid_start=None):
    pid = os.getpid() if pid is None else pid
    return EngineRecord(
        id=identity, name="n", epoch="x", pid=pid, pid_start=process_start(pid) if pid_start is None else pid_start,
        state_endpoint="s", control_endpoint="c", bulk_endpoint="b", proto=1, model="m", pipeline_parallel_size=2,
        run_dir="r", started_wall=time.time(),
    )  # fmt: skip


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_record_is_private_and_found(folder):
    before = os.umask(0)
    try:
        write_record(record())
    finally:
        os.umask(before)
    assert mode(folder) == 0o700 and mode(folder / "e1.json") == 0o600
    assert [found.id for found in list_engines()] == ["e1"]
    assert not list(folder.glob("*.tmp"))


def test_a_folder_that_others_can_open_is_closed_and_a_link_is_refused(folder, tmp_path, monkeypatch):
    folder.chmod(0o755)
    assert mode(discovery.runtime_dir()) == 0o700
    other = tmp_path / "other"
    other.mkdir()
    (other / "ppconsole").symlink_to(folder)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(other))
    with pytest.raises(RuntimeDirError, match="not a folder owned by"):
        discovery.runtime_dir()


@pytest.mark.parametrize("how", ["ended", "reused"])
def test_what_a_dead_engine_left_is_removed(folder, how):
    process = subprocess.Popen(["sleep", "60"])
    start = process_start(process.pid)
    write_record(record("old", process.pid, start if how == "ended" else start - 1))
    (folder / "old").mkdir()
    (folder / "old" / "core.log").write_text("x")
    if how == "ended":
        process.kill()
        process.wait()
    try:
        assert list_engines() == []
        assert list(folder.iterdir()) == []
    finally:
        process.kill()
        process.wait()


def test_a_record_cannot_have_another_folder_removed(folder):
    precious = folder / "precious"
    precious.mkdir()
    (folder / "bad.json").write_bytes(msgspec.json.encode(record("precious", pid=2**22 + 1, pid_start=1)))
    assert list_engines() == [] and precious.is_dir()


@pytest.mark.parametrize("content", [b"", b"{", b'{"id": "\xff"}', b"[" * 100_000, b"null", b"\xff\xfe"])
def test_what_is_no_record_is_left_alone(folder, content):
    (folder / "odd.json").write_bytes(content)
    write_record(record())
    assert [found.id for found in list_engines()] == ["e1"]
    assert (folder / "odd.json").exists()


def test_a_zombie_does_not_live():
    process = subprocess.Popen(["true"])
    deadline = time.monotonic() + 20
    while process_start(process.pid) is not None:
        assert time.monotonic() < deadline
    assert Path(f"/proc/{process.pid}").exists(), "not reaped yet"
    process.wait()


def test_removing_what_is_not_there_is_fine():
    discovery.remove_engine("never-was")
