"""The supervisor over stand-ins of the other processes: how an engine ends, and that nothing is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from engines import Engine, wait_until
from ppengine.supervisor.process_deaths import BACKOFF_S, MOST, WITHIN_S, ProcessDeaths
from ppengine.supervisor.restart_plan import MOST_AGENTS

Start = Callable[..., Engine]


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    """What the gateway's stand-in heard, a line a process: role|stage|pid|exit code|detail."""
    path = tmp_path / "reports"
    path.touch()
    return path


@pytest.fixture
def start(tmp_path: Path, reports: Path) -> Iterator[Start]:
    """Start a supervisor with two stages."""
    engines: list[Engine] = []

    def begin(name: str = "twin", **env: str) -> Engine:
        env = {"STANDIN_REPORTS": str(reports), **env}
        engines.append(Engine(tmp_path / "run", ["standins.supervisor", name, "2"], env))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.end()


def serve(engine: Engine) -> dict[str, int]:
    """Wait until all five processes run and the engine has served; return their pids by role.

    A stage's ring shows that it has taken its lifeline: one that is stopped before that would be left behind.
    """
    pids = engine.find_processes(5)
    wait_until(lambda: len(list(engine.ring_dir.glob("s*.main.ring"))) == 2, "both stages run")
    wait_until(lambda: "serving" in engine.errors.read_text(), "the supervisor sees that it serves")
    return pids


def test_start_publishes_a_private_record(start: Start) -> None:
    engine = start()
    assert engine.event["event"] == "started"
    assert engine.event["name"] == "twin"
    record = engine.runtime / "ppconsole" / f"{engine.event['id']}.json"
    assert record.stat().st_mode & 0o777 == 0o600
    assert engine.run_dir.stat().st_mode & 0o777 == 0o700
    assert engine.ring_dir.stat().st_mode & 0o777 == 0o700
    assert set(engine.find_processes(5)) == {"gateway", "core", "agent", "stage0", "stage1"}


def test_every_process_has_a_session_and_a_log(start: Start) -> None:
    engine = start()
    for role, pid in serve(engine).items():
        assert os.getsid(pid) == pid
        assert (engine.run_dir / f"{role}.log").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_stops_in_order(start: Start, number: signal.Signals) -> None:
    engine = start()
    serve(engine)
    engine.process.send_signal(number)
    assert engine.wait(15) == 0
    assert engine.read() == {"event": "stopped", "code": 0, "reason": f"{number.name} received"}
    assert engine.leftovers() == []


def test_an_engine_that_does_not_serve_in_time_is_ended(start: Start) -> None:
    engine = start(STANDIN_WITHIN="0.001")
    assert engine.wait(15) == 5
    assert engine.errors.read_text().splitlines()[-1] == "error: it does not serve within 0.001 s"
    assert engine.leftovers() == []


def test_a_store_runs_beside_its_stage_and_those_of_other_nodes_are_left_to_them(start: Start, reports: Path) -> None:
    engine = start(STANDIN_STORES="1", STANDIN_NODES="1")
    ended = "store1|None|1|-9|killed by SIGKILL"
    wait_until(lambda: ended in reports.read_text(), "the end of the store on the other node is reported")
    assert "store1 ended: killed by SIGKILL; it is restarted" in engine.errors.read_text()
    log = engine.run_dir / "store0.log"
    wait_until(lambda: log.exists() and "started as store0" in log.read_text(), "the store of this host runs")
    old = engine.find_processes(6)["store0"]
    os.kill(old, signal.SIGKILL)
    wait_until(lambda: engine.find_processes(6)["store0"] != old, "another store")
    assert not (engine.run_dir / "store1.log").exists(), "its own node restarts it"


def test_stores_are_restarted_and_leave_in_order(start: Start, reports: Path) -> None:
    engine = start(STANDIN_STORES="1")
    pids = engine.find_processes(7)
    assert {"store0", "store1"} < set(pids)
    wait_until(lambda: "serving" in engine.errors.read_text(), "the supervisor sees that it serves")
    log = engine.run_dir / "store1.log"
    for number in (1, 2):
        wait_until(lambda number=number: log.read_text().count("started as store1") == number, "it runs")
        old = engine.find_processes(7)["store1"]
        os.kill(old, signal.SIGKILL)
        wait_until(lambda old=old: engine.find_processes(7)["store1"] != old, "another store")
    assert f"store1|None|{old}|-9|killed by SIGKILL" in reports.read_text()
    wait_until(lambda: log.read_text().count("started as store1") == 3, "it has taken its signals")
    engine.process.send_signal(signal.SIGTERM)
    assert engine.wait(30) == 0
    assert "killed after" not in engine.errors.read_text()
    assert engine.leftovers() == []


def test_stop_command_ends_with_code_0(start: Start) -> None:
    engine = start()
    core = serve(engine)["core"]
    os.kill(core, signal.SIGUSR1)
    assert engine.wait(15) == 0
    assert engine.read()["reason"] == "stopped by command"
    assert "killed" not in engine.errors.read_text()
    assert engine.leftovers() == []


def test_supervisor_killed_leaves_nothing(start: Start) -> None:
    engine = start()
    os.kill(serve(engine)["stage1"], signal.SIGSTOP)
    engine.process.kill()
    engine.wait()
    wait_until(engine.nothing_left, "children leave by their lifelines, the gateway cleans up")


def test_core_killed_before_it_served_ends_the_engine(start: Start) -> None:
    engine = start(STANDIN_STATE="loading")
    os.kill(engine.find_processes(5)["core"], signal.SIGKILL)
    assert engine.wait(15) == 1
    assert engine.read()["reason"] == "core ended: killed by SIGKILL"
    assert engine.leftovers() == []


def test_a_core_that_cannot_go_on_ends_the_engine(start: Start) -> None:
    engine = start()
    os.kill(serve(engine)["core"], signal.SIGUSR2)
    assert engine.wait(15) == 1
    assert engine.read()["reason"] == "core ended: the core cannot go on"
    assert engine.leftovers() == []


def test_a_core_that_is_killed_is_restarted(start: Start, reports: Path) -> None:
    engine = start(STANDIN_RESTARTS="1")
    pids = serve(engine)
    os.kill(pids["core"], signal.SIGKILL)
    wait_until(lambda: engine.find_processes(5)["core"] != pids["core"], "another core")
    assert {**engine.pids, "core": 0} == {**pids, "core": 0}
    wait_until(lambda: f"exited|core|None|{pids['core']}|-9" in reports.read_text(), "the fact of its death")
    os.kill(pids["stage1"], signal.SIGKILL)
    wait_until(lambda: engine.find_processes(5)["stage1"] != pids["stage1"], "it has the orders of the new one", 10)
    engine.process.terminate()
    assert engine.wait(15) == 0
    assert engine.leftovers() == []


def test_a_gateway_that_ends_is_restarted_and_gets_all_facts_again(start: Start, reports: Path) -> None:
    engine = start()
    pids = serve(engine)
    noted = [f"exited|gateway|None|{pids['gateway']}|-9", f"exited|stage|1|{pids['stage1']}|-9"]
    os.kill(pids["stage1"], signal.SIGKILL)
    wait_until(lambda: noted[1] in reports.read_text(), "the fact of the death")
    before = len(reports.read_text())
    os.kill(pids["gateway"], signal.SIGKILL)
    wait_until(lambda: all(fact in reports.read_text()[before:] for fact in noted), "both facts, at the new one")
    assert engine.errors.read_text().count("gateway ended: killed by SIGKILL; it is restarted") == 1
    fresh = engine.find_processes(4)
    assert fresh["gateway"] != pids["gateway"]
    assert (fresh["core"], fresh["agent"], fresh["stage0"]) == (pids["core"], pids["agent"], pids["stage0"])
    record = engine.runtime / "ppconsole" / f"{engine.event['id']}.json"
    assert record.exists(), "consoles find the engine all the time"
    engine.process.terminate()
    assert engine.wait(15) == 0
    assert engine.leftovers() == []


@pytest.mark.parametrize("role", ["gateway", "core"])
def test_a_process_that_keeps_ending_ends_the_engine_with_that_reason(start: Start, role: str) -> None:
    engine = start()
    pids = serve(engine)
    for ends in range(1, MOST + 1):
        os.kill(pids[role], signal.SIGKILL)
        if ends < MOST:
            wait_until(lambda ends=ends: engine.errors.read_text().count("it is restarted") == ends, "it is noted")
            gone = pids[role]
            pids = wait_until(
                lambda gone=gone: (
                    found if (found := engine.find_processes(5))[role] != gone else None
                ), "another one",
            )  # fmt: skip
    assert engine.wait(15) == 1
    assert engine.read()["reason"] == f"{role} ended: killed by SIGKILL, and it is the end number 5 in 10 minutes"
    assert engine.leftovers() == []


def test_a_gateway_may_end_four_times_in_any_ten_minutes() -> None:
    deaths = ProcessDeaths()
    assert [deaths.note(at) for at in (0.0, 1.0, 2.0, 3.0)] == [0.0, BACKOFF_S, 2 * BACKOFF_S, 4 * BACKOFF_S]
    assert deaths.note(WITHIN_S) == 4 * BACKOFF_S, "the first one is long ago"
    assert deaths.note(WITHIN_S + 0.5) is None
    assert deaths.note(3 * WITHIN_S) == 0.0


def test_ends_that_the_supervisor_makes_are_no_facts(start: Start, reports: Path) -> None:
    engine = start()
    pid = serve(engine)["core"]
    os.kill(pid, signal.SIGUSR2)
    assert engine.wait(15) == 1
    noted = [line for line in reports.read_text().splitlines() if line.startswith("exited|")]
    assert noted == [f"exited|core|None|{pid}|1"], "stages end with their engine"


def test_stage_killed_while_serving_is_reported(start: Start, reports: Path) -> None:
    engine = start()
    pid = serve(engine)["stage1"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: f"stage|1|{pid}|-9|killed by SIGKILL" in reports.read_text(), "the report of the death")
    wait_until(lambda: f"exited|stage|1|{pid}|-9" in reports.read_text(), "the fact of the death")
    time.sleep(1.2)
    assert reports.read_text().count("exited|stage") == 1, "reports are repeated, facts are not"
    assert engine.process.poll() is None
    engine.process.terminate()
    assert engine.wait(15) == 0
    assert engine.leftovers() == []


def test_stage_is_started_anew_when_the_core_asks(start: Start, reports: Path) -> None:
    engine = start(STANDIN_RESTARTS="1")
    pids = serve(engine)
    os.kill(pids["stage1"], signal.SIGSTOP)
    os.kill(pids["stage1"], signal.SIGKILL)
    wait_until(lambda: engine.find_processes(5)["stage1"] != pids["stage1"], "another process of the stage", 10)
    fresh = engine.pids["stage1"]
    assert engine.pids["stage0"] == pids["stage0"]
    words = Path(f"/proc/{fresh}/cmdline").read_text().replace("\0", " ").split()
    assert words[words.index("--generation") + 1] == "2"
    wait_until(lambda: f"stage|1|{fresh}|None|" in reports.read_text(), "the report of the new one", 5)
    lines = reports.read_text().splitlines()
    assert lines.index(f"stage|1|{pids['stage1']}|-9|killed by SIGKILL") < lines.index(f"stage|1|{fresh}|None|")
    assert f"exited|stage|1|{pids['stage1']}|-9" in lines
    engine.process.terminate()
    assert engine.wait(15) == 0
    assert engine.leftovers() == []


def test_an_agent_that_ends_is_reported_and_restarted_but_not_for_ever(start: Start, reports: Path) -> None:
    engine = start()
    pid = serve(engine)["agent"]
    for agents in range(1, MOST_AGENTS + 1):
        os.kill(pid, signal.SIGKILL)
        death = f"agent|None|{pid}|-9|killed by SIGKILL"
        wait_until(lambda death=death: death in reports.read_text(), "the report of the death")
        assert engine.process.poll() is None
        if agents < MOST_AGENTS:
            pid = engine.find_processes(5)["agent"]
    # The line is written after the report of a death.
    wait_until(lambda: engine.errors.read_text().count("agent ended:") == MOST_AGENTS, "the line of the last death")
    assert engine.errors.read_text().count("agent ended: killed by SIGKILL; it is restarted") == MOST_AGENTS - 1
    assert engine.errors.read_text().count("agent ended: killed by SIGKILL") == MOST_AGENTS
    assert engine.process.poll() is None


def test_stopped_stage_cannot_hold_up_the_end(start: Start) -> None:
    engine = start()
    os.kill(serve(engine)["stage0"], signal.SIGSTOP)
    engine.process.terminate()
    assert engine.wait(15) == 0
    assert "killed after 2 s: stage 0" in engine.errors.read_text()
    assert engine.leftovers() == []


def test_stage_that_fails_while_loading_ends_the_engine(start: Start) -> None:
    engine = start(STANDIN_STATE="loading", STANDIN_FAILS="1:1")
    assert engine.wait(15) == 1
    assert engine.errors.read_text().splitlines()[-1] == "error: stage 1 ended: this stage has no weights"
    assert engine.leftovers() == []


def test_stage_that_does_not_fit_ends_with_code_8(start: Start) -> None:
    engine = start(STANDIN_STATE="loading", STANDIN_FAILS="0:8")
    assert engine.wait(15) == 8
    assert engine.errors.read_text().splitlines()[-1] == "error: this stage has no weights"


def test_core_without_room_ends_with_code_8(start: Start) -> None:
    engine = start(STANDIN_STATE="degraded")
    assert engine.wait(15) == 8
    assert engine.errors.read_text().splitlines()[-1] == "error: room for 3"
    assert engine.leftovers() == []


def test_name_in_use_is_refused_at_once(start: Start) -> None:
    first = start("same")
    second = start("same")
    assert second.wait(15) == 1
    assert second.event["event"] == "stopped"
    assert f"an engine named 'same' runs already (id {first.event['id']})" in second.errors.read_text()
    assert first.process.poll() is None


def test_of_four_that_start_at_once_one_gets_the_name(start: Start) -> None:
    with ThreadPoolExecutor(4) as pool:
        engines = list(pool.map(start, ["race"] * 4))
    assert sorted(engine.event["event"] for engine in engines) == ["started", "stopped", "stopped", "stopped"]
    assert [engine.wait(15) for engine in engines if engine.event["event"] == "stopped"] == [1, 1, 1]


def test_two_engines_do_not_disturb_each_other(start: Start) -> None:
    first, second = start("one"), start("two")
    serve(first)
    serve(second)
    first.process.terminate()
    assert first.wait(15) == 0
    assert second.process.poll() is None
    assert second._children(5) == second.pids
    assert {path.name for path in (second.runtime / "ppconsole").iterdir()} == {
        second.event["id"],
        f"{second.event['id']}.json",
    }
    assert second.ring_dir.is_dir()


def test_next_start_sweeps_what_nobody_could_remove(start: Start) -> None:
    dead = start("dead")
    pids = serve(dead)
    os.kill(pids["gateway"], signal.SIGSTOP)
    dead.process.kill()
    os.kill(pids["gateway"], signal.SIGKILL)
    wait_until(lambda: not any(line.startswith("pid") for line in dead.leftovers()), "processes leave")
    # Ring folders are in one place for all runtime folders: an engine of another test may sweep first.
    (dead.runtime / "ppconsole" / f"{dead.event['id']}.json").unlink(missing_ok=True)
    living = start("living")
    assert living.event["event"] == "started"
    assert not dead.run_dir.exists()
    assert not dead.ring_dir.exists()


def test_engine_in_another_runtime_folder_keeps_its_rings(start: Start, tmp_path: Path, reports: Path) -> None:
    elsewhere = Engine(tmp_path / "elsewhere", ["standins.supervisor", "twin", "2"], {"STANDIN_REPORTS": str(reports)})
    try:
        serve(elsewhere)
        here = start("twin")
        serve(here)
        assert elsewhere.ring_dir.is_dir()
        assert here.ring_dir.is_dir()
    finally:
        elsewhere.process.terminate()
        elsewhere.wait(15)
        elsewhere.end()


def test_long_runtime_folder_is_refused_with_the_limit(tmp_path: Path, reports: Path) -> None:
    runtime = tmp_path / ("long" * 25)
    engine = Engine(runtime, ["standins.supervisor", "long", "1"], {"STANDIN_REPORTS": str(reports)})
    assert engine.wait(15) == 1
    assert "a socket path at most 107; set XDG_RUNTIME_DIR" in engine.errors.read_text()
    assert engine.leftovers() == []
    engine.end()


def test_fork_server_that_cannot_load_ends_the_engine_with_its_error(start: Start) -> None:
    engine = start(STANDIN_STATE="loading", STANDIN_STAGE="standins.nothing")
    assert engine.wait(15) == 1
    said = engine.errors.read_text().splitlines()[-1]
    assert said.startswith("error: stage 0 ended: the fork server ended: ModuleNotFoundError")
    assert engine.leftovers() == []


def test_engine_goes_on_without_its_fork_server(start: Start) -> None:
    engine = start()
    serve(engine)
    server = next(pid for pid, words in command_lines(engine) if "ppengine.supervisor.launch.forkserver" in words)
    os.kill(server, signal.SIGKILL)
    wait_until(lambda: server not in dict(command_lines(engine)), "it is gone")
    engine.process.terminate()
    assert engine.wait(15) == 0
    assert engine.read() == {"event": "stopped", "code": 0, "reason": "SIGTERM received"}
    assert engine.leftovers() == []


def command_lines(engine: Engine) -> list[tuple[int, list[str]]]:
    """Return pid and words of every process that runs for this engine."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().decode().replace("\0", " ").split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if any(engine.event["id"] in word for word in words):
            found.append((int(path.name), words))
    return found
