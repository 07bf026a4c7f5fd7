"""`show` of a request that has ended, and whose output its client has: its figures, or how far back they are kept."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import msgspec
import pytest
from cli_helpers import Cli
from fake_gateway import FakeGateway
from ppconsole.link.contexts import remote_record
from ppconsole.link.engine_link import EngineLink
from ppconsole.link.finished_search import find_ended, having, kept_text
from ppconsole.model.endings import clock_text
from ppconsole.model.request_names import means
from ppengine.protocol.finished import FinishedInfo
from ppengine.protocol.kept_files import engine_folder
from ppengine.protocol.snapshot import Snapshot
from ppengine.protocol.tcp_address import parse_address
from test_finished import BEGIN, HTTP, SOURCES, ended, segment


def test_show_has_the_figures_of_an_end_when_the_client_has_the_output(cli: Cli, fake: FakeGateway) -> None:
    """A line of a client's log names it, a minute later."""
    wall = time.time() - 65.0
    one = ended(
        1, id="chatcmpl-trace-42-0123456789ab", reason="stop", wall=wall, sources=SOURCES, prepare_s=0.125, **HTTP
    )
    fake.finished = [one, ended(2, id="r-lost", reason="lost", loss="its journal is off")]
    run = cli("show", one.id)
    assert (run.code, run.err) == (0, "")
    lines = run.out.splitlines()
    assert lines[2].startswith(f"ended     {clock_text(wall)}, 1m") and lines[2].endswith(" ago")
    assert [*lines[:2], *lines[3:]] == [
        "request   chatcmpl-trace-42-0123456789ab",
        "state     finished: stop",
        "owner     alice",
        "client    team-a, /v1/chat/completions",
        "tokens    137 in, 6 out",
        "timing    prepared 125ms, queued 250ms, first token 700ms, finished 2.0s",
        "per token 21ms, p50 20ms, p99 44ms",
        "from      prompt 137: device 16 · nvme0 100 · computed 21",
        "preempted 0 times",
        "          its output, blocks and history are not kept",
    ]
    part = cli("show", "trace-42")
    assert (part.code, part.err) == (0, f"trace-42 is {one.id}\n")
    assert part.out.splitlines()[3:] == lines[3:]
    (row,) = cli("show", one.id, "--json").rows
    assert msgspec.convert(row, FinishedInfo) == one
    lost = cli("show", "r-lost").out.splitlines()
    assert "state     finished: lost: its journal is off" in lost
    assert "timing    prepared 0.0ms, queued 20ms, first token -, finished 3.0s" in lost
    assert "per token -, p50 -, p99 -" in lost


def test_show_finds_older_ones_in_the_record_or_says_how_far_that_goes(
    cli: Cli, fake: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.finished = [ended(1)]
    folder = engine_folder(fake.record.id) / "history"
    for at in (0.0, 60.0):
        segment(folder, BEGIN + at, monkeypatch)
    run = cli("show", "r-45")
    assert run.code == 0 and run.out.startswith("request   r-45\n") and "state     finished: " in run.out
    assert cli("show", "…-115").err == "…-115 is r-115\n"
    gone = cli("show", "no-such")
    assert gone.code == 7 and gone.err == (
        "error: no request 'no-such'; the engine keeps the newest 1,000 that ended "
        f"(those since {clock_text(BEGIN - 10)}), its record begins at {clock_text(BEGIN)} (NOT_FOUND)\n"
    )


CLIENTS = "cmpl-log-{}-0123456789ab"


@pytest.fixture
def counting(fake: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> FakeGateway:
    """Return an engine whose clients count: log-5 is a part of log-545, too."""
    fake.finished = [ended(1, id=CLIENTS.format(599))]
    for at in (0.0, 540.0):
        segment(engine_folder(fake.record.id) / "history", BEGIN + at, monkeypatch, name=CLIENTS)
    return fake


def test_a_longer_id_of_a_newer_request_does_not_hide_the_one_that_is_meant(cli: Cli, counting: FakeGateway) -> None:
    assert cli("show", "log-5").out.startswith(f"request   {CLIENTS.format(5)}\n")
    assert "its record begins at " + clock_text(BEGIN) in cli("show", "...").err


async def test_a_screen_finds_the_request_that_is_meant_and_a_search_all_with_the_word(counting: FakeGateway) -> None:
    snapshots, link = asyncio.Queue[Snapshot](), EngineLink(counting.record)
    await link.start(lambda update: snapshots.put_nowait(update) if isinstance(update, Snapshot) else None)
    try:
        snapshot = await asyncio.wait_for(snapshots.get(), 20)
        found = await find_ended(link, snapshot, partial(means, "log-5"))
        assert ([one.id for one in found.ended], found.listed) == ([CLIENTS.format(5)], False)
        found = await find_ended(link, snapshot, having("LOG-5"))
        assert ([one.id for one in found.ended], found.listed) == ([CLIENTS.format(599)], True)
    finally:
        await link.close()


def test_the_record_of_an_engine_on_another_host_is_there() -> None:
    far = EngineLink(remote_record(parse_address("tcp://192.0.2.1:7000"), "0" * 64))
    assert kept_text(far, [], None) == "the engine keeps the newest 1,000 that ended, its record is on its host"
