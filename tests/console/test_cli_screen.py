"""`attach`, `replay` and `demo` up to the door of the screen, which is a stand-in here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_helpers import Cli
from fake_gateway import FakeGateway, sample_snapshot
from ppconsole.link.engine_link import EngineLink
from ppconsole.link.replay import ReplaySource
from ppengine.protocol.recording import Recorder


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, bool, str]]:
    """What `run_console` was called with; a terminal is there."""
    calls: list[tuple[Any, bool, str]] = []

    def run_console(source: Any, *, read_only: bool, title: str) -> int:
        calls.append((source, read_only, title))
        return 0

    monkeypatch.setattr("ppconsole.app.run_console", run_console)
    monkeypatch.setattr("ppconsole.cli.screen.has_terminal", lambda: True)
    return calls


def test_attach_opens_the_only_engine(cli: Cli, fake: FakeGateway, opened: list[tuple[Any, bool, str]]) -> None:
    assert cli("attach").code == 0
    assert cli("attach", fake.id[:4], "--read-only").code == 0
    (first, read_only, _), (second, second_read_only, _) = opened
    assert isinstance(first, EngineLink)
    assert (first.record.id, first.read_only, read_only) == (fake.id, False, False)
    assert (second.read_only, second_read_only) == (True, True)


def test_attach_gives_up_on_an_engine_that_does_not_answer(
    cli: Cli, fake: FakeGateway, opened: list[tuple[Any, bool, str]]
) -> None:
    assert cli("attach", "--timeout", "5").code == 0
    fake.deaf = True
    run = cli("attach", "--timeout", "0.3")
    assert (run.code, "not attached within 0.3 s" in run.err, len(opened)) == (5, True, 1)


def test_attach_leaves_the_choice_among_several_to_the_screen(
    cli: Cli, fake: FakeGateway, opened: list[tuple[Any, bool, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeGateway(name="second") as second:
        run = cli("attach", "--read-only")
        assert (run.code, run.out, opened) == (0, "", [(None, True, "")])
        assert cli("attach", "second").code == 0
        assert opened[1][0].record.id == second.id
        run = cli("attach", "--json")
        assert (run.code, len(run.rows[0]), len(opened)) == (2, 2, 2)
        monkeypatch.setattr("ppconsole.cli.screen.has_terminal", lambda: False)
        run = cli("attach")
        assert run.code == 2 and fake.id in run.out and second.id in run.out
        assert "2 engines run here; name one with -e" in run.err and len(opened) == 2


def test_attach_to_none_or_to_two_at_once(cli: Cli, fake: FakeGateway, opened: list[tuple[Any, bool, str]]) -> None:
    assert cli("attach", "nobody").code == 3
    assert cli("attach", "a", "-e", "b").code == 2
    assert opened == []


def test_replay_opens_the_recording_without_verbs(
    cli: Cli, tmp_path: Path, opened: list[tuple[Any, bool, str]]
) -> None:
    path = tmp_path / "a.ppr"
    with Recorder(path, engine="f00d", name="fake") as recorder:
        recorder.write(sample_snapshot())
    assert cli("replay", str(path), "--speed", "4").code == 0
    source, read_only, title = opened[0]
    assert isinstance(source, ReplaySource)
    assert (source.speed, read_only, title) == (4.0, True, "recording of fake (f00d)")
    assert cli("replay", str(path), "--speed", "-1").code == 2
    source.history.close()


def test_a_missing_sample_says_so(
    cli: Cli, tmp_path: Path, opened: list[tuple[Any, bool, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ppconsole.cli.recordings.SAMPLE", tmp_path / "none.ppr")
    run = cli("replay", "--sample")
    assert run.code == 1
    assert "no sample is bundled with this build" in run.err
    with Recorder(tmp_path / "none.ppr", engine="e", name="incident") as recorder:
        recorder.write(sample_snapshot())
    assert cli("replay", "--sample").code == 0
    assert opened[0][2] == "recording of incident (e)"
