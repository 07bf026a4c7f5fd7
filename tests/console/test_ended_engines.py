"""Commands on an engine that has ended: by its kept files, and only where no live engine is meant."""

from __future__ import annotations

import json
import re
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from cli_helpers import Cli
from fake_gateway import FakeGateway
from kept_engines import KILLED, kept_engine, kept_incident, minute, picture
from ppconsole.link.ended import EndedSource
from ppconsole.link.kept_requests import find_request
from ppconsole.model.endings import clock_text
from ppengine.protocol.finished import FinishedInfo
from ppengine.protocol.kept_files import state_dir
from ppengine.protocol.recording import Recorder
from ppengine.protocol.snapshot import Event


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("PPCONSOLE_ENGINE", raising=False)
    (tmp_path / "run").mkdir()


@pytest.fixture
def live() -> Iterator[FakeGateway]:
    with FakeGateway(name="inc") as gateway:
        yield gateway


def test_looks_read_the_kept_files_and_say_so(cli: Cli) -> None:
    kept_engine()
    for words in (["logs"], ["status"], ["events"], ["explain"]):
        run = cli("-e", "inc", *words)
        assert "inc (dead01) ended " in run.err + run.out.splitlines()[0], words
        assert re.search(rf"1m0\d ago: {re.escape(KILLED)}", run.err + run.out), words
    assert cli("-e", "inc", "logs").out.splitlines() == [
        "stage1| 2026-11-23 02:34:10.000 INFO stage one was here",
        "core| 2026-11-23 02:34:11.000 INFO the last words of the core",
    ]
    assert "core|" not in cli("-e", "dead01", "logs", "--stage", "1").out
    assert "step 59" in cli("-e", "dea", "status").out, "the last picture"
    assert [row["seq"] for row in cli("-e", "inc", "events", "--last", "2", "--json").rows] == [5, 6]


def test_warnings_of_an_ended_engine_are_found_behind_the_others(cli: Cli) -> None:
    path = kept_engine() / "history" / f"{int(time.time() * 1e3):015d}.rec"
    recorder = Recorder(path, engine="dead01", name="inc")
    kinds = ("stage.stopped", "stage.dead", *("request.finished",) * 3)
    for seq, kind in enumerate(kinds, 7):
        recorder.write(Event(seq=seq, wall=time.time(), kind=kind, text="text"))
    recorder.close()
    asked = ("-e", "inc", "events", "--json", "--level")
    assert [row["seq"] for row in cli(*asked, "warning").rows] == [7, 8]
    assert [row["seq"] for row in cli(*asked, "warning", "--last", "1").rows] == [8]
    assert cli(*asked, "error", "--last", "0").rows == []


def test_a_live_engine_of_that_name_is_meant_first(cli: Cli, live: FakeGateway) -> None:
    kept_engine()
    run = cli("-e", "inc", "status", "--json")
    assert (run.code, run.rows[0]["engine"]["id"], run.err) == (0, live.id, "")
    assert cli("-e", "dead01", "status", "--json").rows[0]["engine"]["step"] == 59


def test_explain_says_what_ended_first_and_folds_the_rest(cli: Cli) -> None:
    kept_incident(kept_engine(), over=False)
    run = cli("-e", "inc", "explain")
    first, second, *rest = run.out.splitlines()
    assert run.code == 10 and first.endswith(KILLED) and second.startswith("CORE 0.3s: the engine core (pid 7)")
    assert "    then: stages 0 to 3 were killed by SIGKILL" in rest
    assert sum("killed by SIGKILL" in line for line in rest) == 1, "four ends of stages are one line"
    (row,) = cli("-e", "inc", "explain", "--json").rows
    assert (row["fault"], row["end"]["reason"], row["incident"]["info"]["number"]) == (True, KILLED, 1)


def test_a_fault_that_came_with_the_end_is_a_consequence(cli: Cli) -> None:
    """The supervisor was killed, and the core went with it."""
    folder = kept_engine(reason="its supervisor (pid 7) ended and noted no reason")
    kept_incident(folder, over=False, age_s=60.5)
    first, *rest = cli("-e", "inc", "explain").out.splitlines()
    assert "its supervisor (pid 7) ended" in first
    assert rest[0] == "    then: the engine core (pid 7) was killed by SIGKILL"
    kept_incident(folder, 2, over=False, age_s=90.0)
    assert "CORE 0.3s:" in cli("-e", "inc", "explain").out, "that fault was there half a minute before the end"


def test_explain_of_an_orderly_end_finds_no_fault(cli: Cli) -> None:
    kept_incident(kept_engine(reason="stopped by ann: upgrade", clean=True))
    run = cli("-e", "inc", "explain")
    assert run.code == 0 and "stopped by ann: upgrade" in run.out
    assert "stage 1 was killed by SIGKILL, healed in 1.9s" in run.out


def test_a_verb_says_that_the_engine_has_ended(cli: Cli) -> None:
    kept_engine()
    for words in (["submit", "hi"], ["pause"], ["watch"], ["record", "x.ppr"]):
        run = cli("-e", "inc", *words)
        assert run.code == 3 and "inc (dead01) ended " in run.err and KILLED in run.err, words
    run = cli("submit", "hi")
    assert run.code == 3 and "no engine runs here" in run.err and "the last one, inc (dead01) ended" in run.err
    assert "no engine has the id" in cli("-e", "other", "logs").err


def test_of_two_boots_the_newer_is_meant(cli: Cli) -> None:
    kept_engine("dead01", age_s=600.0)
    kept_engine("dead02", age_s=60.0)
    assert "inc (dead02)" in cli("-e", "inc", "logs").err


def test_ls_all_has_ends_and_reasons(cli: Cli, live: FakeGateway) -> None:
    kept_engine()
    assert "dead01" not in cli("ls").out
    lines = cli("ls", "--all").out.splitlines()
    at = next(number for number, line in enumerate(lines) if "REASON" in line)
    assert (
        live.id in "\n".join(lines[:at]) and lines[at + 1].startswith("dead01 inc") and lines[at + 1].endswith(KILLED)
    )
    rows = cli("ls", "--all", "--json").rows[0]
    assert [row["state"] for row in rows] == ["serving", "ended"] and rows[1]["end"]["reason"] == KILLED


def test_ls_alone_hints_at_ended_engines(cli: Cli) -> None:
    assert "ls --all" not in cli("ls").err
    kept_engine()
    assert cli("ls").out == "" and "ls --all" in cli("ls").err
    run = cli("-e", "inc", "show", "r-1")
    assert run.code == 7 and "request 'r-1' is in no picture" in run.err and "see status and events" in run.err


def test_show_has_the_last_known_state_and_when_it_was(cli: Cli) -> None:
    kept_engine()
    alive = picture(7).requests[0].id
    run = cli("-e", "inc", "show", alive)
    assert run.code == 0 and "inc (dead01) ended " in run.err and ", 1m0" in run.out.splitlines()[1]
    (row,) = cli("-e", "inc", "show", alive, "--json").rows
    assert row["info"]["id"] == alive and not row["finished"] and abs(row["as_of"] - (time.time() - 61.0)) < 5.0
    assert row["as_of"] == row["picture_wall"], "the last of sixty pictures"
    assert "prompt, output and block table are not kept" in run.out


def test_show_has_how_a_request_ended_before_the_engine(cli: Cli) -> None:
    folder = kept_engine()
    begin, alive = time.time() - 400.0, picture(7).requests[0].id
    around = folder / "incidents" / "1"
    around.mkdir(parents=True)
    with mock.patch("time.time", return_value=begin):  # the minute around an incident, before the kept hour
        recorder = Recorder(around / f"{int(begin * 1e3):015d}.rec", engine="dead01", name="inc")
    early = picture(1)
    early.requests[0].id = "gone"
    recorder.write(early)
    recorder.write(Event(seq=9, wall=begin + 1, kind="request.finished", text="gone length, 64 tokens", request="gone"))
    recorder.write(Event(seq=9, wall=begin + 2, kind="request.finished", text="short stop, 2 tokens", request="short"))
    recorder.write(Event(seq=9, wall=begin + 2, kind="request.finished", text=f"x {alive}", request="x"))
    info = FinishedInfo(
        id="served", owner="bob", wall=begin + 3, ended_s=0.0, took_s=2.0, prompt_tokens=9, output_tokens=2,
        reason="stop", prepare_s=0.125, ttft_s=0.7, itl_ms=21.0,
    )  # fmt: skip
    end = Event(seq=9, wall=begin + 3, kind="request.finished", text="served stop", request="served", finished=info)
    recorder.write(end)
    recorder.close()
    run = cli("-e", "inc", "show", "gone")
    assert "state     finished: length, 64 tokens" in run.out and "request.finished" in run.out
    assert f"before    {early.requests[0].state}" in run.out, "the figures are those of the picture before"
    assert "first token 700ms" not in run.out
    run = cli("-e", "inc", "show", "served")
    for line in ("state     finished: stop", "tokens    9 in, 2 out", "per token 21ms, p50 -, p99 -"):
        assert line in run.out.splitlines(), "the event of its end has its figures"
    assert "timing    prepared 125ms, queued -, first token 700ms, finished 2.0s" in run.out
    run = cli("-e", "inc", "show", "short")
    assert "finished: stop, 2 tokens" in run.out and "in no snapshot that was kept" in run.out
    assert cli("-e", "inc", "show", alive, "--json").rows[0]["events"] == []


def test_a_request_is_as_of_the_moment_and_a_cut_recording_counts(tmp_path: Path) -> None:
    path = minute(tmp_path / "h", 1000.0)
    name = picture(1).requests[0].id
    found = find_request([path], name, until=1030.5)
    assert found is not None and found.as_of == 1030.0
    assert find_request([path], name, until=900.0) is None and find_request([path], "no") is None
    path.write_bytes(path.read_bytes()[:-200])
    found = find_request([path], name)
    assert found is not None and 1000.0 <= found.as_of <= 1059.0


def test_export_has_what_was_kept(cli: Cli, tmp_path: Path) -> None:
    made = kept_incident(kept_engine(), over=False)
    run = cli("-e", "inc", "export", str(tmp_path / "e.zip"))
    assert run.code == 0, run.err
    with zipfile.ZipFile(tmp_path / "e.zip") as archive:
        assert json.loads(archive.read("fault.json"))["verdict"]["summary"] == made.fault.verdict.summary
        assert json.loads(archive.read("snapshot.json"))["engine"]["step"] == 59
        assert len(archive.read("events.jsonl").splitlines()) == 6
    assert "not in it: about: the kept files have no about" in run.err


def test_attach_opens_the_last_moment(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_engine()
    calls: list[Any] = []
    monkeypatch.setattr("ppconsole.app.run_console", lambda source, **options: calls.append((source, options)) or 0)
    run = cli("attach", "inc")
    assert run.code == 2 and "without a terminal: ppconsole -e dead01 explain" in run.err
    monkeypatch.setattr("ppconsole.cli.screen.has_terminal", lambda: True)
    assert cli("attach", "inc").code == 0
    ((source, options),) = calls
    assert isinstance(source, EndedSource) and not source.live
    assert not options["read_only"], "it may be left for a live engine, and that one takes verbs"
    assert cli("attach", "inc", "--read-only").code == 0 and calls.pop()[1]["read_only"]
    assert source.position == source.history.end and source.paused


def test_an_engine_without_pictures_is_an_error_in_words(cli: Cli) -> None:
    for path in (kept_engine() / "history").iterdir():
        path.unlink()
    run = cli("-e", "inc", "status")
    assert run.code == 7 and "no picture of it was kept" in run.err
    assert cli("-e", "inc", "events").out == "" and cli("-e", "inc", "explain").code == 10
    run = cli("-e", "inc", "history")
    assert run.code == 7 and f"no history of engine dead01 (inc) is in {state_dir()}; " in run.err, run.err
    assert f"no incident was kept in {state_dir()}" in cli("-e", "inc", "incidents").err


def test_an_old_end_has_its_date() -> None:
    now = time.time()
    assert clock_text(now - 60.0, now).count(":") == 2 and " " not in clock_text(now - 60.0, now)
    assert clock_text(now - 5 * 86400, now) == time.strftime("%b %d %H:%M", time.localtime(now - 5 * 86400))
