"""`key` and `context`: what they write, print and refuse; and commands on an engine elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cli_helpers import Cli
from fake_gateway import FakeGateway
from ppconsole.link.contexts import read_contexts
from ppconsole.link.find import NoEngine, SeveralEngines, find_engine
from ppengine.protocol.allowed_keys import allowed_path, read_allowed
from ppengine.protocol.keys import keys_dir, write_private

ONE, TWO = "1" * 64, "2" * 64
HERE = "tcp://127.0.0.1:7400"


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("PPCONSOLE_ENGINE", raising=False)
    return Cli(capsys, tmp_path)


def test_a_key_is_made_allowed_listed_and_revoked(cli: Cli) -> None:
    own = cli("key", "new").out.strip()
    assert re.fullmatch("[0-9a-f]{64}", own) and cli("key", "new").out.strip() == own
    assert cli("key", "allow", "alice@laptop", ONE, "--role", "operator").code == 0
    assert cli("key", "allow", "eve", TWO).code == 0
    run = cli("key", "ls")
    assert run.code == 0 and f"client    {own}\n" in run.out and re.search("server    [0-9a-f]{64}\n", run.out)
    assert f"operator  {ONE}  alice@laptop\nviewer    {TWO}  eve\n" in run.out
    listed = cli("key", "ls", "--json").rows[0]
    assert listed["allowed"][1] == {"role": "viewer", "key": TWO, "name": "eve"} and listed["client"] == own
    assert cli("key", "revoke", "eve").err == "revoked viewer eve\n"
    assert [one.name for one in read_allowed(allowed_path())[0]] == ["alice@laptop"]
    assert cli("key", "new", "--replace").out.strip() != own


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (("allow", "a", "xyz"), "'xyz' is no key; a key has 64 digits"), (("allow", "a b", ONE), "'a b' is no name"),
        (("allow", "owner", ONE), "owner is the name of the engine's own user"),
        (("revoke", "nobody"), "no key named 'nobody'; its names: none"),
    ],
)  # fmt: skip
def test_a_key_that_cannot_be_used_is_refused_in_one_line(cli: Cli, arguments: tuple[str, ...], wrong: str) -> None:
    run = cli("key", *arguments)
    assert run.code == 1 and wrong in run.err and run.err.count("\n") == 1
    assert not allowed_path().exists()


def test_ls_fails_on_a_line_that_allows_nobody(cli: Cli) -> None:
    write_private(allowed_path(), b"root x y\n")
    run = cli("key", "ls")
    assert run.code == 1 and "line 1: 'root' is no role" in run.err


def test_wide_modes_stop_every_command_by_name(cli: Cli) -> None:
    keys_dir().chmod(0o755)
    run = cli("key", "ls")
    assert run.code == 1 and "keys has mode 0755: others can reach it; chmod 0700" in run.err


def test_contexts_are_added_used_and_removed(cli: Cli) -> None:
    assert "no context; add one" in cli("context", "ls").err
    assert cli("context", "add", "far", HERE, "--server-key", ONE).code == 0
    assert cli("context", "use", "far").code == 0
    assert cli("context", "ls").out == f"* far              {HERE}         {ONE}\n"
    assert cli("context", "add", "far", "tcp://h.example:1", "--server-key", TWO).code == 0
    assert cli("context", "ls", "--json").rows[0]["contexts"][0]["address"] == "tcp://h.example:1"
    assert cli("context", "use", "local").code == 0 and read_contexts().current == "local"
    assert cli("context", "use", "far").code == 0 and cli("context", "rm", "far").code == 0
    assert read_contexts().current == "local" and read_contexts().contexts == []


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (("add", "local", HERE, "--server-key", ONE), "'local' is no name of a context"),
        (("add", "a", "http://x", "--server-key", ONE), "it must be tcp://HOST:PORT"),
        (("add", "a", HERE, "--server-key", "short"), "'short' is no key"),
        (("use", "b"), "no context 'b'; there are: none"), (("rm", "b"), "no context 'b'"),
    ],
)  # fmt: skip
def test_a_context_that_cannot_be_is_refused(cli: Cli, arguments: tuple[str, ...], wrong: str) -> None:
    run = cli("context", *arguments)
    assert run.code == 2 and wrong in run.err and read_contexts().contexts == []


def test_a_damaged_file_of_contexts_is_named(cli: Cli) -> None:
    (keys_dir().parent / "contexts.json").write_text("{")
    run = cli("status")
    assert run.code == 2 and "contexts.json cannot be read" in run.err


def test_flag_then_variable_then_context_then_the_only_engine(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoEngine):
        find_engine()
    cli("context", "add", "far", HERE, "--server-key", ONE)
    cli("context", "add", "other", "tcp://10.0.0.1:1", "--server-key", TWO)
    with FakeGateway(name="here") as fake:
        assert find_engine().id == fake.id
        cli("context", "use", "far")
        assert (find_engine().address, find_engine().server_key) == (HERE, ONE)
        monkeypatch.setenv("PPCONSOLE_ENGINE", "other")
        assert find_engine().address == "tcp://10.0.0.1:1"
        assert find_engine("here").id == fake.id and find_engine("far").address == HERE
        cli("context", "add", "here", HERE, "--server-key", ONE)
        with pytest.raises(SeveralEngines, match="'here' is a context and an engine here"):
            find_engine("here")


def test_an_address_needs_a_key_once(cli: Cli) -> None:
    run = cli("-e", HERE, "status")
    assert run.code == 2 and "its host, ppconsole key ls prints KEY" in run.err
    cli("context", "add", "far", HERE, "--server-key", ONE)
    assert find_engine(HERE).server_key == ONE


def test_a_server_key_without_an_address_is_a_mistake(cli: Cli) -> None:
    run = cli("attach", "far", "--server-key", ONE)
    assert run.code == 2 and "--server-key belongs to an engine at tcp://HOST:PORT" in run.err
