"""`explain` and `doctor` where the gateway does not answer: from /proc, with a real process tree of stand-ins."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from ppconsole.cli import host_report
from ppconsole.link.engine_host import HostLook, HostProcess, processes_of
from ppengine.protocol.discovery import EngineRecord, process_start

TREE = r"""
import subprocess, sys, time
open("/proc/self/comm", "wb").write(b"/home/a\xe7\x94\xa8\xe6\x88\xb7\xe5\x90\x8d")
words = [["ppengine.gateway"], ["ppengine.core"], ["ppengine.agent"], ["ppengine.stage.worker", "--stage", "1"]]
code = "import time; time.sleep(60)"
children = [subprocess.Popen([sys.executable, "-c", code, *each]) for each in words]
children.append(subprocess.Popen(["sleep", "60"]))
print(*(child.pid for child in children), flush=True)
time.sleep(60)
"""


@pytest.fixture
def tree() -> Iterator[tuple[EngineRecord, list[int]]]:
    """A supervisor, whose name the kernel cuts inside a character, gateway, core, agent, stage, and none of ours."""
    command = [sys.executable, "-c", TREE, "ppengine.supervisor"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        pids = [int(word) for word in supervisor.stdout.readline().split()]
        try:
            yield record(supervisor.pid), pids
        finally:
            for pid in [*pids, supervisor.pid]:
                os.kill(pid, signal.SIGKILL)


def record(pid: int) -> EngineRecord:
    return EngineRecord(
        id="abcdef", name="n", epoch="x", pid=pid, pid_start=process_start(pid) or 0, state_endpoint="s",
        control_endpoint="c", bulk_endpoint="b", proto=1, model="m", pipeline_parallel_size=2, run_dir="/nowhere",
        started_wall=0.0,
    )  # fmt: skip


def until(done: object) -> None:
    end = time.monotonic() + 60
    while not done():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_stopped_gateway_is_named_and_the_engine_s_own_python_is_asked(tree: tuple[EngineRecord, list[int]]) -> None:
    engine, (gateway, core, agent, stage, _) = tree
    os.kill(gateway, signal.SIGSTOP)
    until(lambda: any(one.trouble for one in processes_of(engine)))
    found = processes_of(engine)
    assert [(one.name, one.pid) for one in found] == [
        ("supervisor", engine.pid), ("gateway", gateway), ("core", core), ("agent", agent), ("stage 1", stage)
    ]  # fmt: skip
    lines, document = host_report.explain(engine, "not attached within 3 s")
    assert lines[0].startswith("n (abcdef): not attached within 3 s; this is from /proc")
    stopped = f"the gateway (pid {gateway}) is stopped by a signal (state T)"
    assert lines[1] == f"{stopped}; try: kill -CONT {gateway}"
    assert document["fault"] and [one["summary"] for one in document["verdicts"]] == [stopped]
    assert any("the rings cannot be read" in line for line in lines), "/nowhere has no engine.json"


def test_http_processes_and_those_for_grammars_are_listed() -> None:
    child = (
        "import subprocess, sys, time; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)',"
    )
    code = f"{child} *sys.argv[2].split('+')]).pid, flush=True); time.sleep(600)"
    for words, name in (("ppengine.http+--role+http1", "http1"), ("ppengine.grammar", "grammar")):
        command = [sys.executable, "-c", code, "ppengine.supervisor", words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
            assert supervisor.stdout is not None
            pid = int(supervisor.stdout.readline())
            try:
                listed = [(one.name, one.pid) for one in processes_of(record(supervisor.pid))]
                assert listed == [("supervisor", supervisor.pid), (name, pid)]
            finally:
                os.kill(pid, signal.SIGKILL)
                supervisor.kill()


def test_a_stop_that_is_held_up_says_by_which_process(tree: tuple[EngineRecord, list[int]]) -> None:
    engine, _ = tree
    assert host_report.held_up(engine) == []
    os.kill(engine.pid, signal.SIGSTOP)
    stopped = f"the supervisor (pid {engine.pid}) is stopped by a signal (state T); try: kill -CONT {engine.pid}"
    until(lambda: host_report.held_up(engine) == [stopped])


def test_a_gateway_that_is_gone_or_sleeps_is_named(tree: tuple[EngineRecord, list[int]]) -> None:
    engine, (gateway, core, *_) = tree
    # On a crowded machine it may not have come to its sleep yet.
    until(lambda: all(one.state == "S" for one in processes_of(engine) if one.pid == gateway))
    first = host_report.explain(engine, "w")[1]["verdicts"][0]
    assert f"the gateway (pid {gateway}) does not answer: it waits in" in first["summary"]
    assert first["suggest"] == f"py-spy dump --pid {gateway}"
    os.kill(core, signal.SIGSTOP)
    os.kill(gateway, signal.SIGKILL)
    until(lambda: any(one.state == "Z" for one in processes_of(engine)) or len(processes_of(engine)) == 4)
    verdicts = [one["summary"] for one in host_report.explain(engine, "w")[1]["verdicts"]]
    assert "gateway" in verdicts[0] and any(f"the core (pid {core}) is stopped" in text for text in verdicts)


def test_a_busy_gateway_is_named_with_its_share() -> None:
    busy = HostProcess(7, "gateway", None, "R", "", "", 0.99)
    assert host_report._verdicts(HostLook([busy], []))[0]["summary"].endswith("does not answer: it uses 99% of a core")


def test_doctor_names_processes_that_are_missing_or_held() -> None:
    held = HostProcess(7, "gateway", None, "t", "gdb (pid 9)", "", 0.0)
    core = HostProcess(8, "core", None, "S", "", "", 0.0)
    assert host_report.troubles([held, core]) == [
        "gateway (pid 7) is held by a tracer, gdb (pid 9) (state t)", "agent: no such process"
    ]  # fmt: skip
