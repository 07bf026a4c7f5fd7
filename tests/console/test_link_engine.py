"""The live link against real sockets: attach, lose, find again, order events, end commands."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_gateway import FakeGateway
from link_helpers import FAST, Seen
from ppconsole.link.attachment import KeyRefused, Session, SessionOver
from ppconsole.link.engine_link import EngineLink
from ppconsole.link.source import AccessDenied, LinkLost, QueryFailed
from ppengine.protocol.control import Accepted, Command, Deferred, Outcome, Refused
from ppengine.protocol.discovery import keep_record
from ppengine.protocol.inspection import RequestDetail, StacksDetail
from ppengine.protocol.kept_files import EngineEnd, engine_folder, write_end
from ppengine.protocol.recording import LinkState
from ppengine.protocol.verbs import Abort, Pause, Submit, SwapOut


@asynccontextmanager
async def attached(fake: FakeGateway, **options: Any) -> AsyncIterator[tuple[EngineLink, Seen]]:
    link = EngineLink(fake.record, user="tester", **{"timing": FAST, **options})
    seen = Seen()
    await link.start(seen.take)
    try:
        await seen.until(lambda seen: bool(seen.snapshots))
        yield link, seen
    finally:
        await link.close()


async def test_attach_says_hello_and_goes_live(fake: FakeGateway) -> None:
    async with attached(fake) as (_, seen):
        assert seen.states == ["connecting", "live"]
        assert seen.snapshots[0].engine.epoch == fake.epoch
        assert fake.hellos[0].user == "tester"


async def test_who_leaves_says_goodbye_and_who_was_lost_does_not(fake: FakeGateway) -> None:
    async with attached(fake) as (link, seen):
        fake.restart()
        await seen.until(lambda seen: len(fake.hellos) == 2 and seen.states[-1] == "live")
        assert fake.goodbyes == 0
        await link.close()
        async with asyncio.timeout(60):
            while not fake.goodbyes:
                await asyncio.sleep(0.01)
    assert fake.goodbyes == 1


async def test_slow_subscriber_gets_only_the_slow_topic(fake: FakeGateway) -> None:
    async with attached(fake, slow=True) as (_, seen):
        await seen.until(lambda seen: len(seen.snapshots) == 2)
        assert len(seen.snapshots) <= fake.slow_published


async def test_stale_then_live_again(fake: FakeGateway) -> None:
    patient = replace(FAST, lost_s=60.0)  # a pong that a busy machine holds back is no loss
    async with attached(fake, timing=patient) as (_, seen):
        fake.silent = True
        await seen.until(lambda seen: seen.states[-1] == "stale")
        assert "still answers pings, at step 18412" in seen.texts[-1]
        count = len(seen.snapshots)
        fake.silent = False
        await seen.until(lambda seen: seen.states[-1] == "live" and len(seen.snapshots) > count)
        assert "lost" not in seen.states


async def test_a_gateway_that_was_silent_before_the_end_has_not_closed_the_connection(fake: FakeGateway) -> None:
    """ZeroMQ ends the connection to a process that is stopped, after some seconds."""
    patient = replace(FAST, lost_s=60.0)
    for silent, says in ((False, "closed the connection"), (True, "silent; ppconsole explain says why")):
        async with attached(fake, timing=patient) as (_, seen):
            fake.deaf = fake.silent = silent
            await asyncio.sleep(2 * FAST.stale_s + FAST.ping_s if silent else 0.0)
            fake.stop()
            await seen.until(lambda seen: "lost" in seen.states)
            states = [each for each in seen.updates if isinstance(each, LinkState)]
            assert says in next(each.text for each in states if each.state == "lost"), states
            fake.deaf = fake.silent = False
            fake.start(fake.epoch)


async def test_gone_is_lost_and_the_same_epoch_comes_back(fake: FakeGateway) -> None:
    async with attached(fake) as (_, seen):
        epoch = fake.epoch
        fake.stop()
        await seen.until(lambda seen: "no engine fake" in seen.texts[-1])
        assert seen.states[-1] == "lost"
        fake.start(epoch)
        await seen.until(lambda seen: seen.states[-1] == "live")
        assert "new-epoch" not in seen.states


async def test_the_last_picture_is_seen_although_the_link_breaks_with_it(fake: FakeGateway) -> None:
    unhurried = replace(FAST, gather_s=30.0)  # it reads again long after the end
    async with attached(fake, timing=unhurried) as (_, seen):
        fake.end()
        await seen.until(lambda seen: seen.states[-1] == "lost")
        assert seen.snapshots[-1].engine.state == "stopped"


async def test_restart_is_a_new_epoch(fake: FakeGateway) -> None:
    async with attached(fake) as (_, seen):
        fake.restart()
        await seen.until(lambda seen: "new-epoch" in seen.states and seen.states[-1] == "live")
        await seen.until(lambda seen: seen.snapshots[-1].engine.epoch == fake.epoch)


async def test_a_dead_process_is_lost_at_once(fake: FakeGateway) -> None:
    async with attached(fake) as (link, seen):
        link.record.pid_start += 1
        await seen.until(lambda seen: any("has ended: pid" in text for text in seen.texts))


async def test_backlog_gap_and_replay(fake: FakeGateway) -> None:
    for number in range(5):
        fake.event("before", str(number))
    async with attached(fake) as (_, seen):
        await seen.until(lambda seen: len(seen.events) == 5)
        fake.lose_events(3)
        fake.event("after", "9th")
        await seen.until(lambda seen: len(seen.events) == 9)
        assert [event.seq for event in seen.events] == list(range(1, 10))
        assert fake.replays[-1].after == 5
        assert fake.replays[-1].until == 8


async def test_warnings_before_the_backlog_come_first(fake: FakeGateway) -> None:
    for kind in ("stage.dead", "op.failed", "request.finished", "stage.stopped", *("request.finished",) * 9):
        fake.event(kind, "text")
    async with attached(fake, backlog=3, warnings=2) as (_, seen):
        await seen.until(lambda seen: len(seen.events) == 5)
        assert [event.seq for event in seen.events] == [2, 4, 11, 12, 13]
        fake.event("after", "next")
        await seen.until(lambda seen: seen.events[-1].seq == 14)
        first, *more = [(each.level, each.most) for each in fake.replays]
        # The backlog may come live before it is asked for, and a loop that was held up asks once more.
        assert first == ("warning", 2) and set(more) <= {(None, None)}


async def test_a_lost_newest_event_is_seen_by_the_snapshot(fake: FakeGateway) -> None:
    async with attached(fake) as (_, seen):
        fake.lose_events(2)
        await seen.until(lambda seen: [event.seq for event in seen.events] == [1, 2])


async def test_events_past_the_ring_are_one_gap(fake: FakeGateway) -> None:
    fake.ring = 4
    async with attached(fake) as (_, seen):
        fake.lose_events(20)
        fake.event("after", "21st")
        await seen.until(lambda seen: bool(seen.events) and seen.events[-1].seq == 21)
        assert seen.events[0].kind == "link.gap"
        assert seen.events[0].text.startswith("events 1 to 17 ")
        assert [event.seq for event in seen.events[1:]] == [18, 19, 20, 21]


async def test_command_progress_and_outcome(fake: FakeGateway) -> None:
    async with attached(fake) as (link, _):
        progress: list[Accepted | Deferred] = []
        outcome = await link.command(SwapOut(request="r-8f2c"), reason="why not", on_progress=progress.append)
        assert isinstance(outcome, Outcome)
        assert outcome.state == "applied"
        assert [type(step) for step in progress] == [Accepted, Deferred]
        command = fake.commands[0]
        assert (command.epoch, command.by, command.reason) == (fake.epoch, "tester", "why not")


async def test_command_refused_conflict_and_dry_run(fake: FakeGateway) -> None:
    async with attached(fake) as (link, _):
        gone = await link.command(Abort(request="r-none"))
        assert isinstance(gone, Refused)
        assert gone.code == "NOT_FOUND"
        conflict = await link.command(Abort(request="r-8f2c"), if_rev=99)
        assert isinstance(conflict, Refused)
        assert conflict.code == "CONFLICT"
        planned = await link.command(Abort(request="r-8f2c"), dry_run=True)
        assert isinstance(planned, Outcome)
        assert planned.state == "planned"
        assert len(fake.snapshot.requests) == 3


async def test_read_only_sends_nothing(fake: FakeGateway) -> None:
    async with attached(fake, read_only=True) as (link, _):
        refused = await link.command(Pause())
        assert isinstance(refused, Refused)
        assert refused.code == "DENIED"
        assert fake.commands == []
        assert fake.hellos[0].read_only


async def test_unanswered_command_is_unknown_and_not_sent_again(fake: FakeGateway) -> None:
    fake.answers[Pause] = lambda command: []
    async with attached(fake) as (link, seen):
        with pytest.raises(LinkLost, match="unknown outcome") as lost:
            await link.command(Pause(), timeout=1.0)
        assert lost.value.sent
        waiting = asyncio.create_task(link.command(Pause()))
        await seen.until(lambda seen: len(fake.commands) == 2)
        fake.restart()
        with pytest.raises(LinkLost, match="unknown outcome"):
            await waiting
        await seen.until(lambda seen: seen.states[-1] == "live")
        assert len(fake.commands) == 2


async def test_a_command_that_a_lost_link_left_open_is_sent_again_under_its_id(fake: FakeGateway) -> None:
    answers = fake.answers.pop(Pause, None)
    fake.answers[Pause] = lambda command: []
    async with attached(fake) as (link, seen):
        waiting = asyncio.create_task(link.command(Pause(), ttl_ms=9000))
        await seen.until(lambda seen: len(fake.commands) == 1)
        epoch = fake.epoch
        fake.stop()
        if answers is None:
            del fake.answers[Pause]
        else:
            fake.answers[Pause] = answers
        fake.start(epoch)
        end = await asyncio.wait_for(waiting, 20)
        assert isinstance(end, Outcome) and end.state == "applied"
        first, second = fake.commands
        assert first.id == second.id == end.id and 0 < second.ttl_ms < first.ttl_ms == 9000
        assert fake.hellos[0].console == fake.hellos[-1].console != ""


async def test_a_link_that_breaks_before_it_has_sent_a_command_again_is_lost(
    fake: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.answers[Pause] = lambda command: []
    async with attached(fake) as (link, seen):
        waiting = asyncio.create_task(link.command(Pause()))
        await seen.until(lambda seen: len(fake.commands) == 1)
        send = Session.send_command

        async def send_late(session: Session, command: Command) -> None:
            fake.stop()
            await asyncio.sleep(0.2)  # the socket knows that nothing is connected
            await send(session, command)

        monkeypatch.setattr(Session, "send_command", send_late)
        epoch = fake.epoch
        fake.stop()
        fake.start(epoch)
        await seen.until(lambda seen: "no engine fake" in seen.texts[-1])
        waiting.cancel()


async def test_accepted_command_is_settled_by_its_event_after_a_broken_link(fake: FakeGateway) -> None:
    fake.answers[Pause] = lambda command: [Accepted(id=command.id, op="op-7")]
    async with attached(fake) as (link, seen):
        accepted: list[object] = []
        waiting = asyncio.create_task(link.command(Pause(), on_progress=accepted.append))
        await seen.until(lambda seen: bool(accepted))
        fake.deaf = fake.silent = True
        await seen.until(lambda seen: seen.states[-1] == "lost")
        fake.event("op.applied", "paused", op="op-7", step=5, publish=False)
        fake.deaf = fake.silent = False
        outcome = await asyncio.wait_for(waiting, 20)
        assert isinstance(outcome, Outcome)
        assert (outcome.state, outcome.text, outcome.step) == ("applied", "paused", 5)
        assert len(fake.commands) == 1


async def test_accepted_command_ends_unknown_in_another_epoch(fake: FakeGateway) -> None:
    fake.answers[Pause] = lambda command: [Accepted(id=command.id, op="op-7")]
    async with attached(fake) as (link, seen):
        accepted: list[object] = []
        waiting = asyncio.create_task(link.command(Pause(), on_progress=accepted.append))
        await seen.until(lambda seen: bool(accepted))
        fake.restart()
        with pytest.raises(LinkLost, match="restarted"):
            await asyncio.wait_for(waiting, 20)


async def test_accepted_command_ends_unknown_with_its_engine(fake: FakeGateway) -> None:
    fake.answers[Pause] = lambda command: [Accepted(id=command.id, op="op-7")]
    async with attached(fake) as (link, seen):
        accepted: list[object] = []
        waiting = asyncio.create_task(link.command(Pause(), on_progress=accepted.append))
        await seen.until(lambda seen: bool(accepted))
        link.record.pid_start += 1
        with pytest.raises(LinkLost, match="ended before it answered"):
            await asyncio.wait_for(waiting, 20)


async def test_command_while_lost_is_not_sent(fake: FakeGateway) -> None:
    async with attached(fake) as (link, seen):
        fake.stop()
        await seen.until(lambda seen: seen.states[-1] == "lost")
        with pytest.raises(LinkLost, match="nothing happened") as lost:
            await link.command(Pause())
        assert not lost.value.sent
        with pytest.raises(LinkLost):
            await link.fetch("r-8f2c")


async def test_fetch_streams_by_offset(fake: FakeGateway) -> None:
    async with attached(fake) as (link, _):
        outcome = await link.command(Submit(prompt="Once"))
        assert isinstance(outcome, Outcome)
        assert outcome.request is not None
        text, tokens, finished = "", 0, False
        while not finished:
            part = await link.fetch(outcome.request, offset=tokens, text_offset=len(text))
            text, tokens, finished = text + part.text, tokens + len(part.token_ids), part.finished
        assert text == "".join(fake.words[:tokens])
        with pytest.raises(QueryFailed) as failed:
            await link.fetch("r-none")
        assert failed.value.code == "NOT_FOUND"


async def test_inspect_decodes_details(fake: FakeGateway) -> None:
    async with attached(fake) as (link, _):
        detail = await link.inspect("request", request="r-8f2c")
        assert isinstance(detail, RequestDetail)
        assert detail.block_table == [3, 4, 9]
        stacks = await link.inspect("stacks", stage=1)
        assert isinstance(stacks, StacksDetail)
        assert [stage.stage for stage in stacks.stages] == [1]


async def test_attached_times_out_with_the_reason(fake: FakeGateway) -> None:
    fake.deaf = True
    link = EngineLink(fake.record, timing=FAST)
    seen = Seen()
    await link.start(seen.take)
    await seen.until(lambda seen: any("does not answer within" in text for text in seen.texts))
    with pytest.raises(LinkLost, match="does not answer within"):
        await link.attached(0.05)
    await link.close()


async def test_attached_waits_for_an_engine_that_is_gone_after_it_has_refused_the_key(
    fake: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [KeyRefused("the engine does not allow the key"), SessionOver("it does not answer")]

    async def open_one(*_: object, **__: object) -> Session:
        raise ends.pop(0) if len(ends) > 1 else ends[0]

    monkeypatch.setattr(Session, "open", open_one)
    link = EngineLink(fake.record, timing=FAST)
    seen = Seen()
    await link.start(seen.take)
    with pytest.raises(AccessDenied):
        await link.attached(60)
    await seen.until(lambda seen: seen.texts[-1] == "it does not answer")
    with pytest.raises(LinkLost, match="it does not answer"):
        await link.attached(0.05)
    await link.close()


async def test_a_question_that_broke_with_its_connection_fails_at_once(fake: FakeGateway) -> None:
    fake.word_s = 60.0
    async with attached(fake) as (link, seen):
        outcome = await link.command(Submit(prompt="Once"))
        assert isinstance(outcome, Outcome)
        assert outcome.request is not None
        asking = asyncio.create_task(link.fetch(outcome.request, wait_ms=30_000))
        await seen.until(lambda seen: fake.asked > 0)
        epoch = fake.epoch
        fake.stop()
        fake.start(epoch)
        with pytest.raises(LinkLost):
            await asyncio.wait_for(asking, 20)
        await seen.until(lambda seen: seen.states[-1] == "live")


async def test_a_folder_that_cannot_be_trusted_is_lost_and_not_an_end(
    fake: FakeGateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with attached(fake) as (_, seen):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "ppconsole" / f"{fake.id}.json"))
        fake.deaf = fake.silent = True
        await seen.until(lambda seen: "set XDG_RUNTIME_DIR" in seen.texts[-1])
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        fake.deaf = fake.silent = False
        await seen.until(lambda seen: seen.states[-1] == "live")


async def test_a_message_that_waits_to_be_sent_fails_when_the_link_ends(fake: FakeGateway) -> None:
    async with attached(fake) as (link, _):
        session = link._session
        assert session is not None
        session._sockets.bulk.disconnect(fake.record.bulk_endpoint)  # nothing is connected: a send has to wait
        asking = asyncio.create_task(link.fetch("r-8f2c", wait_ms=30_000))
        await asyncio.sleep(0)
        fake.stop()
        with pytest.raises(LinkLost):
            await asyncio.wait_for(asking, 20)
        assert not asking.cancelled()


async def test_an_engine_that_ended_is_no_lost_link(fake: FakeGateway) -> None:
    keep_record(fake.record)
    (engine_folder(fake.id) / "core.log").write_text("its last words\n")
    async with attached(fake) as (link, seen):
        write_end(fake.id, EngineEnd(wall=time.time(), reason="stopped by ann: upgrade", clean=True))
        fake.stop()
        await seen.until(lambda seen: seen.states[-1] == "ended")
        assert seen.texts[-1].startswith("ended ") and seen.texts[-1].endswith(": stopped by ann: upgrade")
        count = len(seen.updates)
        await asyncio.sleep(1.0)
        assert len(seen.updates) == count, "it looks for a successor in silence"
        logs = await link.inspect("logs")
        assert logs.lines == ["core| its last words"], "the kept files answer"
        with pytest.raises(LinkLost, match="stopped by ann"):
            await link.command(Pause())
        with FakeGateway(name=fake.name) as successor:
            await seen.until(lambda seen: seen.states[-1] == "live")
            assert seen.snapshots[-1].engine.epoch == successor.epoch and "new-epoch" in seen.states
