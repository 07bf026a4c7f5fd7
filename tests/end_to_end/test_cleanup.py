"""However an engine ends, no process, socket, folder or shared memory of it stays.

An engine that is idle and gets SIGTERM is the one of every other file (`Served.stop`). Three of these start as users
start them: stopped by command, with a supervisor that is killed, and with a parent that is gone.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import preloaded
import pytest
import zmq
from engines import Engine, Launch, run_module, wait_until
from ppengine.common import lifeline
from ppengine.common.config import profiles_dir
from ppengine.protocol.control import Accepted, Command
from ppengine.protocol.discovery import ended_engines, list_engines
from ppengine.protocol.frames import Codec, encode
from ppengine.protocol.offline import Added, AddMany, FromFront
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.verbs import Stop, Submit

Start = Callable[..., Engine]
ENDS_S, SERVES_S = 60.0, 100.0


@pytest.fixture
def start(runtime: Path) -> Iterator[Start]:
    """Start a supervisor on the bundled model, and wait until it serves."""
    engines: list[Engine] = []

    def begin(*settings: str, stages: int = 2, serves: bool = True, launch: Launch = preloaded.fork) -> Engine:
        command = ["ppengine.supervisor", "tiny"]
        for setting in ("threads_per_stage=1", f"parallel.pipeline={stages}", *settings):
            command += ["--set", setting]
        engines.append(Engine(runtime, command, launch=launch))
        if serves:
            engines[-1].find_processes(4 + stages)
            serve(engines[-1])
        return engines[-1]

    yield begin
    for engine in engines:
        engine.end()


def serve(engine: Engine) -> None:
    """Wait until the engine serves; fail at once when it has ended."""
    wait_until(
        lambda: "serving" in engine.errors.read_text() or engine.process.poll() is not None,
        "the engine serves",
        SERVES_S,
    )
    assert "serving" in engine.errors.read_text(), engine.errors.read_text()


def ask(engine: Engine, message: msgspec.Struct) -> object:
    """Send one message to the core and return its first answer."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as front:
        front.linger = 1000
        front.connect(f"ipc://{engine.run_dir}/front")
        front.send(encode(message))
        assert front.poll(10_000), "the core answers"
        return Codec(FromFront).decode(front.recv())


def keep_busy(engine: Engine) -> None:
    """Give the engine more than it can finish while the test lasts."""
    one = Submit(prompt_token_ids=[5, 6, 7], sampling=SamplingParams(max_tokens=400, ignore_eos=True))
    answer = ask(engine, AddMany(nonce=1, session="busy", submissions=[one] * 32))
    assert isinstance(answer, Added)
    assert answer.error == ""


def test_stop_command_under_load(start: Start) -> None:
    """Nothing has to be killed, in the best of three tries: on a busy machine a process may be late."""
    for _ in range(3):
        engine = start(launch=run_module)
        keep_busy(engine)
        epoch = json.loads((engine.run_dir / "engine.json").read_bytes())["epoch"]
        answer = ask(engine, Command(id="stop", epoch=epoch, verb=Stop(), by="test"))
        assert isinstance(answer, Accepted)
        assert engine.wait(ENDS_S) == 0
        assert engine.read()["reason"] == "stopped by command"
        assert engine.leftovers() == []
        if "killed" not in engine.errors.read_text():
            return
    raise AssertionError(engine.errors.read_text())


@pytest.mark.parametrize(
    ("role", "number", "code", "reason"),
    [
        ("supervisor", signal.SIGKILL, -9, "its supervisor (pid {pid}) ended and noted no reason: SIGKILL or a crash"),
        ("supervisor", signal.SIGTERM, 0, "SIGTERM received"), ("core", signal.SIGTERM, 0, "stopped by command"),
        ("all", signal.SIGKILL, -9, "all its processes ended at once and noted no reason: SIGKILL, or the container "
         "stopped"),
    ],
)  # fmt: skip
def test_end_under_load(start: Start, role: str, number: signal.Signals, code: int, reason: str) -> None:
    """A core that is killed is a fault on demand's (`test_faults_on_demand`)."""
    engine = start(launch=run_module if (role, number) == ("supervisor", signal.SIGKILL) else preloaded.fork)
    keep_busy(engine)
    ours = {"supervisor": engine.process.pid, **engine.pids}
    for pid in ours.values() if role == "all" else [ours[role]]:
        os.kill(pid, number)
    assert engine.wait(ENDS_S) == code
    reason = reason.format(pid=engine.process.pid)
    if code >= 0:
        assert engine.read() == {"event": "stopped", "code": code, "reason": reason}
    if role == "all":
        assert list_engines() == []  # Nobody was left to clear away; the next look does.
    wait_until(engine.nothing_left, "all is gone", ENDS_S)
    (ended,) = [one for one in ended_engines() if one.record.id == engine.run_dir.name]
    assert (ended.end.reason, ended.end.clean) == (reason, code == 0)
    assert "stage 0 of 2 started" in (ended.folder / "stage0.log").read_text()
    assert any((ended.folder / "history").glob("*.rec"))


def test_the_next_gateway_clears_away_like_the_first(start: Start) -> None:
    engine = start()
    keep_busy(engine)
    gone = engine.pids["gateway"]
    os.kill(gone, signal.SIGKILL)
    wait_until(lambda: engine.find_processes(len(engine.pids))["gateway"] != gone, "another gateway")
    log = engine.run_dir / "gateway.log"
    wait_until(lambda: log.read_text().count("started, epoch") == 2, "it takes reports")
    os.kill(engine.pids["stage0"], signal.SIGSTOP)
    engine.process.kill()
    wait_until(engine.nothing_left, "all is gone", ENDS_S)
    (ended,) = [one for one in ended_engines() if one.record.id == engine.run_dir.name]
    assert ended.end.reason.startswith(f"its supervisor (pid {engine.process.pid}) ended")


def test_stages_killed_and_stopped_then_stop(start: Start) -> None:
    engine = start(stages=3)
    keep_busy(engine)
    for stage, number in ((2, signal.SIGKILL), (1, signal.SIGTERM)):
        os.kill(engine.pids[f"stage{stage}"], number)
        told = f"stage {stage} ended: killed by {number.name}"
        wait_until(lambda told=told: told in engine.errors.read_text(), "the death is told")
    os.kill(engine.pids["stage0"], signal.SIGSTOP)
    assert engine.process.poll() is None
    engine.process.terminate()
    assert engine.wait(ENDS_S) == 0
    assert engine.leftovers() == []


def test_parent_gone(runtime: Path) -> None:
    """As it is when a program that uses `LLM` is killed: lifeline and stdout close at once."""
    log = runtime / "log"
    read_end, line = lifeline.open_pipe()
    command = [sys.executable, "-m", "ppengine.supervisor", "tiny", "--set", "threads_per_stage=1"]
    with log.open("wb") as errors:
        child = subprocess.Popen(
            [*command, "--lifeline", str(read_end)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
            pass_fds=(read_end,), start_new_session=True, env=os.environ | {"PYTHONUNBUFFERED": ""},
        )  # fmt: skip
    os.close(read_end)
    try:
        wait_until(lambda: "serving" in log.read_text(), "the engine serves", 60)
    finally:
        os.close(line)
        assert child.stdout is not None
        child.stdout.close()
    assert child.wait(ENDS_S) == 0
    assert log.read_text().splitlines()[-1] == "stopped: its program has ended or closed it"
    assert list((runtime / "ppconsole").iterdir()) == []


def test_signal_while_loading(start: Start) -> None:
    engine = start(serves=False)
    engine.find_processes(5)
    engine.process.send_signal(signal.SIGINT)
    assert engine.wait(ENDS_S) == 0
    assert engine.read() == {"event": "stopped", "code": 0, "reason": "SIGINT received"}
    assert engine.leftovers() == []


def test_weights_lost_between_check_and_load(start: Start, tmp_path: Path) -> None:
    """A tensor that the header does not have is found by a stage, not by the check before."""
    folder = Path(shutil.copytree(profiles_dir() / "models" / "tiny", tmp_path / "broken"))
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": ', '"intermediate_size": 1'))
    engine = start(f"model.path={folder}", serves=False)
    assert engine.wait(ENDS_S) == 1
    assert engine.errors.read_text().splitlines()[-1].startswith("error: stage ")
    assert engine.leftovers() == []
