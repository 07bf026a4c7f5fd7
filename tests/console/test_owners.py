"""Requests of other keys and the control lease, as the CLI and the console show and send them."""

from __future__ import annotations

import copy
import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_helpers import Cli
from fake_gateway import FakeGateway, sample_request
from ppconsole.screens.confirm import OVERRIDE_REASON
from ppconsole.view.commands import cli_line
from ppengine.protocol.control import Accepted, Command, Outcome, Refused
from ppengine.protocol.snapshot import LeaseInfo
from ppengine.protocol.verbs import Abort, Lease, Many
from test_tui_console import console
from textual.widgets import Button

PLANNED = Outcome(
    id="1", op="", state="planned", text="abort r-0000", owners={"alice": 1}, override=True,
    plan=["abort r-0000", "1 request is of other keys: alice 1"],
)  # fmt: skip


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGateway]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("PPCONSOLE_ENGINE", raising=False)
    with FakeGateway() as gateway:
        gateway.snapshot.requests = [sample_request("r-1"), sample_request("r-2")]
        yield gateway


# --- the CLI ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("requests", [["r-1"], ["r-1", "r-2"]])
def test_override_and_reason_go_with_each_command(fake: FakeGateway, cli: Cli, requests: list[str]) -> None:
    run = cli("abort", *requests, "--override", "--reason", "bob is away")
    assert run.code == 0, run.err
    assert fake.commands and all(each.override and each.reason == "bob is away" for each in fake.commands)
    cli("abort", "r-2")
    assert not fake.commands[-1].override


def test_an_override_without_a_reason_is_not_sent(fake: FakeGateway, cli: Cli) -> None:
    for words in (["--override"], ["--override", "--reason", " "]):
        run = cli("abort", "r-1", *words)
        assert run.code == 2 and "--override needs --reason TEXT" in run.err
    assert not fake.commands


def test_the_shell_line_of_an_override_does_the_same(fake: FakeGateway, cli: Cli) -> None:
    for verb, one in (
        (Abort(request="r-1"), Abort(request="r-1")), (Many(verbs=[Abort(request="r-2")]), Abort(request="r-2")),
    ):  # fmt: skip
        program, *words = shlex.split(cli_line(verb, fake.name, OVERRIDE_REASON))
        assert program == "ppconsole" and cli(*words).code == 0
        sent = fake.commands[-1]
        assert (sent.verb, sent.override, sent.reason) == (one, True, OVERRIDE_REASON)


def test_a_lease_is_taken_shown_and_released(fake: FakeGateway, cli: Cli) -> None:
    def answer(command: Command) -> list[Accepted | Outcome]:
        return [Accepted(id=command.id, op="g-1"), Outcome(id=command.id, op="g-1", state="applied", text="done")]

    fake.answers[Lease] = answer  # type: ignore[assignment]
    assert cli("lease", "show").out == "no key holds the control lease\n"
    for words, verb in (
        (["take"], Lease(action="take")), (["take", "--ttl", "90"], Lease(action="take", ttl_s=90.0)),
        (["take", "--ttl", "1h", "--force"], Lease(action="take", ttl_s=3600.0, force=True)),
        (["release"], Lease(action="release")),
    ):  # fmt: skip
        assert cli("lease", *words).code == 0
        assert fake.commands[-1].verb == verb
        assert cli(*shlex.split(cli_line(verb, fake.name))[1:]).code == 0
        assert fake.commands[-1].verb == verb, "the shell line of the dialog does the same"
    fake.snapshot.lease = LeaseInfo(principal="alice-key", by="alice", left_s=61.4)
    assert cli("lease", "show").out == "key alice-key (alice) holds the control lease for 61 s more\n"
    assert json.loads(cli("lease", "show", "--json").out)["lease"]["principal"] == "alice-key"
    sent = len(fake.commands)
    for words, text in (
        (["take", "--ttl", "soon"], "'soon' is no time; it is written 90, 90s, 5m or 1h"),
        (["take", "--ttl", "2h"], "ttl is 7200.0; it must be 10 s to 1 h"), (["give"], "'give' is not one of"),
    ):  # fmt: skip
        run = cli("lease", *words)
        assert run.code == 2 and text in run.err
    assert len(fake.commands) == sent


def test_a_verb_under_the_lease_of_another_is_denied(fake: FakeGateway, cli: Cli) -> None:
    text = "key alice-key (alice) holds the control lease for 61 s more"
    fake.answers[Abort] = lambda command: [Refused(id=command.id, code="LEASED", text=text)]
    run = cli("abort", "r-1")
    assert run.code == 4 and text in run.err


# --- the console --------------------------------------------------------------------------------------------


async def test_the_dialog_names_the_owner_and_its_confirmation_overrides() -> None:
    async with console(size=(120, 36), plans={"abort": PLANNED}) as rig:
        dialog = await rig.confirm("a")
        body = rig.board("dialog-body")
        assert "1 request is of other keys: alice 1" in body and "doing it overrides their owners" in body
        assert "--override --reason 'confirmed on the console'" in body
        assert str(dialog.query_one("#confirm", Button).label) == "Override it: abort"
        await rig.pilot.press("tab", "enter")
        await rig.until(lambda: len(rig.source.commands) == 2)
        _, options = rig.source.commands[1]
        assert options["override"] and options["reason"] == OVERRIDE_REASON and not options["dry_run"]


async def test_an_own_request_is_no_override() -> None:
    async with console(size=(120, 36)) as rig:
        dialog = await rig.confirm("a")
        assert "override" not in rig.board("dialog-body")
        assert str(dialog.query_one("#confirm", Button).label) == "Do it: abort"
        await rig.pilot.press("tab", "enter")
        await rig.until(lambda: len(rig.source.commands) == 2)
        _, options = rig.source.commands[1]
        assert not options["override"] and options["reason"] == ""


@pytest.mark.parametrize("size", [(80, 24), (120, 36)])
async def test_the_header_names_the_holder_of_the_lease(size: tuple[int, int]) -> None:
    async with console(size=size) as rig:
        assert "LEASE" not in rig.screen()
        picture = copy.deepcopy(rig.source.picture)
        picture.lease = LeaseInfo(principal="alice@a-laptop-with-a-long-name", by="alice", left_s=60.0)
        rig.source.send(picture)
        rig.app.tick()
        await rig.pilot.pause()
        first = rig.screen().splitlines()[0]
        assert " LEASE alice@a-lapto" in first and " RW " in first
