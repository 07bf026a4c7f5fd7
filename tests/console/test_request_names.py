"""Requests that are named by a part of their id, and states by their beginning, in the shell and on the `:` line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_helpers import Cli
from fake_gateway import FakeGateway, sample_request
from ppconsole.model.request_names import AmbiguousError, whole, whole_in
from ppconsole.view import commands
from ppengine.protocol.finished import FinishedInfo
from ppengine.protocol.verbs import Abort, Many, Priority

LIVE = ["r-8f2c", "r-8f31", "r-19aa", "r-77b0", "r-77b0.1", "r-77b0.2", "cmpl-aa01", "cmpl-bb02",
        "chatcmpl-order-7-0123456789ab"]  # fmt: skip


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGateway]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("PPCONSOLE_ENGINE", raising=False)
    with FakeGateway() as gateway:
        gateway.snapshot.requests = [sample_request(name, state="running") for name in LIVE]
        gateway.snapshot.requests.append(sample_request("r-1999", state="finished"))
        gateway.snapshot.requests_total = len(LIVE)
        yield gateway


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("r-8f2c", "r-8f2c"),
        ("r-8f2", "r-8f2c"),
        ("r-1", "r-19aa"),
        ("r-199", "r-1999"),
        ("r-7", "r-77b0"),
        ("r-77b0.2", "r-77b0.2"),
        ("…b02", "cmpl-bb02"),
        ("order-7", "chatcmpl-order-7-0123456789ab"),
        ("order", "order"),
        ("r-e", "r-e"),
        ("f31", "f31"),
        ("", ""),
        ("…", "…"),
    ],
)
def test_a_unique_part_is_the_whole_id(text: str, means: str) -> None:
    assert whole(text, LIVE, ["r-1999"]) == means


def test_an_id_of_one_sample_is_not_the_beginning_of_its_neighbours() -> None:
    """The first continuation may have ended before the others: its name still means the prompt."""
    assert whole("r-77b0", ["r-77b0.1", "r-77b0.2"]) == "r-77b0"
    assert whole("r-77", ["r-77b0.1", "r-77b0.2"]) == "r-77b0"


@pytest.mark.parametrize("text", ["r-8f", "r-8", "cmpl"])
def test_several_are_refused_with_their_ids(text: str) -> None:
    with pytest.raises(AmbiguousError) as refused:
        whole(text, LIVE)
    like = [name for name in LIVE if name.startswith(text)]
    assert str(refused.value) == f"{text} is ambiguous: {' '.join(like)}"


def test_many_candidates_are_counted() -> None:
    with pytest.raises(AmbiguousError, match=r"r-107 and 12 more$"):
        whole("r-1", [f"r-1{number:02}" for number in range(20)])


def test_a_part_is_refused_if_unlisted_requests_may_be_meant(fake: FakeGateway) -> None:
    fake.snapshot.requests_total = 2000
    assert whole_in("r-19aa", fake.snapshot) == "r-19aa"
    with pytest.raises(AmbiguousError, match="only the first 10 of 2000 requests are listed; give the whole id"):
        whole_in("r-19a", fake.snapshot)


def test_verbs_take_a_part_of_an_id(cli: Cli, fake: FakeGateway) -> None:
    run = cli("abort", "r-8f2")
    assert (run.code, fake.commands[-1].verb) == (0, Abort(request="r-8f2c"))
    assert "r-8f2 is r-8f2c" in run.err
    assert cli("priority", "r-8f3", "-5").code == 0
    assert fake.commands[-1].verb == Priority(request="r-8f31", priority=-5)
    assert cli("abort", "r-19", "cmpl-a", "r-19aa").code == 0
    verb = fake.commands[-1].verb
    assert isinstance(verb, Many) and verb.requests == ["r-19aa", "cmpl-aa01"]


def test_verbs_refuse_an_ambiguous_part_and_send_nothing(cli: Cli, fake: FakeGateway) -> None:
    for words in (["r-8f"], ["r-19", "r-8f"]):
        run = cli("abort", *words)
        assert (run.code, run.out, fake.commands) == (2, "", [])
        assert "error: r-8f is ambiguous: r-8f2c r-8f31\n" in run.err


def test_show_and_follow_take_a_part_of_an_id(cli: Cli, fake: FakeGateway) -> None:
    ended = {"wall": 1.0, "ended_s": 9.0, "took_s": 1.0, "prompt_tokens": 3, "output_tokens": 2, "reason": "stop"}
    fake.finished = [FinishedInfo(id="r-e001", owner="bob", **ended)]
    run = cli("show", "r-8f2", "--json")
    assert (run.code, run.rows[0]["id"]) == (0, "r-8f2c"), run.err
    run = cli("show", "r-8")
    assert (run.code, run.out, run.err) == (2, "", "error: r-8 is ambiguous: r-8f2c r-8f31\n")
    run = cli("show", "r-e")
    assert "r-e is r-e001" in run.err, "one that has ended is found in their list"
    assert cli("show", "r-zz").err.startswith("error: no request 'r-zz'; the engine keeps the newest 1,000")
    assert cli("follow", "r-8").err == "error: r-8 is ambiguous: r-8f2c r-8f31\n"


def test_the_command_line_takes_a_part_of_an_id(fake: FakeGateway) -> None:
    assert commands.asked("abort r-8f2", snapshot=fake.snapshot).verb == Abort(request="r-8f2c")
    with pytest.raises(commands.UsageError, match="abort: r-8f is ambiguous: r-8f2c r-8f31"):
        commands.asked("abort r-8f", snapshot=fake.snapshot)


@pytest.mark.parametrize(("word", "state"), [("run", "running"), ("RUN", "running"), ("swap", "swapped")])
def test_a_state_is_taken_as_the_table_writes_it(cli: Cli, fake: FakeGateway, word: str, state: str) -> None:
    fake.snapshot.requests[0].state = state
    for request in fake.snapshot.requests[1:]:
        request.state = "waiting"
    assert cli("abort", "--state", word).code == 0
    assert isinstance(fake.commands[-1].verb, Many) and fake.commands[-1].verb.requests == ["r-8f2c"]


def test_an_ambiguous_state_is_refused(cli: Cli, fake: FakeGateway) -> None:
    run = cli("abort", "--state", "f")
    assert (run.code, run.out, fake.commands) == (2, "", [])
    assert "'f' is ambiguous: finding, fetching" in run.err
