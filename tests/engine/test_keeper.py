"""An engine whose supervisor was killed and whose keeper runs: it stays, and only the keeper's child resumes it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from ppengine.common.config import EngineConfig, Profile
from ppengine.common.profile_sections import ModelConfig
from ppengine.protocol import discovery
from ppengine.protocol.discovery import EngineRecord, ended_engines, list_engines
from ppengine.supervisor.claims import ClaimError, claim, identity, sweep
from ppengine.supervisor.keeper import Keeper
from ppengine.supervisor.process_deaths import ProcessDeaths
from ppengine.supervisor.resume import resume

GONE = (2**22 + 1, 1)
"""No process has such a pid."""


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(discovery, "ring_dir", lambda engine: tmp_path / f"rings-{engine}")


def config(keeper: tuple[int, int] | None) -> EngineConfig:
    return EngineConfig(
        id="abc123", name="kept", epoch="e" * 32, profile=Profile(name="kept", model=ModelConfig(path="/nowhere")),
        model_path="/nowhere", model_type="llama", layers=[(0, 1)], max_model_len=8,
        run_dir=str(discovery.runtime_dir() / "abc123"), ring_dir=str(discovery.ring_dir("abc123")), started_wall=1.0,
        keeper=keeper,
    )  # fmt: skip


def killed(keeper: tuple[int, int] | None) -> EngineConfig:
    """Make the folders of an engine whose supervisor has just been killed."""
    made = config(keeper)
    claim(made)
    for file in (Path(made.run_dir) / ".owner",) if keeper is None else ():
        file.write_text(f"{GONE[0]} {GONE[1]}\n")
    record = EngineRecord(
        id=made.id, name=made.name, epoch=made.epoch, pid=GONE[0], pid_start=GONE[1], state_endpoint="",
        control_endpoint="", bulk_endpoint="", proto=1, model="m", pipeline_parallel_size=1, run_dir=made.run_dir,
        started_wall=1.0, keeper=keeper,
    )  # fmt: skip
    discovery.write_record(record)
    discovery.keep_record(record)
    return made


def test_it_stays_while_its_keeper_runs():
    made = killed(identity(os.getpid()))
    sweep()
    assert [one.id for one in list_engines()] == ["abc123"] and Path(made.run_dir).exists()
    assert ended_engines() == []


@pytest.mark.parametrize("keeper", [None, GONE])
def test_it_goes_without_a_keeper(keeper):
    made = killed(keeper)
    sweep()
    assert list_engines() == [] and not Path(made.run_dir).exists()
    assert [one.record.id for one in ended_engines()] == ["abc123"]


def test_another_engine_cannot_have_its_name():
    killed(identity(os.getpid()))
    with pytest.raises(ClaimError, match="an engine named 'kept' runs already"):
        claim(msgspec.structs.replace(config(None), id="abc124"))


@pytest.mark.parametrize(
    ("engine", "error"),
    [
        ("../abc", "an engine id is six lowercase hex digits"),
        ("abc124", "engine abc124 cannot be resumed: .*abc124/engine.json"),
        ("abc123", "engine abc123 cannot be resumed: this process's parent did not start it"),
    ],
)
def test_what_cannot_be_resumed_is_refused(engine, error):
    killed(identity(os.getpid()))
    with pytest.raises(ClaimError, match=error):
        resume(engine, -9)


def test_a_child_of_the_keeper_waits_for_what_is_left_and_removes_old_sockets():
    made = killed(identity(os.getpid()))
    folder = Path(made.run_dir)
    for name in ("state", "control", "bulk"):
        (folder / name).touch()
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "-m ppengine.core", str(folder)])
    code = (
        "import ppengine.supervisor.resume as r, sys; r.LEAVE_S = 0.3; from pathlib import Path;"
        f"from ppengine.protocol import discovery; discovery.ring_dir = lambda engine: Path({made.ring_dir!r});"
        "config, before = r.resume('abc123', -9, 'killed for x'); print(config.name, before.pid, before.detail)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == f"kept {GONE[0]} killed for x"
    assert left.wait(5) == -9, "what did not leave by itself is killed"
    assert not any((folder / name).exists() for name in ("state", "control", "bulk"))


@pytest.mark.parametrize("words", ["", "the out-of-memory killer of the host"])
def test_the_keeper_says_whether_its_supervisor_was_killed_for_memory(monkeypatch, capsys, words):
    """The next supervisor gets the words, and they are the reason if there is none."""
    monkeypatch.setattr(ProcessDeaths, "note", lambda deaths, now: 0.0 if len(started) < 3 else None)
    started, codes = [], iter([-9, -9, -9])

    class Kept(Keeper):
        def _supervise(self, arguments):
            started.append(arguments)
            self._engine, self._memory = "abc123", SimpleNamespace(words=lambda: words)
            return next(codes)

    assert Kept(["tiny"]).run() == 1
    killed = f"killed by SIGKILL{words and ': ' + words}"
    assert started == [["tiny"], *2 * [["--resume=abc123", "--after=-9", f"--killed={killed}"]]]
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"the supervisor of abc123 was {killed}; another one resumes the engine"
    assert said[-1].startswith(f"error: the supervisor of abc123 was {killed}, and it is the end number")


def test_a_stop_between_two_supervisors_starts_no_other(monkeypatch):
    """The pause before a restart is a second long: a signal that comes then has no process to go to."""
    started = []

    class Kept(Keeper):
        def _supervise(self, arguments):
            started.append(arguments)
            self._engine = "abc123"
            return -9

    keeper = Kept(["tiny"])
    monkeypatch.setattr(time, "sleep", lambda seconds: keeper.stop(signal.SIGTERM))
    assert keeper.run() == 128 + 9
    assert started == [["tiny"]]


def test_a_stop_before_the_supervisor_is_there_ends_it(monkeypatch, tmp_path):
    program = tmp_path / "sleeper"
    program.write_text("#!/bin/sh\nexec sleep 20\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    keeper = Keeper(["tiny"])
    keeper.stop(signal.SIGTERM)
    assert keeper.run() == 128 + 15


def test_a_reader_that_is_gone_changes_no_exit_code():
    """Python exits with 120 where a buffered line cannot be written at its end."""
    lines = "input(); announce('stopped'); pass_on(b'x\\n'); tell('y')"
    program = f"from ppengine.supervisor.announcements import announce, pass_on, tell; {lines}"
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": ""},
    )  # fmt: skip
    for end in (child.stdout, child.stderr):
        end.close()
    child.communicate(b"\n")
    assert child.returncode == 0


@pytest.mark.parametrize("line", [b"print\n", b'"\xff"\n', b'{"event": "\xff"}\n', b'{"event": "started"}\n'])
def test_a_line_that_is_none_of_the_supervisor_s_is_passed_on(line: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    Keeper([])._pass_on(line)
    assert capfd.readouterr().out == line.decode(errors="replace")
