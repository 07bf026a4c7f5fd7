"""Verbs on many requests from the shell: by ids, owner, age, state and filter."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_helpers import Cli
from fake_gateway import FakeGateway, sample_request
from ppconsole.cli import many
from ppconsole.view.commands import cli_line
from ppengine.protocol.control import Refused
from ppengine.protocol.verbs import Abort, Many, Preempt, Priority, SwapOut


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGateway]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("PPCONSOLE_ENGINE", raising=False)
    with FakeGateway() as gateway:
        gateway.snapshot.requests = [
            sample_request("r-1", owner="alice", state="running", age_s=10.0, blocks=50, revision=2),
            sample_request("r-2", owner="alice", state="waiting", age_s=400.0, blocks=0),
            sample_request("r-3", owner="bob", state="waiting", age_s=500.0, blocks=0),
            sample_request("r-4", owner="a b", state="held", age_s=9000.0, blocks=0),
        ]
        gateway.snapshot.requests_total = 4
        yield gateway


def sent(fake: FakeGateway) -> list[tuple[list[str], bool]]:
    """Return ids and dry run of the commands so far; all are on many."""
    verbs = [(command.verb, command.dry_run) for command in fake.commands]
    assert all(isinstance(verb, Many) for verb, _ in verbs)
    return [(verb.requests, dry) for verb, dry in verbs]


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        (["r-1", "r-3"], ["r-1", "r-3"]),
        (["r-1", "r-3", "r-1"], ["r-1", "r-3"]),
        (["--owner", "alice"], ["r-1", "r-2"]),
        (["--owner", "ali"], None),
        (["--owner", "a b"], ["r-4"]),
        (["--owner", 'x" !"'], None),
        (["--older", "5m"], ["r-2", "r-3", "r-4"]),
        (["--older", "2h", "--owner", "a b"], ["r-4"]),
        (["--state", "waiting"], ["r-2", "r-3"]),
        (["--state", "waiting", "--older", "7m"], ["r-3"]),
        (["--filter", "blk>40"], ["r-1"]),
        (["--filter", "stat:wait !bob", "--older", "1"], ["r-2"]),
        (["--filter", "blk>400"], None),
    ],
)
def test_targets(cli: Cli, fake: FakeGateway, words: list[str], ids: list[str] | None) -> None:
    run = cli("abort", *words)
    if ids is None:
        assert (run.code, run.out, fake.commands) == (7, "", [])
        assert "no request matches " in run.err and run.err.rstrip().endswith("; 4 are here")
        return
    assert run.code == 0, run.err
    assert sent(fake) == [(ids, True), (ids, False)]
    assert run.err.index("  3 blocks come back") < run.err.index("abort accepted")
    assert run.out == f"abort applied: {len(ids)} of {len(ids)} requests\n"
    assert not {request.id for request in fake.snapshot.requests} & set(ids)


def test_a_filter_guards_by_the_revisions_that_it_saw(cli: Cli, fake: FakeGateway) -> None:
    assert cli("swap-out", "--owner", "alice", "--no-hold", "--reason", "room").code == 0
    verb = fake.commands[-1].verb
    assert verb == Many(verbs=[SwapOut(request=name, hold=False) for name in ("r-1", "r-2")], revisions=[2, 1])
    assert fake.commands[-1].reason == "room"
    assert cli("priority", "r-1", "r-2", "-5").code == 0
    assert fake.commands[-1].verb == Many(verbs=[Priority(request=name, priority=-5) for name in ("r-1", "r-2")])


def test_what_could_not_be_done_is_listed_and_exit_6(cli: Cli, fake: FakeGateway) -> None:
    run = cli("abort", "r-1", "r-9", "r-2")
    assert run.code == 6
    assert run.out == "abort applied: 2 of 3 requests\n  r-9: no such r-9 (NOT_FOUND)\n"
    assert "not r-9: no such r-9" in run.err
    run = cli("abort", "r-3", *(f"x-{number}" for number in range(9)))
    assert run.err.count("not x-") == 5 and "... and 4 more that cannot be done" in run.err
    assert run.out.count("x-") == 18, "the outcome has all"
    run = cli("abort", "r-8", "r-9", "--json")
    assert (run.code, run.rows[0]["state"]) == (6, "failed")
    assert [each["request"] for each in run.rows[0]["conflicts"]] == ["r-8", "r-9"]


def test_a_dry_run_prints_the_plan_and_changes_nothing(cli: Cli, fake: FakeGateway) -> None:
    run = cli("abort", "--state", "waiting", "--dry-run", "--json")
    assert (run.code, run.rows[0]["state"], sent(fake)) == (0, "planned", [(["r-2", "r-3"], True)])
    assert cli("abort", "r-2", "r-9", "--dry-run").code == 6
    assert len(fake.snapshot.requests) == 4


@pytest.mark.parametrize(("answer", "code", "commands"), [(True, 0, 2), (False, 130, 1)])
def test_a_terminal_is_asked(
    cli: Cli, fake: FakeGateway, monkeypatch: pytest.MonkeyPatch, answer: bool, code: int, commands: int
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(many.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(many.click, "confirm", lambda text, **_: asked.append(text) or answer)
    assert cli("preempt", "--owner", "alice").code == code
    assert asked == ["preempt 2 requests?"] and len(fake.commands) == commands
    assert cli("abort", "--owner", "bob", "--yes").code == 0 and len(asked) == 1
    assert cli("abort", "r-4").code == 0 and len(asked) == 1, "one request is not asked for, as before"
    assert fake.commands[-1].verb == Abort(request="r-4")


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ([], 2, "no request is named or chosen; give ids, or --owner, --older, --state and --filter"),
        (["r-1", "--owner", "bob"], 2, "requests are named and chosen by options, too"),
        (["--older", "5x"], 2, "age>5x: '5x' is no number with one of the units ms s m h d"),
        (["--filter", "blc>3"], 2, "no field 'blc'; did you mean blk?"),
        (["--state", "asleep"], 2, "'asleep' is not one of"),
        (["--owner", "bob", "--if-rev", "3"], 2, "--if-rev is for one request"),
        ([f"r{number}" for number in range(1001)], 2, "1001 requests in one command; it must be 1 to 1000"),
    ],
    ids=["none", "both", "age", "filter", "state", "rev", "too many"],
)
def test_refusals(cli: Cli, fake: FakeGateway, words: list[str], code: int, says: str) -> None:
    run = cli("abort", *words)
    assert (run.code, run.out, fake.commands) == (code, "", [])
    assert says in run.err


def test_a_refusal_of_the_plan_ends_it(cli: Cli, fake: FakeGateway) -> None:
    fake.answers[Many] = lambda command: [Refused(id=command.id, code="BUSY", text="loading")]
    run = cli("abort", "r-1", "r-2")
    assert (run.code, len(fake.commands)) == (1, 1)
    assert "abort refused: loading (BUSY)" in run.err


@pytest.mark.parametrize(
    "verb",
    [
        Many(verbs=[Abort(request="r-1"), Abort(request="r-2")]),
        Many(verbs=[Preempt(request=name, mode="swap", hold=True) for name in ("r-1", "-x")]),
        Many(verbs=[Priority(request=name, priority=-5) for name in ("r-1", "r-2")]),
    ],
)
def test_the_copied_line_of_many_does_the_same(cli: Cli, fake: FakeGateway, verb: Many) -> None:
    program, *words = shlex.split(cli_line(verb, fake.name))
    assert program == "ppconsole"
    assert cli(*words).code in (0, 6)
    assert fake.commands[-1].verb == verb


def test_status_and_watch_list_what_a_filter_matches(cli: Cli, fake: FakeGateway) -> None:
    run = cli("status", "--filter", "owner:alice blk>40")
    assert run.code == 0 and "r-1" in run.out and "r-2" not in run.out
    assert [row["id"] for row in cli("status", "--filter", "stat:wait", "--json").rows[0]["requests"]] == ["r-2", "r-3"]
    rows = cli("watch", "--json", "-n", "1", "--filter", "r-3").rows
    assert [row["id"] for row in rows[0]["requests"]] == ["r-3"]
    for command in ("status", "watch"):
        run = cli(command, "--filter", "blk>")
        assert (run.code, run.err) == (2, "error: blk> needs a value: blk>40\n")
