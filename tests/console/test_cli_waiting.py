"""`wait`, and `watch -n`: commands of scripts, which end in any case."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_helpers import Cli
from fake_gateway import FakeGateway, sample_request
from ppengine.protocol import discovery, kept_files
from ppengine.protocol.kept_files import EngineEnd


def until(reached: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def end(fake: FakeGateway, reason: str = "stopped by ann") -> None:
    """End the engine, with its kept files."""
    discovery.keep_record(fake.record)
    kept_files.write_end(fake.id, EngineEnd(wall=time.time(), reason=reason, clean=True))
    fake.stop()


def line_with(process: subprocess.Popen[str], text: str) -> str:
    """Return the next line of its stderr that has `text`."""
    limit = threading.Timer(60, process.kill)
    limit.start()
    assert process.stderr is not None
    found = next((line for line in process.stderr if text in line), "")
    limit.cancel()
    return found


# --- wait -------------------------------------------------------------------------------------------------------


def test_a_wait_for_an_engine_that_serves_ends_at_once(cli: Cli, fake: FakeGateway) -> None:
    run = cli("wait", "serving")
    assert (run.code, run.out, run.err) == (0, f"{fake.name} ({fake.id}) serves\n", "")
    (row,) = cli("wait", "serving", "--json").rows
    assert (row["engine"], row["name"], row["state"]) == (fake.id, fake.name, "serving")


def test_a_wait_may_begin_before_the_engine(cli: Cli, folder: Path) -> None:
    process = cli.process("wait", "serving")
    assert line_with(process, "waiting: no engine runs here")
    with FakeGateway() as fake:
        fake.snapshot.engine.state, fake.snapshot.engine.message = "loading", "stage 1 loads"
        assert line_with(process, "waiting: it is loading: stage 1 loads")
        fake.snapshot.engine.state = "serving"
        out, _ = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, f"{fake.name} ({fake.id}) serves\n")


def test_a_wait_for_an_engine_with_a_port_waits_for_that_too(cli: Cli, fake: FakeGateway) -> None:
    fake.snapshot.engine.http_serves = False
    process = cli.process("wait", "serving")
    assert line_with(process, "waiting: no process of its HTTP port takes calls yet")
    fake.snapshot.engine.http_serves = True
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, f"{fake.name} ({fake.id}) serves\n")


def test_a_wait_for_idle_counts_the_requests_that_are_left(cli: Cli, fake: FakeGateway) -> None:
    fake.snapshot.requests, fake.snapshot.requests_total = [sample_request("r-1")], 1
    process = cli.process("wait", "idle")
    assert line_with(process, "waiting: 1 request left")
    fake.snapshot.requests, fake.snapshot.requests_total = [], 0
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, f"{fake.name} ({fake.id}) is idle\n")


@pytest.mark.parametrize(
    ("state", "age_ms", "why"),
    [
        ("loading", 20.0, "it is loading"),
        ("degraded", 5000.0, "the core has not reported for 5 s"),
        ("serving", 1900.0, "next"),
    ],
)
def test_no_request_in_a_report_that_may_lack_some_is_not_idle(
    cli: Cli, fake: FakeGateway, state: str, age_ms: float, why: str
) -> None:
    """A core that is restarted has none before it has read its journal; an old report lacks what came since."""
    fake.snapshot.requests, fake.snapshot.requests_total = [], 0
    fake.snapshot.engine.state, fake.snapshot.core_age_ms = state, age_ms  # type: ignore[assignment]
    run = cli("wait", "idle", "--timeout", "1.5")
    assert run.code == 5
    assert run.err.splitlines()[-1].startswith("error: it is not idle within 1.5 s: ")
    assert why in run.err.splitlines()[-1]


def test_a_wait_gives_up_with_the_reason(cli: Cli, folder: Path) -> None:
    run = cli("wait", "serving", "-e", "absent", "--timeout", "0.3")
    assert run.code == 5
    assert run.err.splitlines()[-1].startswith("error: it does not serve within 0.3 s: no engine has the id")
    with FakeGateway() as fake:
        fake.snapshot.engine.state, fake.snapshot.engine.message = "paused", "by ann"
        run = cli("wait", "serving", "--timeout", "2")
        assert (run.code, run.err.splitlines()[-1]) == (5, "error: it does not serve within 2 s: it is paused: by ann")


def test_a_wait_ends_with_an_engine_that_ends_meanwhile(cli: Cli, fake: FakeGateway) -> None:
    fake.snapshot.engine.state = "loading"
    process = cli.process("wait", "serving", "--timeout", "60")
    assert line_with(process, "it is loading")
    end(fake, "stage 0 found no weights")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3
    assert err.splitlines()[-1].startswith("error: the engine ended ")
    assert err.splitlines()[-1].endswith(": stage 0 found no weights")


def test_a_wait_is_for_a_successor_of_an_engine_that_ended_before_it(cli: Cli, fake: FakeGateway) -> None:
    end(fake)
    process = cli.process("wait", "serving", "-e", fake.name)
    assert line_with(process, "stopped by ann")
    with FakeGateway(name=fake.name) as successor:
        out, _ = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, f"{fake.name} ({successor.id}) serves\n")


def test_a_wait_for_one_of_several_engines_is_exit_2(cli: Cli, fake: FakeGateway) -> None:
    with FakeGateway(name="other"):
        run = cli("wait", "idle")
        assert run.code == 2 and "name one with -e" in run.err


# --- watch -n ---------------------------------------------------------------------------------------------------


def test_a_counted_watch_ends_with_its_engine(cli: Cli, fake: FakeGateway) -> None:
    process = cli.process("watch", "--json", "-n", "100000", "--interval", "0.05")
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["schema"] == 1
    end(fake)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3
    assert err.splitlines()[-1].startswith("error: the engine ended ")
    assert err.splitlines()[-1].endswith(": stopped by ann")


def test_a_counted_watch_of_thresholds_ends_with_its_engine(cli: Cli, fake: FakeGateway, folder: Path) -> None:
    (folder / "ppconsole").mkdir(mode=0o700, exist_ok=True)
    (folder / "ppconsole" / "config.toml").write_text('[on_incident]\ncommand = ["true"]\n')
    process = cli.process("watch", "--thresholds", "-n", "1")
    until(lambda: fake.pings > 0 or process.poll() is not None)
    end(fake)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 3, err
    assert err.splitlines()[-1].endswith(": stopped by ann")


def test_a_counted_watch_without_snapshots_is_exit_5(cli: Cli, fake: FakeGateway) -> None:
    fake.silent = True
    run = cli("watch", "-n", "1", "--timeout", "0.5")
    assert (run.code, run.err.splitlines()[-1]) == (5, "error: no snapshot within 0.5 s")
