"""`show`, `logs`, `explain`, `stacks`: details on demand."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ppconsole.cli import exits
from ppconsole.cli.options import Common, common_options, filter_of
from ppconsole.cli.session import SEE_WHY, FirstSnapshot, find_any, named, one_snapshot, opened, print_json, run, say

if TYPE_CHECKING:
    from ppengine.protocol.discovery import EndedEngine, EngineRecord
    from ppengine.protocol.finished import FinishedInfo
    from ppengine.protocol.snapshot import Snapshot

    from ppconsole.link.kept_requests import KeptRequest
    from ppconsole.link.source import Detail, QueryFailed, Source


_EXPLAIN_S = 3.0
"""Seconds for the gateway to answer `explain`; after that its host is looked at."""


@click.command("show")
@click.argument("request")
@common_options
def show_command(common: Common, request: str) -> None:
    """Print one REQUEST in detail.

    REQUEST is an id, a unique beginning of one, or the x-request-id of its HTTP client. It has its block table, tokens,
    timing, and why it waits. If it has ended and its client has its output, the figures of its end are left: of the
    newest 1,000, and on the engine's host of the last hour. An engine that has ended has its last known state: a
    picture of the last hour or of an incident, and its events.
    """
    from ppengine.protocol.finished import FinishedInfo
    from ppengine.protocol.inspection import RequestDetail

    from ppconsole.cli.render import detail_lines
    from ppconsole.link.kept_requests import KeptRequest

    detail = run(lambda: _request_detail(common, request))
    if common.json or not isinstance(detail, (RequestDetail, FinishedInfo, KeptRequest)):
        print_json(detail)
    elif isinstance(detail, KeptRequest):
        click.echo("\n".join(_kept_lines(detail, time.time())))
    elif isinstance(detail, FinishedInfo):
        click.echo("\n".join(_ended_lines(detail, time.time())))
    else:
        click.echo("\n".join(detail_lines(detail)))


async def _request_detail(common: Common, text: str) -> Detail | FinishedInfo:
    """Return the detail of the request that `text` names. Raises Failure, LinkLost, QueryFailed."""
    from ppconsole.link.source import QueryFailed

    first = FirstSnapshot(common)
    async with opened(common, first.take) as source, asyncio.timeout(common.timeout):
        try:
            return await source.inspect("request", request=text)
        except QueryFailed as error:
            if error.code != "NOT_FOUND" or not (source.live or first.arrived):
                raise
            return await _detail_of_part(source, await first.get(), text, error)


async def _detail_of_part(source: Source, snapshot: Snapshot, text: str, failed: QueryFailed) -> Detail | FinishedInfo:
    """Return the detail of a request that a part of its id names, or the figures of its end if no more is kept.

    Raises Failure, LinkLost, QueryFailed.
    """
    from ppconsole.link.finished_search import find_recorded, kept_text, list_ended
    from ppconsole.link.source import QueryFailed
    from ppconsole.model.request_names import means

    listed = await list_ended(source)
    if (found := named(text, snapshot, [each.id for each in listed])) != text:
        try:
            return await source.inspect("request", request=found)
        except QueryFailed as error:
            if error.code != "NOT_FOUND":
                raise
    if not source.live:
        raise failed
    if (ended := next((each for each in listed if each.id == found), None)) is not None:
        return ended
    recorded = await find_recorded(source, snapshot, partial(means, text))
    found = named(text, snapshot, [each.id for each in recorded.ended])
    if (ended := next((each for each in recorded.ended if each.id == found), None)) is not None:
        return ended
    raise QueryFailed(failed.code, f"{failed}; {kept_text(source, listed, recorded.since)}")


def _ended_lines(ended: FinishedInfo, now: float) -> list[str]:
    """Return the figures that stay of a request that has ended. `now`: Unix seconds."""
    from ppconsole.view.kept_request import end_fields

    lines = [f"{name:<10}{text}" for name, text in end_fields(ended, now)]
    return [*lines, f"{'':<10}its output, blocks and history are not kept"]


def _kept_lines(kept: KeptRequest, now: float) -> list[str]:
    """Return the last known state of a request, with its events. `now`: Unix seconds."""
    from ppconsole.cli.render import event_line
    from ppconsole.view.kept_request import NOT_KEPT, kept_fields

    lines = [f"{name:<10}{text}" for name, text in kept_fields(kept, now)]
    events = [f"    {event_line(event)}" for event in kept.events]
    return [*lines, f"{'':<10}{NOT_KEPT}", *(["events:"] if events else []), *events]


@click.command("finished")
@common_options
@click.option("--last", type=click.IntRange(1), default=20, show_default=True, help="Most requests to list.")
@click.option("--filter", "wanted", default="", metavar="FILTER", help="List those that it matches: 'ttft>1s'.")
def finished_command(common: Common, last: int, wanted: str) -> None:
    """Print the requests that have ended, the newest first.

    The engine keeps 1,000. --json prints all that match, one a line.
    """
    from ppengine.protocol.inspection import FinishedDetail

    from ppconsole.cli.render import finished_lines
    from ppconsole.model.endings import record_limits

    choose = filter_of(wanted, finished=True)
    detail = inspect(common, "finished")
    assert isinstance(detail, FinishedDetail)
    found = [request for request in detail.requests if choose.matches(request)]
    if common.json:
        for request in found:
            print_json(request)
        return
    click.echo("\n".join(finished_lines(found[:last])))
    if len(found) > last:
        click.echo(f"... and {len(found) - last} more")
    if limits := record_limits(detail):
        say(limits)
    if not found:
        say(f"none of {len(detail.requests)} ended requests matches {wanted}" if wanted else "no request has ended")


@click.command("logs")
@common_options
@click.option("--stage", type=click.IntRange(0), metavar="K", help="Only this stage.")
@click.option("--lines", type=click.IntRange(1, 10_000), default=200, show_default=True)
def logs_command(common: Common, stage: int | None, lines: int) -> None:
    """Print the newest log lines of the engine."""
    from ppengine.protocol.inspection import LogsDetail

    from ppconsole.model.safe import clean

    detail = inspect(common, "logs", stage=stage, lines=lines)
    if common.json or not isinstance(detail, LogsDetail):
        print_json(detail)
    else:
        for line in detail.lines:
            click.echo(clean(line))
        if not detail.lines:
            say("nothing was logged")


@click.command("stacks")
@common_options
@click.option("--stage", type=click.IntRange(0), metavar="K", help="Only this stage.")
@click.option("--core", is_flag=True, help="Only the engine core, which schedules.")
def stacks_command(common: Common, stage: int | None, core: bool) -> None:
    """Print the call stack of every thread of stages and core.

    A stack that several stages share is printed once.
    """
    from ppengine.protocol.inspection import StacksDetail

    from ppconsole.cli.render import stacks_lines

    if core and stage is not None:
        raise click.UsageError("either --stage or --core")
    detail = inspect(common, "stacks", stage=stage, core=core)
    if not isinstance(detail, StacksDetail):
        raise exits.Failure(f"the engine answered with {type(detail).__name__}")
    if common.json:
        print_json(detail)
    else:
        click.echo("\n".join(stacks_lines(detail)))
    if detail.all and not any(stack.text for stack in detail.all):
        raise exits.Failure(detail.all[0].error)


@click.command("explain")
@common_options
def explain_command(common: Common) -> int:
    """Print each fault with its cause.

    Exit code 10: there is a fault, or one that healed itself within the last 5 s; 0: there is none. Without one, it
    names the load: requests that wait, the users they are of, and calls that are refused. If the gateway
    does not answer, its host does: from /proc and the rings. An engine that has ended is explained by its kept files:
    why it ended, and the consequences; 0 if it was stopped on request.
    """
    from ppengine.protocol.discovery import EndedEngine
    from ppengine.protocol.snapshot import is_beside

    from ppconsole.cli.render import explain_lines
    from ppconsole.model.endings import incident_words
    from ppconsole.model.facts import root_verdicts, unseen_stages
    from ppconsole.model.pressure import pressure_lines
    from ppconsole.model.safe import clean

    found = find_any(common.engine)
    if isinstance(found, EndedEngine):
        return _explain_end(found, common.json)
    try:
        named = common.engine if found.remote else found.id
        snapshot = run(lambda: one_snapshot(Common(named, common.json, common.timeout or _EXPLAIN_S)))
    except exits.Failure as error:
        if error.exit_code != exits.TIMEOUT or found.remote:
            raise
        return _explain_host(found, str(error).partition(SEE_WHY)[0], common.json)
    engine, roots = snapshot.engine, root_verdicts(snapshot)
    faulty = bool(roots) or engine.state == "degraded"
    option = f"-e {found.id} " if common.engine else ""
    # A fault of a stage makes all requests wait; one of a process beside the stages does not.
    load = pressure_lines(snapshot, option) if all(is_beside(each.cause, each.stage) for each in roots) else []
    if common.json:
        causes: dict[str, object] = {"verdicts": snapshot.verdicts, "waits": snapshot.waits}
        causes |= {"incident": snapshot.incident, "pressure": load}
        print_json({"fault": faulty, "engine_state": engine.state, **causes})
    elif snapshot.verdicts:
        click.echo("\n".join([*explain_lines(snapshot), *(f"  {line}" for line in load)]))
    elif faulty:
        click.echo(f"{engine.state} and no verdict: {clean(engine.message) or 'no reason is given'}")
    else:
        message = f": {clean(engine.message)}" if engine.message else ""
        click.echo(f"no fault: {engine.state}, step {engine.step}, {snapshot.requests_total} requests{message}")
        if unseen := unseen_stages(snapshot):
            click.echo(f"  but no samples of {unseen}; the agent may hang (ppconsole logs)")
        for line in load:
            click.echo(f"  {line}")
        if (last := snapshot.incident) is not None:
            words = f"{incident_words(last, time.time())}: ppconsole {option}incidents {last.number}"
            click.echo(f"  last fault {words}")
    return exits.FAULT_FOUND if faulty else exits.DONE


def _explain_host(record: EngineRecord, why: str, as_json: bool) -> int:
    """Print what the engine's host knows of it."""
    from ppconsole.cli.host_report import explain

    lines, document = explain(record, why)
    if as_json:
        print_json(document)
    else:
        click.echo("\n".join(lines))
    return exits.FAULT_FOUND


def _explain_end(ended: EndedEngine, as_json: bool) -> int:
    """Print why an engine ended: its end, then the incident that it ended in."""
    from ppengine.protocol.incidents import newest_incident

    from ppconsole.cli.render import end_lines

    incident = newest_incident(ended.folder)
    if as_json:
        print_json({"fault": not ended.end.clean, "engine_state": "ended", "end": ended.end, "incident": incident})
    else:
        click.echo("\n".join(end_lines(ended, incident, time.time())))
    return exits.DONE if ended.end.clean else exits.FAULT_FOUND


def inspect(common: Common, what: Any, **options: Any) -> Detail:
    """Ask the engine for one kind of detail. Raises Failure, LinkLost, QueryFailed."""

    async def ask() -> Detail:
        async with opened(common, slow=True) as link, asyncio.timeout(common.timeout):
            return await link.inspect(what, **options)

    return run(ask)
