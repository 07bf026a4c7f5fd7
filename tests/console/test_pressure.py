"""Load without a fault: who waits, for what, whose requests they are, and the commands that help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from cli_helpers import Cli
from fake_gateway import FakeGateway, sample_request, sample_snapshot, stuck_snapshot
from ppconsole.model.pressure import pressure_lines
from ppconsole.view import diagnosis
from ppconsole.view.cells import text_of, width_of
from ppengine.protocol.clients import ClientInfo, KeyLimit
from ppengine.protocol.snapshot import RequestInfo, Snapshot, Verdict, Why
from ppengine.protocol.stage_info import KvBlocks

BEHIND = Why(code="behind", text="need 61, have 29; behind r-9")


def waiting(count: int, owner: str, **changes: Any) -> list[RequestInfo]:
    """Return requests that wait, 700 prompt tokens each."""
    changes = {"state": "waiting", "owner": owner, "prompt_tokens": 700, "why": BEHIND, **changes}
    return [sample_request(f"r-{owner}{number}", **changes) for number in range(count)]


def picture(requests: list[RequestInfo], *, used: int = 10, **engine: Any) -> Snapshot:
    """Return an engine of 100 blocks."""
    snapshot = sample_snapshot(requests=requests, **engine)
    for stage in snapshot.stages:
        stage.kv_blocks = KvBlocks(used=used, cached=0, free=100 - used, mapped=100, capacity=100, binding=True)
    return snapshot


def test_an_engine_without_a_wait_has_no_load_to_name() -> None:
    assert pressure_lines(picture([sample_request("r-1")])) == []
    assert pressure_lines(picture([])) == []


@pytest.mark.parametrize(
    ("used", "most", "cause"),
    [
        (99, 64, "99 of 100 KV blocks are in use"),
        (99, 1, "1 run, max_num_seqs is 1"),
        (20, 64, "need 61, have 29"),
    ],
)
def test_the_cause_of_the_wait_is_named(used: int, most: int, cause: str) -> None:
    requests = [sample_request("r-1"), *waiting(2, "bob")]
    assert pressure_lines(picture(requests, used=used, max_num_seqs=most)) == [f"2 of 3 requests wait: {cause}"]


def test_preemptions_are_counted_where_the_cache_is_full() -> None:
    full = msgspec.structs.replace(picture(waiting(2, "bob"), used=99), preemptions_total=7)
    assert pressure_lines(full)[0].endswith("are in use, 7 preemptions since the start")


def test_the_user_of_most_requests_is_named_with_commands_for_this_engine() -> None:
    requests = [sample_request("r-1"), *waiting(20, "bob", client="bob")]
    _, line = pressure_lines(picture(requests), "-e f00d ")
    assert line == (
        "20 of 21 requests, with 14000 prompt tokens, are of bob; others first: "
        "ppconsole -e f00d priority --owner bob 10; fewer: ppconsole -e f00d limit bob 8"
    )
    assert len(pressure_lines(picture(waiting(7, "bob")))) == 1, "seven requests are no crowd"
    nameless = waiting(9, "http", client="http")
    assert len(pressure_lines(picture(nameless))) == 1, "a port without keys tells no users apart"
    (_, named) = pressure_lines(picture(waiting(9, "eve", client="http")))
    assert named.endswith("are of eve; others first: ppconsole priority --owner eve 10")
    mixed = [*waiting(8, "bob"), *waiting(9, "ann"), *waiting(8, "eve")]
    assert len(pressure_lines(picture(mixed))) == 1, "none has half of them"


def test_a_name_that_a_shell_would_not_take_is_in_no_command() -> None:
    (_, line) = pressure_lines(picture(waiting(9, "bob; rm -rf")))
    assert line.endswith("are of bob; rm -rf; see: ppconsole status")
    users = [*waiting(5, "u1", client="bob"), *waiting(5, "u2", client="bob")]
    assert pressure_lines(picture(users))[1].endswith("are of bob; try: ppconsole limit bob 8")
    (_, moved) = pressure_lines(picture(waiting(9, "\x1b[2Jbob")))
    assert moved.isprintable()


def test_the_users_of_slow_grammars_are_named() -> None:
    masks = waiting(3, "bob", state="running", why=Why(code="mask", text="waits for the mask"))
    (line,) = pressure_lines(picture([sample_request("r-1"), *masks]))
    assert line == "3 requests wait for masks of their grammars (bob 3); the others go on"


def test_refused_calls_are_named_while_they_come() -> None:
    calls = {"route": "/v1/completions", "requests_s": 5.0}
    storm = ClientInfo(key="(no key)", errors_total=50, **calls)
    ann = ClientInfo(key="ann", refused_total=4, most_open=8, **calls)
    bob = ClientInfo(key="bob", refused_total=4, key_limit=KeyLimit(concurrent=2), **calls)
    eve = ClientInfo(key="eve", refused_total=4, **calls)
    past = msgspec.structs.replace(eve, key="past", requests_s=0.0)
    seen = [storm, ann, bob, eve, past]
    lines = pressure_lines(msgspec.structs.replace(picture([]), clients=seen))
    assert lines == [
        "5 calls a second to /v1/completions have no known API key; their answer is 401",
        "4 answers 429 or 503 to ann on /v1/completions since the start; limit 8; end it: ppconsole limit ann off",
        "4 answers 429 or 503 to bob on /v1/completions since the start; limit in the file of keys",
    ]
    full = pressure_lines(msgspec.structs.replace(picture(waiting(2, "bob")), clients=seen))
    assert full[1:] == [
        *lines,
        "4 answers 429 or 503 to eve on /v1/completions since the start; the key has no limit",
    ]


def test_explain_names_the_load_where_there_is_no_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("PPCONSOLE_ENGINE", raising=False)
    cli = Cli(capsys, tmp_path)
    with FakeGateway(snapshot=picture(waiting(9, "bob"), used=99)) as fake:
        run = cli("explain")
        assert run.code == 0
        assert "\n  9 of 9 requests wait: 99 of 100 KV blocks are in use\n  9 of 9 requests, with 6300" in run.out
        assert cli("explain", "--json").rows[0]["pressure"] == pressure_lines(fake.snapshot)
        fault = Verdict(stage=None, cause="process", summary="http0 is stopped", since_s=6.2, root=True)
        fake.snapshot = msgspec.structs.replace(fake.snapshot, verdicts=[fault])
        beside = cli("explain")
        assert beside.code == 10
        assert "\n  9 of 9 requests wait: 99 of 100 KV blocks are in use\n" in beside.out
        stopped = [msgspec.structs.replace(fault, stage=1, cause="stopped")]
        fake.snapshot = msgspec.structs.replace(fake.snapshot, verdicts=stopped)
        assert "requests wait" not in cli("explain").out, "the fault of the stage is the cause"


@pytest.mark.parametrize("width", [80, 200])
def test_the_diagnosis_screen_names_it_too(width: int) -> None:
    rows = diagnosis.page(picture(waiting(9, "bob"), used=99), diagnosis.Known(), width).rows
    text = " ".join(text_of(row).strip() for row in rows)
    assert "9 of 9 requests wait: 99 of 100 KV blocks are in use" in text
    assert "ppconsole priority --owner bob 10" in text
    assert all(width_of(text_of(row)) <= width for row in rows)
    fault = msgspec.structs.replace(stuck_snapshot(), requests=waiting(9, "bob"))
    assert "requests wait" not in " ".join(text_of(row) for row in diagnosis.page(fault, diagnosis.Known(), width).rows)
