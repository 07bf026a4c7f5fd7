"""Every command against a gateway on real sockets."""

from __future__ import annotations

import copy
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cli_helpers import Cli
from fake_gateway import FakeGateway, sample_request, stuck_snapshot
from ppconsole.cli import effects, host_report
from ppconsole.model import memory_change
from ppconsole.view.commands import cli_line, shell_line
from ppengine.protocol import discovery, kept_files
from ppengine.protocol.control import Accepted, Command, Outcome, Refused
from ppengine.protocol.finished import FinishedInfo
from ppengine.protocol.kept_files import EngineEnd
from ppengine.protocol.quantiles import Quantiles
from ppengine.protocol.snapshot import Latency, Snapshot, Verdict
from ppengine.protocol.stage_info import StreamInfo
from ppengine.protocol.structured_outputs import StructuredOutputsParams
from ppengine.protocol.verbs import (
    Abort,
    Continue,
    Cordon,
    Drain,
    Pause,
    Preempt,
    Priority,
    Release,
    RestartStage,
    Resume,
    SetCheck,
    SetMemory,
    Stop,
    Submit,
    SwapIn,
    SwapOut,
    Verb,
)


def until(reached: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- finding the engine -------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["status", "watch", "events", "explain", "attach", "resume", "stacks", "logs"])
def test_no_engine_is_exit_3(cli: Cli, command: str) -> None:
    run = cli(command)
    assert run.code == 3
    assert run.err.startswith("error: no engine runs here; start one:")
    assert run.out == ""


def test_several_engines_are_exit_2_and_can_be_named(cli: Cli, fake: FakeGateway) -> None:
    with FakeGateway(name="other") as other:
        run = cli("status")
        assert run.code == 2
        assert "2 engines run here; name one with -e" in run.err
        assert cli("status", "-e", "other").code == 0
        assert cli("status", "-e", other.id).code == 0
        assert cli("status", "-e", "nobody").code == 3
        listed = cli("attach")
        assert listed.code == 2
        assert fake.id in listed.out
        assert other.id in listed.out


def test_the_variable_names_the_engine_and_the_flag_wins(
    cli: Cli, fake: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PPCONSOLE_ENGINE", "nobody")
    assert cli("status").code == 3
    assert cli("status", "-e", fake.id).code == 0


def test_the_group_names_the_engine_for_its_verb(cli: Cli, fake: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PPCONSOLE_ENGINE", "nobody")
    assert cli("-e", fake.id, "status").code == 0
    assert cli("--engine", fake.name, "resume").code == 0
    assert cli("-e", "nobody", "status", "-e", fake.id).code == 0
    assert cli("-e", "nobody", "attach").code == 3
    run = cli("-e", fake.id, "attach", "nobody")
    assert (run.code, f"two engines are named, nobody and -e {fake.id}" in run.err) == (2, True)
    run = cli("-e", fake.id, "serve", "tiny")
    assert (run.code, run.err.startswith("error: serve is about no running engine")) == (2, True)
    assert cli("-e", fake.id).code == cli("-e", fake.id, "frobnicate").code == 2


def test_a_gateway_that_does_not_answer_is_exit_5(cli: Cli, fake: FakeGateway) -> None:
    fake.deaf = True
    run = cli("status", "--timeout", "0.5")
    assert run.code == 5
    assert "not attached within 0.5 s" in run.err
    assert run.err.endswith(f"; to see why: ppconsole -e {fake.id} explain\n"), "the host may know"
    assert "to see why" not in cli("explain", "--timeout", "0.5").out


def test_attach_without_a_terminal_is_exit_2(cli: Cli, fake: FakeGateway) -> None:
    run = cli("attach")
    assert run.code == 2
    assert "attach needs a terminal" in run.err


def test_attach_as_json_is_the_list_to_choose_from(cli: Cli, fake: FakeGateway) -> None:
    run = cli("attach", "--json")
    assert (run.code, run.out) == (2, "")
    assert run.err == f"error: attach --json: a screen has no JSON; see ppconsole -e {fake.id} status --json\n"
    with FakeGateway(name="other"):
        run = cli("attach", "--json")
        assert (run.code, {row["name"] for row in run.rows[0]}) == (2, {"fake", "other"})
    fake.stop()
    run = cli("attach", "--json")
    assert (run.code, run.rows) == (3, [[]])


def test_ls_lists_engines_with_their_state(cli: Cli, fake: FakeGateway) -> None:
    run = cli("ls")
    assert run.code == 0
    assert fake.id in run.out
    assert "serving" in run.out
    assert cli("ls", "--json").rows[0][0]["state"] == "serving"
    fake.snapshot.verdicts = [Verdict(stage=1, cause="stopped", summary="stage 1 is stopped", since_s=9.0)]
    shown = cli("ls").out
    assert " stuck " in shown and "serving" not in shown, "as the banner has it"
    assert cli("ls", "--json").rows[0][0]["state"] == "serving", "scripts get the engine's own state"
    fake.stop()
    empty = cli("ls", "--json")
    assert (empty.code, empty.rows) == (0, [[]])


# --- watching -----------------------------------------------------------------------------------------------


def test_status_is_a_table_and_json_is_the_snapshot(cli: Cli, fake: FakeGateway) -> None:
    run = cli("status")
    assert run.code == 0
    assert "SERVING" in run.out
    assert "60/100/120*" in run.out
    assert "need 44, have 40" in run.out
    assert max(map(len, run.out.splitlines())) < 160
    snapshot = msgspec.json.decode(cli("status", "--json").out, type=Snapshot, strict=True)
    assert snapshot.engine.epoch == fake.epoch
    assert len(cli("status", "--requests", "1").out.splitlines()) < len(run.out.splitlines())


def test_nothing_from_outside_moves_the_cursor(cli: Cli, fake: FakeGateway) -> None:
    fake.snapshot.engine.message = "load\x1b[2J\x07ing"
    fake.snapshot.requests.append(sample_request("r\x1b]0;x\x07-1", owner="e\u202eve\r\n"))
    for command in ("status", "explain"):
        run = cli(command)
        assert not set("\x1b\x07\r\u202e") & set(run.out + run.err)
    fake.snapshot.engine.message = "a\x9b2J\u202eb\x1b[2J é"
    run = cli("status", "--json")
    assert run.out.rstrip("\n").isprintable()
    assert run.rows[0]["engine"]["message"] == fake.snapshot.engine.message


def test_ids_of_an_engine_move_no_cursor(cli: Cli, fake: FakeGateway) -> None:
    bad = "op\x1b]52;c;aGk=\x07-9"
    fake.answers[Pause] = lambda command: [Accepted(id=command.id, op=bad)]
    fake.answers[Submit] = lambda command: [Accepted(id=command.id, op=bad, request=bad)]
    assert cli("pause", "--no-wait").out == "pause accepted as op-9\n"
    assert cli("submit", "a", "--detach").out == "op-9\n"


def test_watch_thresholds_prints_an_alarm_and_runs_its_command(
    cli: Cli, fake: FakeGateway, folder, monkeypatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    out = folder / "out"
    (folder / "ppconsole").mkdir(exist_ok=True)
    (folder / "ppconsole" / "config.toml").write_text(
        f"""thresholds = [{{metric = "waiting", above = -1, for_s = 0, command = ["cp", "/dev/null", "{out}"]}}]"""
    )
    run = cli("watch", "--thresholds", "--json", "-n", "1")
    assert run.code == 0 and out.exists()
    assert [(row["state"], row["metric"], row["engine"]) for row in run.rows] == [("raised", "waiting", fake.record.id)]
    assert "thresholds[0]: cp ended with 0" in run.err
    run = cli("watch", "--thresholds", "-n", "1")
    assert "raised waiting is" in run.out


def test_watch_prints_snapshots_as_lines(cli: Cli, fake: FakeGateway) -> None:
    run = cli("watch", "--json", "-n", "3", "--interval", "0.05")
    assert run.code == 0
    assert [row["schema"] for row in run.rows] == [1, 1, 1]
    assert "SERVING" in cli("watch", "-n", "1").out


def test_events_past_and_followed(cli: Cli, fake: FakeGateway) -> None:
    fake.event("op.applied", "swap-out applied", by="eve")
    fake.event("stage.dead", "stage 1 is dead", stage=1)
    run = cli("events")
    assert run.code == 0
    assert "op.applied [eve] swap-out applied" in run.out
    assert [row["seq"] for row in cli("events", "--json", "--last", "1").rows] == [2]
    assert cli("events", "--last", "0").out == ""
    for _ in range(5):
        fake.event("request.finished", "r-1 stop, 3 tokens")
    fake.ring = 2
    assert [row["seq"] for row in cli("events", "--json", "--level", "warning", "--last", "1").rows] == [2]
    assert [row["seq"] for row in cli("events", "--json", "--last", "1").rows] == [7]
    assert cli("events", "--level", "error", "--last", "0").out == ""
    process = cli.process("events", "-f", "--json", "--level", "warning")
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["seq"] == 2
    fake.event("request.finished", "r-2 stop, 3 tokens")
    fake.event("op.failed", "third")
    assert json.loads(process.stdout.readline())["text"] == "third"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err


@pytest.mark.parametrize("words", [["watch", "--json"], ["events", "-f"], ["watch", "--thresholds"]])
def test_a_follower_says_that_it_waits_for_a_successor(
    cli: Cli, fake: FakeGateway, folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    settings = folder / "config" / "ppconsole"
    settings.mkdir(mode=0o700, parents=True)
    (settings / "config.toml").write_text('[on_incident]\ncommand = ["true"]\n')
    monkeypatch.setitem(cli.env, "XDG_CONFIG_HOME", str(settings.parent))
    process = cli.process(*words)
    until(lambda: fake.hellos != [] or process.poll() is not None)
    assert process.poll() is None, process.communicate()
    discovery.keep_record(fake.record)
    kept_files.write_end(fake.id, EngineEnd(wall=time.time(), reason="stopped by ann", clean=True))
    fake.stop()
    limit = threading.Timer(60, process.kill)
    limit.start()
    assert process.stderr is not None
    line = next((line for line in process.stderr if "ended" in line), "")
    limit.cancel()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert line.startswith("ended ") and line.endswith(": stopped by ann; waiting for an engine of its name\n")


def test_a_reader_that_leaves_is_no_error(cli: Cli, fake: FakeGateway) -> None:
    process = cli.process("watch", "--json", "--interval", "0.02")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    process.wait(60)
    process.stderr.close()
    assert err == ""


@pytest.mark.parametrize("command", ["ls", "status", "--version"])
def test_an_output_that_is_full_or_closed_is_no_crash(cli: Cli, fake: FakeGateway, command: str) -> None:
    python = shlex.join([sys.executable, "-m", "ppconsole", command])
    for target, code, says in (
        (">/dev/full", 1, "error: the output cannot be written: No space left on device\n"),
        (">&-", 0, ""),
    ):
        ran = subprocess.run(f"{python} {target}", shell=True, env=cli.env, text=True, stderr=subprocess.PIPE)
        assert (ran.returncode, ran.stderr) == (code, says), target


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["submit"], 0, "request "),
        (["store", "add", "x", "valkey", "-"], 2, "error: stdin has no URL"),
        (["attach"], 2, "error: attach needs a terminal"),
        (["status"], 0, ""),
    ],
)
def test_an_input_that_is_closed_is_an_empty_one(
    cli: Cli, fake: FakeGateway, words: list[str], code: int, says: str
) -> None:
    command = shlex.join([sys.executable, "-m", "ppconsole", *words])
    ran = subprocess.run(f"{command} <&-", shell=True, env=cli.env, text=True, capture_output=True)
    assert ran.returncode == code and ran.stderr.startswith(says), ran.stderr


def test_verbs_on_backends_refuse_options_of_requests(cli: Cli) -> None:
    for words in (["--if-rev", "3"], ["--override", "--reason", "y"]):
        run = cli("store", "pause", "x", *words)
        assert run.code == 2 and "a backend has neither a revision nor an owner" in run.err
    shown = cli("store", "pause", "--help").out
    assert "--reason" in shown and "--if-rev" not in shown and "--override" not in shown


def test_show_logs_and_stacks(cli: Cli, fake: FakeGateway) -> None:
    shown = cli("show", "r-8f2c")
    assert shown.code == 0
    assert "3 4 9" in shown.out
    assert "waiting > running" in shown.out
    assert "priority  0" in shown.out
    assert cli("show", "r-8f2c", "--json").rows[0]["block_table"] == [3, 4, 9]
    gone = cli("show", "r-none")
    assert gone.code == 7
    kept = "the engine keeps the newest 1,000 that ended"
    assert gone.err == f"error: no request 'r-none'; {kept} (NOT_FOUND)\n"
    assert cli("logs").out.splitlines() == ["stage 0: ready", "stage 1: ready"]
    assert cli("logs", "--stage", "1").out == "stage 1: ready\n"
    out = cli("stacks", "--stage", "1").out
    assert out.splitlines()[0] == "pids: stage 1 1001"
    assert "stage 1:\n    forward (runner.py:10)" in out
    assert "stages 0, 1:\n    forward (runner.py:10)" in cli("stacks").out
    assert cli("stacks", "--stage", "9").code == 7
    assert cli("stacks", "--json").rows[0]["stages"][0]["stage"] == 0


def test_streams_prints_the_ledger(cli: Cli, fake: FakeGateway) -> None:
    run = cli("streams")
    assert run.code == 0, run.err
    lines = run.out.splitlines()
    assert lines[0] == "stage 1: 1 findings, reported 0.0s ago"
    assert lines[2].split(maxsplit=7) == ["send>2", "send", "cpu", "send", "yes", "1", "2.5ms", "send of m7"]
    assert lines[4].split() == ["thread", "main", "thread", "send", "queue", "7"]
    assert "result of m7 (thread main) send of m7 (stream send>2)" in lines[6]
    assert lines[7] == "! stream_order: stage 1: main rewrites send>2 buffer 0 while send>2 may still read it"
    assert cli("streams", "--json").rows[0]["stages"][0]["buffers"][0]["generation"] == 7


def test_streams_begins_with_how_far_devices_are(cli: Cli, fake: FakeGateway) -> None:
    at_work = StreamInfo(
        name="compute", owner="main", op="device m8", age_ms=6000.0, pending=1, on_device=True, begun_step=8,
        done_step=7,
    )  # fmt: skip
    idle = StreamInfo(name="upload", owner="main", pending=0, on_device=True)
    fake.snapshot.stages[1].streams = [*fake.snapshot.stages[1].streams, at_work, idle]
    head, first, second, empty, ledger = cli("streams").out.splitlines()[:5]
    assert head.split() == ["STG", "STREAM", "BEGUN", "DONE", "PEND", "AGE", "WAITS-FOR"]
    assert first.split() == ["1", "compute", "m8", "m7", "1", "6.0s"]
    assert second.split()[:5] == ["1", "upload", "-", "-", "0"]
    assert empty == "" and ledger.startswith("stage 1: 1 findings, reported ")
    assert cli("streams", "--stage", "0").out.splitlines()[0].startswith("stage ")


def test_explain_is_10_for_a_fault_and_0_for_none(cli: Cli, fake: FakeGateway) -> None:
    fine = cli("explain")
    assert fine.code == 0
    assert fine.out.startswith("no fault: serving") and "no samples" not in fine.out
    calm = copy.deepcopy(fake.snapshot)
    for stage in fake.snapshot.stages:
        stage.sample_age_ms = 12_000.0
    blind = cli("explain")
    assert blind.code == 0 and "no samples of stages 0, 1 for 12s; the agent may hang" in blind.out
    fake.snapshot = calm
    fake.snapshot = msgspec.structs.replace(stuck_snapshot(), engine=fake.snapshot.engine)
    run = cli("explain")
    assert run.code == 10
    assert run.out.splitlines()[0].startswith("STAGE 2 stopped 6.2s: stage 2 was stopped by a signal")
    assert "/proc/1002/stat: state T" in run.out
    assert "try: ppconsole continue 2" in run.out
    assert cli("explain", "--json").rows[0]["fault"] is True


# --- effects ------------------------------------------------------------------------------------------------

VERBS = [
    (["abort", "r-8f2c"], Abort(request="r-8f2c")),
    (["preempt", "r-8f2c"], Preempt(request="r-8f2c")),
    (["preempt", "r-8f2c", "--mode", "swap", "--hold"], Preempt(request="r-8f2c", mode="swap", hold=True)),
    (["swap-out", "r-8f2c"], SwapOut(request="r-8f2c")),
    (["swap-out", "r-8f2c", "--no-hold"], SwapOut(request="r-8f2c", hold=False)),
    (["swap-in", "r-77d0"], SwapIn(request="r-77d0")),
    (["release", "r-77d0"], Release(request="r-77d0")),
    (["priority", "r-77d0", "5"], Priority(request="r-77d0", priority=5)),
    (["priority", "r-77d0", "-5"], Priority(request="r-77d0", priority=-5)),
    (["set-memory", "0.5"], SetMemory(utilization=0.5)),
    (["pause"], Pause()),
    (["pause", "--mode", "keep"], Pause(mode="keep")),
    (["resume"], Resume()),
    (["drain"], Drain()),
    (["drain", "--undo"], Drain(undo=True)),
    (["stop"], Stop()),
    (["continue", "1"], Continue(stage=1)),
    (["check", "ledger", "on"], SetCheck(check="ledger")),
    (["check", "strict", "off"], SetCheck(check="strict", mode="off")),
    (["check", "shadow", "on", "--share", "0.05"], SetCheck(check="shadow", share=0.05)),
    (["restart-stage", "1"], RestartStage(stage=1)),
    (["cordon", "--stage", "1"], Cordon(stage=1)),
    (["cordon", "--stage", "1", "--undo"], Cordon(stage=1, undo=True)),
]


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeGateway], None]:
    """Return a function after which a fake gateway, whose process is that of the test, has ended with a command."""
    return lambda fake: monkeypatch.setattr(discovery, "alive", lambda record: not fake.commands)


def test_a_stop_that_takes_too_long_is_reported(cli: Cli, fake: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effects, "STOP_S", 0.2)
    monkeypatch.setattr(host_report, "held_up", lambda record: ["the supervisor is stopped"])
    for options, seconds in (([], 0.2), (["--timeout", "0.9"], 0.9)):
        run = cli("stop", *options)
        assert run.code == 5 and run.out.startswith("stop applied")
        text = f"error: engine {fake.id} is stopping and has not ended in {seconds} s; the supervisor is stopped\n"
        assert run.err.endswith(text)


@pytest.mark.parametrize(("arguments", "verb"), VERBS, ids=[" ".join(arguments) for arguments, _ in VERBS])
def test_effect(
    cli: Cli, fake: FakeGateway, ends: Callable[[FakeGateway], None], arguments: list[str], verb: object
) -> None:
    ends(fake)
    run = cli(*arguments, "--reason", "a test")
    assert run.code == 0, run.err
    assert run.out == f"{arguments[0]} applied at step 18413" + (
        f" (revision 8): {arguments[0]} applied\n" if arguments[0] == "set-memory" else f": {arguments[0]} applied\n"
    )
    assert f"{arguments[0]} accepted" in run.err
    assert "deferred: in flight at stage 1" in run.err
    assert fake.commands[-1].verb == verb
    assert fake.commands[-1].reason == "a test"


@pytest.mark.parametrize("verb", [verb for _, verb in VERBS], ids=[" ".join(arguments) for arguments, _ in VERBS])
def test_the_line_that_the_console_copies_does_the_same(
    cli: Cli, ends: Callable[[FakeGateway], None], verb: Verb
) -> None:
    with FakeGateway(name="rv 1") as fake:
        ends(fake)
        program, *words = shlex.split(cli_line(verb, fake.name))
        run = cli(*words)
        assert (program, run.code) == ("ppconsole", 0), run.err
        assert fake.commands[-1].verb == verb


@pytest.mark.parametrize("words", ["show r-8f2c", "status --json", "stacks --stage 1", "logs --stage 1", "streams"])
def test_the_line_that_shows_what_is_on_the_screen_runs(cli: Cli, fake: FakeGateway, words: str) -> None:
    run = cli(*shlex.split(shell_line(words.split(), fake.name))[1:])
    assert run.code == 0, run.err


@pytest.mark.parametrize("arguments", [arguments for arguments, _ in VERBS if arguments[0] not in ("stop",)])
def test_effect_dry_run(cli: Cli, fake: FakeGateway, arguments: list[str]) -> None:
    before = msgspec.json.encode(fake.snapshot.requests)
    run = cli(*arguments, "--dry-run")
    assert run.code == 0
    assert run.out.splitlines()[1:] == [f"  would {arguments[0]}", "  moves 3 blocks"]
    assert fake.commands[-1].dry_run
    assert msgspec.json.encode(fake.snapshot.requests) == before
    assert cli(*arguments, "--dry-run", "--json").rows[0]["figures"] == {"move": 3.0}


def test_no_wait_returns_when_accepted(cli: Cli, fake: FakeGateway) -> None:
    fake.answers[Pause] = lambda command: [Accepted(id=command.id, op="op-9")]
    run = cli("pause", "--no-wait")
    assert (run.code, run.out) == (0, "pause accepted as op-9\n")
    assert cli("pause", "--no-wait", "--json").rows[0]["op"] == "op-9"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("DENIED", 4), ("EXPIRED", 5), ("CONFLICT", 6), ("STALE_EPOCH", 6), ("NOT_FOUND", 7), ("DOES_NOT_FIT", 8),
        ("INVALID", 2), ("NO_CORE", 1), ("FAILED", 1), ("BUSY", 1), ("UNSUPPORTED", 1), ("GONE", 7), ("PROTOCOL", 1),
    ],
)  # fmt: skip
def test_refusals_have_their_exit_codes(cli: Cli, fake: FakeGateway, code: str, expected: int) -> None:
    fake.answers[Resume] = lambda command: [Refused(id=command.id, code=code, text="3 blocks; 4 would do")]  # type: ignore[arg-type]
    run = cli("resume")
    assert (run.code, run.out) == (expected, "")
    assert run.err == f"error: resume refused: 3 blocks; 4 would do ({code})\n"
    assert cli("resume", "--json").rows[0]["code"] == code


def test_a_change_of_memory_is_of_what_was_seen(cli: Cli, fake: FakeGateway) -> None:
    seen = memory_change.utilization("-20%", fake.snapshot)
    run = cli("set-memory", "-20%")
    assert run.code == 0 and f"-20%: utilization 0.9 -> {seen:g}, revision 7\n" in run.err
    (command,) = [each for each in fake.commands if isinstance(each.verb, SetMemory)]
    assert command.verb == SetMemory(utilization=seen) and command.if_rev == 7, "another change is not added to it"
    cli("set-memory", "+1MiB", "--if-rev", "3")
    assert fake.commands[-1].if_rev == 3


def test_refusals_of_real_conditions(cli: Cli, fake: FakeGateway) -> None:
    assert cli("abort", "r-none").code == 7
    assert cli("abort", "r-8f2c", "--if-rev", "99").code == 6
    assert cli("set-memory", "0.01").code == 8
    for wrong in ("nan", "inf"):
        run = cli("set-memory", wrong)
        assert run.code == 2
        assert "it must be above 0 and at most 1" in run.err
    for wrong in ("much", "20%", "-2GB", "-100%", "+900%"):
        assert cli("set-memory", wrong).code == 2, wrong
    assert cli("preempt", "r-8f2c", "--mode", "later").code == 2
    run = cli("frobnicate")
    assert (run.code, run.err) == (2, "error: No such command 'frobnicate'. See: ppconsole --help\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["stauts"], "No such command 'stauts'; did you mean status? See: ppconsole --help"),
        (["store", "lst"], "No such command 'lst'. Did you mean 'ls'? See: ppconsole store --help"),
        (["logs", "--stage", "one"], "'--stage': 'one' is no whole number, 0 or more. See: ppconsole logs --help"),
        (["logs", "--lines", "0"], "'--lines': 0 is out of range; it must be 1 to 10000. See: ppconsole logs --help"),
        (["status", "--timeout", "0"], "0.0 is out of range; it must be above 0 and at most 1000000. See: ppcon"),
        (["check", "finite", "maybe"], "'maybe' is not one of 'on', 'off'. See: ppconsole check --help"),
        (
            ["check"],
            "'{ledger|strict|finite|shadow|checksum}'. Choose from: ledger, strict, finite, shadow, checksum. Se",
        ),
    ],
)
def test_a_wrong_word_is_answered_in_one_line_with_what_would_be_right(cli: Cli, words: list[str], says: str) -> None:
    run = cli(*words)
    assert run.code == 2 and says in run.err and run.err.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["store"], ["key"], ["context"]])
def test_a_command_without_its_words_prints_its_help_line_by_line(cli: Cli, words: list[str]) -> None:
    run = cli(*words)
    assert run.code == 2 and run.err.startswith("Usage: ppconsole")
    assert "\nCommands:\n" in run.err and max(map(len, run.err.splitlines())) <= 80


@pytest.mark.parametrize(("state", "expected"), [("failed", 1), ("superseded", 6)])
def test_ends_that_are_not_applied(cli: Cli, fake: FakeGateway, state: str, expected: int) -> None:
    def end(command: Command) -> list[Accepted | Outcome]:
        return [Outcome(id=command.id, op="op-1", state=state, text="by revision 9")]  # type: ignore[arg-type]

    fake.answers[SetMemory] = end  # type: ignore[assignment]
    run = cli("set-memory", "0.5")
    assert (run.code, run.out) == (expected, f"set-memory {state}: by revision 9\n")


def test_unknown_outcome_says_that_it_may_have_happened(cli: Cli, fake: FakeGateway) -> None:
    fake.answers[Abort] = lambda command: []
    run = cli("abort", "r-8f2c", "--timeout", "0.5")
    assert run.code == 5
    assert "unknown outcome: sent, but an answer did not come within 0.5 s" in run.err
    assert "it may or may not have happened: see ppconsole show r-8f2c" in run.err


def test_finished_lists_the_ended_requests_and_filters_them(cli: Cli, fake: FakeGateway) -> None:
    run = cli("finished")
    assert (run.code, run.err) == (0, "no request has ended\n")
    fields = {"owner": "alice", "wall": 1e9, "prompt_tokens": 4, "output_tokens": 90, "took_s": 3.0}
    fake.finished = [
        FinishedInfo(
            id="r-3", ended_s=1.0, reason="length", queue_s=0.02, ttft_s=0.2, itl_ms=22.0, itl_p99_ms=61.0, **fields
        ),
        FinishedInfo(id="r-2", ended_s=60.0, reason="abort", by="eve", **fields),
        FinishedInfo(id="r-1", ended_s=900.0, reason="stop", queue_s=2.0, ttft_s=2.5, itl_ms=50.0, **fields),
    ]
    run = cli("finished")
    assert [line.split()[0] for line in run.out.splitlines()] == ["REQ", "r-3", "r-2", "r-1"]
    assert run.out.splitlines()[2].rstrip().endswith(" abort by eve")
    assert run.out.splitlines()[1].split() == [
        "r-3",
        "alice",
        "1.0s",
        "3.0s",
        "4",
        "90",
        "20ms",
        "200ms",
        "22ms",
        "61ms",
        "0",
        "length",
    ]
    assert run.out.splitlines()[2].split()[6:10] == ["-", "-", "-", "-"]
    for wanted, ids in (("ttft>1s", ["r-1"]), ("!reason:abort", ["r-3", "r-1"]), ("ended<5m itl<=22ms", ["r-3"])):
        assert [row["id"] for row in cli("finished", "--json", "--filter", wanted).rows] == ids
    assert "... and 2 more" in cli("finished", "--last", "1").out
    assert cli("finished", "--filter", "blk>3").code == 2
    assert "none of 3 ended requests matches r-9" in cli("finished", "--filter", "r-9").err


def test_status_has_the_latencies(cli: Cli, fake: FakeGateway) -> None:
    assert "LATENCY" not in cli("status").out
    times = Quantiles(p50=0.12, p90=0.4, p99=1.5, count=9)
    fake.snapshot.latency = Latency(ttft_s=times, itl_ms=Quantiles(p50=22.0, p90=30.0, p99=41.0, count=99))
    assert "LATENCY p50 p90 p99 of 5 min: ttft 120ms 400ms 1.5s | itl 22ms 30ms 41ms\n" in cli("status").out


# --- submit and follow --------------------------------------------------------------------------------------


def test_submit_streams_text_and_counts(cli: Cli, fake: FakeGateway) -> None:
    run = cli("submit", "Once", "--max-tokens", "20", "--temperature", "0", "--stop", "END", "--seed", "3", "-n", "1")
    assert run.code == 0, run.err
    assert run.out == "Once upon a time there was a fox.\n"
    assert "4 in, 8 out in" in run.err
    verb = fake.commands[0].verb
    assert isinstance(verb, Submit)
    assert verb.prompt == "Once"
    assert (verb.sampling.max_tokens, verb.sampling.stop, verb.sampling.seed) == (20, ["END"], 3)
    assert not verb.abort_on_detach
    assert verb.priority == 0


def test_clients_that_wait_and_go_are_no_consoles_and_those_that_watch_are(cli: Cli, fake: FakeGateway) -> None:
    def passing(*words: str) -> list[bool]:
        fake.hellos.clear()
        assert cli(*words).code == 0
        return [hello.passing for hello in fake.hellos]

    assert passing("submit", "Once") == passing("submit", "Once", "--detach") == passing("pause") == [True]
    request = cli("submit", "Once", "--detach").out.strip()
    assert passing("follow", request) == [True]
    assert passing("watch", "--count", "1") == [False]


def test_submit_of_a_request_that_is_lost_with_the_core_fails(cli: Cli, fake: FakeGateway) -> None:
    fake.loses = True
    run = cli("submit", "Once", "--max-tokens", "20")
    assert run.code == 1 and run.out == "Once upon a time there was a fox.\n"
    assert run.err.splitlines()[-1].endswith("is lost: the event request.lost has the reason")


def test_submit_with_a_priority(cli: Cli, fake: FakeGateway) -> None:
    assert cli("submit", "Once", "--priority", "-3").code == 0
    assert fake.commands[0].verb == Submit(prompt="Once", priority=-3)
    run = cli("priority", "r-8f2c", str(2**40))
    assert (run.code, run.err) == (2, f"error: priority is {2**40}; it must be -2147483647 to 2147483647\n")


def test_submit_with_a_form(cli: Cli, fake: FakeGateway, tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "object"}')
    assert cli("submit", "Once", "--json-schema", str(file)).code == 0
    assert cli("submit", "Once", "--regex", "a+", "--seed", "2").code == 0
    forms = [command.verb.sampling.structured_outputs for command in fake.commands]
    assert forms == [StructuredOutputsParams(json='{"type": "object"}'), StructuredOutputsParams(regex="a+")]
    assert fake.commands[1].verb.sampling.seed == 2
    run = cli("submit", "Once", "--json-schema", str(file), "--regex", "a")
    assert run.code == 2 and "json and regex are given" in run.err
    file.write_text("{")
    assert "json is no JSON" in cli("submit", "Once", "--json-schema", str(file)).err


def test_submit_json_lines(cli: Cli, fake: FakeGateway) -> None:
    run = cli("submit", "Once", "--json", "--stop-token-ids", "2,3")
    assert run.code == 0
    first, *parts = run.rows
    assert first["id"].startswith("r-")
    assert "".join(part["text"] for part in parts) == "Once upon a time there was a fox."
    assert [token for part in parts for token in part["token_ids"]] == list(range(8))
    assert parts[-1]["finish_reason"] == "stop"
    assert all("finish_reason" not in part for part in parts[:-1])


def test_detach_and_follow(cli: Cli, fake: FakeGateway) -> None:
    run = cli("submit", "Once", "--detach")
    assert run.code == 0
    request = run.out.strip()
    followed = cli("follow", request)
    assert (followed.code, followed.out) == (0, "Once upon a time there was a fox.\n")
    assert cli("submit", "Once", "--no-wait").out.startswith("r-")
    assert cli("follow", "r-none").code == 7


def test_submit_reads_stdin(cli: Cli, fake: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("From a pipe"))
    assert cli("submit", "-", "--detach").code == 0
    verb = fake.commands[0].verb
    assert isinstance(verb, Submit)
    assert verb.prompt == "From a pipe"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["submit", b"a\x9b"], "prompt is not UTF-8 at offset 1: byte 0x9b"),
        (["abort", b"r-\x9b"], "request is not UTF-8 at offset 2: byte 0x9b"),
        (["pause", "--reason", b"\x9b"], "reason is not UTF-8 at offset 0: byte 0x9b"),
        (["show", b"\x9b"], "request is not UTF-8 at offset 0: byte 0x9b"),
    ],
)
def test_words_that_are_not_utf8_are_a_usage_error(
    cli: Cli, fake: FakeGateway, words: list[str | bytes], says: str
) -> None:
    run = cli(*map(os.fsdecode, words))
    assert (run.code, run.err) == (2, f"error: {says}; nothing was sent\n")
    assert fake.commands == []


@pytest.mark.parametrize(("errors", "where"), [("strict", "stdin"), ("surrogateescape", "prompt")])
def test_input_that_is_not_utf8_is_a_usage_error(
    cli: Cli, fake: FakeGateway, monkeypatch: pytest.MonkeyPatch, errors: str, where: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\x9bz"), encoding="utf-8", errors=errors))
    run = cli("submit", "-")
    assert run.code == 2
    assert run.err.startswith(f"error: {where} is not UTF-8 at offset 1: byte 0x9b")
    assert fake.commands == []


def test_submit_that_cannot_be(cli: Cli, fake: FakeGateway) -> None:
    run = cli("submit", "x" * 2000)
    assert run.code == 8
    assert run.err == "error: submit refused: 2000 tokens and 16 outputs; the longest sequence is 1024 (DOES_NOT_FIT)\n"
    for arguments, text in (
        (["--top-p", "0"], "top_p is 0.0; it must be above 0 and at most 1"),
        (["--max-tokens", "0"], "max_tokens is 0; it must be at least 1"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--stop-token-ids", "a"], "--stop-token-ids is 'a'"),
    ):
        run = cli("submit", "x", *arguments)
        assert run.code == 2
        assert text in run.err
    assert len(fake.commands) == 1


def test_a_dry_run_prints_each_line_of_its_plan_once(cli: Cli, fake: FakeGateway) -> None:
    lines = ["KV 9 -> 3 blocks (-66.7 %, -1.5 MiB)", "mode swap: 1 request, 4 blocks (1.0 MiB) go to the host"]
    fake.answers[SetMemory] = lambda command: [
        Outcome(id=command.id, op="", state="planned", text=lines[0], plan=lines, figures={"swap": 4.0}, revision=7)
    ]
    run = cli("set-memory", "0.5", "--dry-run")
    assert (run.code, run.out) == (0, f"set-memory planned (revision 7): {lines[0]}\n  {lines[1]}\n")


def test_submit_dry_run(cli: Cli, fake: FakeGateway) -> None:
    run = cli("submit", "x", "--dry-run")
    assert (run.code, run.out) == (0, "submit planned: fits\n  4 tokens, 2 blocks\n")


def test_ctrl_c_aborts_the_request(cli: Cli, fake: FakeGateway) -> None:
    fake.word_s = 30.0
    process = cli.process("submit", "Once")
    until(lambda: any(isinstance(command.verb, Submit) for command in fake.commands))
    assert process.stderr is not None
    assert process.stderr.readline().startswith("request r-")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "abort applied" in err
    assert isinstance(fake.commands[-1].verb, Abort)


def test_ctrl_c_aborts_a_request_that_is_not_accepted_yet(cli: Cli, fake: FakeGateway) -> None:
    """As it does while the engine makes its tokens: it would run later, and nothing would read it."""
    asked, go_on = threading.Event(), threading.Event()

    def late(command: Command) -> list[Any]:
        asked.set()
        assert go_on.wait(60)
        return fake._act(command)

    fake.word_s = 30.0
    fake.answers[Submit] = late
    process = cli.process("submit", "Once")
    assert asked.wait(60)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert process.stderr.readline() == "it is not accepted yet, and is aborted then; Ctrl-C leaves it\n"
    go_on.set()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.startswith("aborting r-") and "abort applied" in err
    assert isinstance(fake.commands[-1].verb, Abort)


def test_a_lost_link_does_not_end_a_stream(cli: Cli, fake: FakeGateway) -> None:
    fake.words = ["word "] * 30
    fake.word_s = 0.1
    process = cli.process("submit", "Once", "--max-tokens", "30")
    assert process.stdout is not None
    assert process.stdout.read(5) == "word "
    epoch = fake.epoch
    fake.stop()
    fake.start(epoch)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert "word " + out == "word " * 30 + "\n"
    assert not any(isinstance(command.verb, Abort) for command in fake.commands)


@pytest.fixture
def mortal(folder: Path) -> Iterator[tuple[FakeGateway, subprocess.Popen[bytes]]]:
    """A gateway of an engine whose supervisor can be ended."""
    supervisor = subprocess.Popen(["sleep", "600"])
    gateway = FakeGateway()
    gateway.pid = supervisor.pid
    with gateway:
        yield gateway, supervisor
    supervisor.kill()
    supervisor.wait()


@pytest.mark.parametrize("link", ["closed", "open"])
def test_a_stream_ends_with_its_engine(
    cli: Cli, mortal: tuple[FakeGateway, subprocess.Popen[bytes]], link: str
) -> None:
    fake, supervisor = mortal
    fake.words, fake.word_s = ["word "] * 300, 0.1
    process = cli.process("submit", "Once", "--max-tokens", "300")
    assert process.stdout is not None
    assert process.stdout.read(5) == "word "
    fake.coreless = link == "open"
    supervisor.kill()
    supervisor.wait()
    if link == "closed":
        fake.stop()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 3, err
    last = err.splitlines()[-1]
    assert re.fullmatch(rf"error: engine fake \({fake.id}\) is gone, and r-\w+ with it: \d+ tokens came", last), err


def test_a_stream_waits_while_the_core_is_away(cli: Cli, fake: FakeGateway) -> None:
    fake.overdue = 3
    run = cli("submit", "Once")
    assert run.code == 0 and run.out, run.err
    assert run.err.count("the core gave no answer in time; the stream waits") == 1 and fake.overdue == 0
    fake.coreless = True
    run = cli("submit", "Once", "--timeout", "1")
    assert run.code == 5
    assert run.err.count("the engine core has ended: killed by SIGKILL; the stream waits") == 1


def test_submit_timeout_leaves_the_request(cli: Cli, fake: FakeGateway) -> None:
    fake.word_s = 30.0
    run = cli("submit", "Once", "--timeout", "4")  # A crowded machine attaches within a second or two.
    assert run.code == 5
    assert "it goes on: ppconsole follow r-" in run.err
    assert not any(isinstance(command.verb, Abort) for command in fake.commands)


# --- recordings and the rest --------------------------------------------------------------------------------


def test_record_and_replay(cli: Cli, fake: FakeGateway, tmp_path: Path) -> None:
    path = tmp_path / "a.ppr"
    fake.event("stage.dead", "stage 1 is dead", stage=1)
    run = cli("record", str(path), "--seconds", "0.5", "--json")
    assert (run.code, run.rows[0]["file"], run.rows[0]["engine"]) == (0, str(path), fake.id)
    assert run.rows[0]["bytes"] == path.stat().st_size
    again = cli("record", str(path))
    assert again.code == 1
    assert "exists; name a new file" in again.err
    fake.stop()
    run = cli("replay", str(path))
    assert run.code == 0
    assert "stage 1 is dead" in run.out
    assert "SERVING" in run.out
    assert {key for row in cli("replay", str(path), "--json").rows for key in row} == {"link", "snapshot", "event"}
    assert cli("replay", str(path), "--timeout", "1e-9").code == 5
    assert "sample" in cli("replay", "--sample", "list", "--json").rows[0]


def test_replay_of_what_is_no_recording(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "b.ppr"
    path.write_text("hello")
    assert cli("replay", str(path)).code == 1
    assert cli("replay").code == 2
    assert cli("replay", str(path), "--sample").code == 2
    assert cli("replay", str(tmp_path / "none")).code == 1


@pytest.mark.parametrize("command", ["record", "export"])
def test_a_file_in_a_missing_folder_is_refused_with_that_folder(cli: Cli, tmp_path: Path, command: str) -> None:
    run = cli(command, str(tmp_path / "reprots" / "today" / "a.zip"))
    assert run.code == 1 and not (tmp_path / "reprots").exists()
    assert run.err.endswith(f"a.zip cannot be written: there is no folder {tmp_path / 'reprots'}\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_record_ends_well_on_a_signal(cli: Cli, fake: FakeGateway, tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "c.ppr"
    process = cli.process("record", str(path))
    until(lambda: path.exists() and path.stat().st_size > 2000)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "updates" in err and cli("replay", str(path)).code == 0


@pytest.mark.parametrize("arguments", [["serve", "tiny"], ["demo", "--headless"], ["bench", "tiny"]])
def test_without_the_engine_extra_it_says_what_to_install(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr("ppconsole.cli.launch.NEEDS", "a_module_that_is_not_there")
    run = cli(*arguments)
    assert run.code == 1
    assert run.err.endswith("pip install 'ppconsole[engine]'\n")


def test_doctor(cli: Cli, fake: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    run = cli("doctor")
    assert run.code == 1, "the stand-in has a gateway's sockets and no process of an engine"
    assert f"({fake.id}): gateway: no such process; core: no such process; agent: no such process" in run.out
    monkeypatch.setattr("ppconsole.cli.host_report.troubles", lambda processes: [])
    run = cli("doctor")
    assert run.code == 0
    assert f"({fake.id}): it answers" in run.out
    assert {row["what"] for row in cli("doctor", "--json").rows[0]} >= {"python", "folder", "stacks", "cores", "memory"}


def test_doctor_says_what_a_missing_compiler_costs(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ppconsole.cli import doctor
    from ppengine.http import event_library

    assert doctor.COMPILERS == event_library.COMPILERS
    compiler = tmp_path / doctor.COMPILERS[-1]
    compiler.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert f"ok   compiler     {compiler}\n" in cli("doctor").out
    compiler.unlink()
    assert "note compiler     none (cc, gcc, clang): a token over HTTP takes twice the CPU" in cli("doctor").out
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    assert "compiler" not in cli("doctor").out, "a console alone needs none"


def test_doctor_gives_up(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ppconsole.cli.doctor._cores", lambda: time.sleep(60))
    begun = time.monotonic()
    run = cli("doctor", "--timeout", "0.2")
    assert (run.code, run.out, run.err) == (5, "", "error: not done within 0.2 s\n")
    assert time.monotonic() - begun < 30


# --- a child engine -----------------------------------------------------------------------------------------

STAND_IN = r"""
import json, os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
signal.signal(signal.SIGINT, lambda *_: os._exit(0))
line = int(sys.argv[sys.argv.index("--lifeline") + 1])
print("a message for humans", file=sys.stderr, flush=True)
print("a library prints this", flush=True)
os.write(1, b'{"a library": "prints \xff"}\n')
started = {"event": "started", "id": "abc", "name": "stand-in", "pid": os.getpid(), "argv": sys.argv[1:]}
print(json.dumps(started), flush=True)
while os.read(line, 1):
    pass
open(os.environ["LEFT"], "w").write("left")
"""


@pytest.fixture
def stand_in(folder: Path, cli: Cli) -> Path:
    """A supervisor that announces itself and waits; LEFT is written when its lifeline closes."""
    package = folder / "ppengine"
    (package / "supervisor").mkdir(parents=True)
    # The other packages are the real ones: the console reads the verb table of the protocol.
    extend = "from pkgutil import extend_path\n__path__ = extend_path(__path__, __name__)\n"
    (package / "__init__.py").write_text(extend)
    (package / "supervisor" / "__init__.py").touch()
    (package / "supervisor" / "__main__.py").write_text(STAND_IN)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    cli.env |= {"PYTHONPATH": path, "LEFT": str(folder / "left")}
    return folder / "left"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 7)])
def test_serve_relays_and_passes_signals_on(cli: Cli, stand_in: Path, number: signal.Signals, code: int) -> None:
    process = cli.process("serve", "tiny", "--json", "--timeout", "7")
    assert process.stdout is not None
    notice = json.loads(process.stdout.readline())
    assert (notice["name"], notice["argv"][:2]) == ("stand-in", ["tiny", "--within=7.0"])
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert "a message for humans" in err


def test_serve_says_that_its_supervisor_was_killed(cli: Cli, stand_in: Path) -> None:
    process = cli.process("serve", "tiny", "--json")
    assert process.stdout is not None
    os.kill(json.loads(process.stdout.readline())["pid"], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    says = "error: the engine's supervisor was killed by SIGKILL, and its child processes end with it"
    assert err.splitlines()[-1] == says


def test_serve_says_why_its_supervisor_was_killed(cli: Cli, stand_in: Path) -> None:
    """The gateway notes it: at this time it alone knows."""
    process = cli.process("serve", "tiny", "--json")
    assert process.stdout is not None
    started = json.loads(process.stdout.readline())
    folder = kept_files.engine_folder(started["id"])
    folder.mkdir(parents=True)
    os.kill(started["pid"], signal.SIGKILL)
    reason = "its supervisor (pid 7) was killed by SIGKILL: the out-of-memory killer of the host, 9 MiB resident"
    kept_files.write_end(started["id"], EngineEnd(wall=time.time(), reason=reason, clean=False))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.splitlines()[-1] == f"error: engine {started['id']} has ended: {reason}"


def test_an_engine_leaves_when_serve_is_killed(cli: Cli, stand_in: Path) -> None:
    process = cli.process("serve", "tiny", "--json")
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.wait(60)
    until(stand_in.exists)
    process.communicate(timeout=60)
