"""`ppconsole fault`: what it refuses by itself, and that both programs take the option."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_helpers import Cli
from ppconsole.cli.serving import profile_arguments


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("PPCONSOLE_ENGINE", raising=False)
    return Cli(capsys, tmp_path)


@pytest.mark.parametrize(
    "words", [(), ("sigkill", "--list"), ("--list", "--clear"), ("--clear", "--stage", "1"), ("--list", "--stage", "1")]
)
def test_one_thing_at_a_time(cli: Cli, words: tuple[str, ...]) -> None:
    run = cli("fault", *words)
    assert run.code == 2
    assert run.err.startswith("error: ")
    assert run.out == ""


def test_no_engine_is_exit_3(cli: Cli) -> None:
    assert cli("fault", "sigkill", "--stage", "0").code == 3
    assert cli("fault", "--list").code == 3


def test_option_reaches_the_supervisor() -> None:
    assert profile_arguments("tiny", (), None, allow_faults=True) == ["tiny", "--allow-faults"]
    assert "--allow-faults" not in profile_arguments("tiny", ("a.b=c",), "x")


@pytest.mark.parametrize("command", ["serve", "demo"])
def test_both_commands_offer_it(cli: Cli, command: str) -> None:
    assert "--allow-faults" in cli(command, "--help").out
