"""However an engine ends, no process, socket, folder or shared memory of it stays."""

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
import pytest
import zmq
from engines import Engine, wait_until
from ppengine.common import lifeline
from ppengine.common.config import profiles_dir
from ppengine.protocol.control import Accepted, Command
from ppengine.protocol.frames import Codec, encode
from ppengine.protocol.offline import Added, AddMany, FromFront
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.verbs import Stop

Start = Callable[..., Engine]
ENDS_S, SERVES_S = 15.0, 150.0
"""Ray alone starts a dozen processes before the first stage: on a busy machine that is more than a minute."""
RAY = pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.timeout(300)])


@pytest.fixture
def start(runtime: Path) -> Iterator[Start]:
    """Start a supervisor on the bundled model and wait until it serves (`executor` None: only start it)."""
    engines: list[Engine] = []

    def begin(executor: str | None = "local", *settings: str) -> Engine:
        command = ["ppengine.supervisor", "tiny", "--set", "threads_per_stage=1"]
        for setting in (f"parallel.executor={executor or 'local'}", *settings):
            command += ["--set", setting]
        engines.append(Engine(runtime, command))
        if executor is not None:
            engines[-1].find_processes(4 if executor == "ray" else 5)
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
    sampling = [SamplingParams(max_tokens=400, ignore_eos=True)] * 32
    many = AddMany(nonce=1, session="busy", prompts=[[5, 6, 7]] * 32, sampling=sampling)
    answer = ask(engine, many)
    assert isinstance(answer, Added)
    assert answer.error == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal(start: Start, number: signal.Signals) -> None:
    ends_by_signal(start("local"), number)


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_signal_with_ray(start: Start) -> None:
    ends_by_signal(start("ray"), signal.SIGINT)


def ends_by_signal(engine: Engine, number: signal.Signals) -> None:
    engine.process.send_signal(number)
    assert engine.wait(ENDS_S) == 0
    assert engine.read() == {"event": "stopped", "code": 0, "reason": f"{number.name} received"}
    assert engine.leftovers() == []


def test_stop_command_under_load(start: Start) -> None:
    """Nothing has to be killed, in the best of three tries: on a busy machine a process may be late."""
    for _ in range(3):
        engine = start()
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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("role", ["supervisor", "core", "stage1"])
def test_end_under_load(start: Start, role: str, number: signal.Signals) -> None:
    engine = start()
    keep_busy(engine)
    os.kill({"supervisor": engine.process.pid, **engine.pids}[role], number)
    if role == "stage1":
        wait_until(lambda: "stage 1 ended: killed" in engine.errors.read_text(), "the death is told")
        engine.process.terminate()
    engine.wait(ENDS_S)
    wait_until(engine.nothing_left, "all is gone", ENDS_S)


def test_parent_gone(runtime: Path) -> None:
    """As it is when a program that uses `LLM` is killed: lifeline and stdout close at once."""
    log = runtime / "log"
    read_end, line = lifeline.open_pipe()
    command = [sys.executable, "-m", "ppengine.supervisor", "tiny", "--set", "threads_per_stage=1"]
    with log.open("wb") as errors:
        child = subprocess.Popen(
            [*command, "--lifeline", str(read_end)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
            pass_fds=(read_end,), start_new_session=True,
        )  # fmt: skip
    os.close(read_end)
    try:
        wait_until(lambda: "serving" in log.read_text(), "the engine serves", 60)
    finally:
        os.close(line)
        assert child.stdout is not None
        child.stdout.close()
    assert child.wait(ENDS_S) == 0
    assert log.read_text().splitlines()[-1] == "stopped: its parent is gone"
    assert list((runtime / "ppconsole").iterdir()) == []


def test_signal_while_loading(start: Start) -> None:
    engine = start(None)
    engine.find_processes(5)
    engine.process.send_signal(signal.SIGINT)
    assert engine.wait(ENDS_S) == 0
    assert engine.leftovers() == []


@pytest.mark.parametrize("executor", ["local", RAY])
def test_supervisor_killed(start: Start, executor: str) -> None:
    engine = start(executor)
    engine.process.kill()
    engine.wait()
    wait_until(engine.nothing_left, "all leaves with the supervisor", ENDS_S)


def test_supervisor_killed_while_a_stage_is_stopped(start: Start) -> None:
    engine = start()
    os.kill(engine.pids["stage0"], signal.SIGSTOP)
    engine.process.kill()
    engine.wait()
    wait_until(engine.nothing_left, "all leaves with the supervisor", ENDS_S)


@pytest.mark.parametrize("role", ["core", "gateway"])
def test_vital_process_killed(start: Start, role: str) -> None:
    engine = start()
    os.kill(engine.pids[role], signal.SIGKILL)
    assert engine.wait(ENDS_S) == 1
    assert engine.read()["reason"] == f"{role} ended: killed by SIGKILL"
    assert engine.leftovers() == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_stage_killed_or_stopped_then_stop(start: Start, number: signal.Signals) -> None:
    engine = start()
    os.kill(engine.pids["stage1"], number)
    if number == signal.SIGKILL:
        wait_until(lambda: "stage 1 ended: killed by SIGKILL" in engine.errors.read_text(), "the death is told")
    assert engine.process.poll() is None
    engine.process.terminate()
    assert engine.wait(ENDS_S) == 0
    assert engine.leftovers() == []


@pytest.fixture
def broken_model(tmp_path: Path) -> Path:
    """The bundled model with its weights cut short."""
    folder = tmp_path / "broken"
    shutil.copytree(profiles_dir() / "models" / "tiny", folder)
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 100)
    return folder


def test_truncated_weights(start: Start, broken_model: Path) -> None:
    engine = start(None, f"model.path={broken_model}")
    assert engine.wait(ENDS_S) == 1
    (line,) = engine.errors.read_text().splitlines()
    assert line.startswith("error: ")
    assert "truncated" in line
    assert engine.leftovers() == []


def test_weights_lost_between_check_and_load(start: Start, broken_model: Path) -> None:
    """A tensor that the header does not have is found by a stage, not by the check before."""
    shutil.copy(profiles_dir() / "models" / "tiny" / "model.safetensors", broken_model)
    config = broken_model / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": ', '"intermediate_size": 1'))
    engine = start(None, f"model.path={broken_model}")
    assert engine.wait(2 * ENDS_S) == 1
    assert engine.errors.read_text().splitlines()[-1].startswith("error: stage ")
    assert engine.leftovers() == []


def test_too_small_for_one_sequence(start: Start) -> None:
    engine = start(None, "memory.utilization=0.001")
    assert engine.wait(2 * ENDS_S) == 8
    assert engine.errors.read_text().splitlines()[-1].startswith("error: utilization 0.001 leaves 0 blocks")
    assert engine.leftovers() == []


def test_unknown_key_is_a_usage_error(start: Start) -> None:
    engine = start(None, "memory.utilisation=0.5")
    assert engine.wait(ENDS_S) == 2
    assert engine.errors.read_text() == ("error: unknown key memory.utilisation; did you mean memory.utilization?\n")
