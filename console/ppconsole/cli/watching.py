"""`status`, `watch`, `events`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from ppconsole.cli import exits
from ppconsole.cli.options import SECONDS, Common, common_options, filter_option
from ppconsole.cli.session import ATTACH_S, WAITS, attached, one_snapshot, opened, print_json, run, say

if TYPE_CHECKING:
    from ppengine.protocol.recording import Update
    from ppengine.protocol.severity import Level
    from ppengine.protocol.snapshot import Event, Snapshot

_CLEAR = "\x1b[H\x1b[J"


@click.command("status")
@common_options
@click.option("--requests", type=click.IntRange(0), default=20, show_default=True, help="Most requests to list.")
@filter_option
def status_command(common: Common, requests: int, wanted: str) -> None:
    """Print one picture of the engine.

    --json prints the whole snapshot, with --filter the requests that it matches alone.
    """
    choose = _chooser(wanted)
    snapshot = choose(run(lambda: one_snapshot(common)))
    if common.json:
        print_json(snapshot)
        return
    from ppconsole.cli.render import status_lines

    click.echo("\n".join(status_lines(snapshot, requests)))


@click.command("watch")
@common_options
@click.option("--interval", type=SECONDS, default=1.0, show_default=True, metavar="S", help="Seconds between pictures.")
@click.option("-n", "--count", type=click.IntRange(1), help="Stop after N of them.")
@click.option("--thresholds", is_flag=True, help="Print alarms of config.toml, and run their commands, in place of it.")
@filter_option
def watch_command(common: Common, interval: float, count: int | None, thresholds: bool, wanted: str) -> None:
    """Print the status again and again.

    Goes on over a lost link, and waits for a successor of the same name if the engine has ended. With -n an engine that
    ends is exit code 3, and no picture within --timeout seconds (10 without it) is 5. --json prints one snapshot, or
    alarm, a line.
    """
    if thresholds:
        from ppconsole.cli.alarms import watch_thresholds

        run(lambda: watch_thresholds(common, count))
        return
    choose = _chooser(wanted)
    run(lambda: _watch(common, interval, count, choose))


def _chooser(wanted: str) -> Callable[[Snapshot], Snapshot]:
    """Return a function that keeps the requests of a snapshot that a filter matches. Raises Failure."""
    import msgspec

    from ppconsole.cli.options import filter_of

    found = filter_of(wanted)

    def choose(snapshot: Snapshot) -> Snapshot:
        return msgspec.structs.replace(snapshot, requests=[each for each in snapshot.requests if found.matches(each)])

    return choose


class _NewSnapshots:
    """Snapshots of a watch. `counted`: it wants a number of them, so the end of the engine is its own."""

    def __init__(self, counted: bool) -> None:
        self._counted = counted
        self._newest: Snapshot | None = None
        self._ended = ""
        self._changed = asyncio.Event()

    def take(self, update: Update) -> None:
        """Take an update of the link."""
        from ppengine.protocol.recording import LinkState
        from ppengine.protocol.snapshot import Snapshot

        if isinstance(update, Snapshot):
            self._newest = update
            self._changed.set()
        elif isinstance(update, LinkState) and update.state == "ended" and self._counted:
            self._ended = update.text
            self._changed.set()
        elif isinstance(update, LinkState) and update.state not in ("connecting", "live"):
            say(f"{update.text}{WAITS}" if update.state == "ended" else f"{update.state}: {update.text}")

    async def next(self, limit_s: float) -> Snapshot:
        """Wait for one that is newer than this moment. Raises Failure, LinkLost if it is counted."""
        from ppconsole.link.source import LinkLost

        self._newest = None
        while self._newest is None:
            if self._ended:
                raise exits.Failure(f"the engine {self._ended}", exits.NO_ENGINE)
            self._changed.clear()
            try:
                async with asyncio.timeout(limit_s if self._counted else None):
                    await self._changed.wait()
            except TimeoutError:
                raise LinkLost(f"no snapshot within {limit_s:g} s", sent=False) from None
        return self._newest


async def _watch(common: Common, interval: float, count: int | None, choose: Callable[[Snapshot], Snapshot]) -> None:
    from ppconsole.cli.render import status_lines

    snapshots = _NewSnapshots(counted=count is not None)
    clear = sys.stdout.isatty() and not common.json
    async with attached(common, snapshots.take, slow=interval >= 1):
        printed = 0
        while count is None or printed < count:
            if printed:
                await asyncio.sleep(interval)
            chosen = choose(await snapshots.next(common.timeout or ATTACH_S))
            if common.json:
                print_json(chosen)
            else:
                click.echo((_CLEAR if clear else "") + "\n".join(status_lines(chosen)) + ("" if clear else "\n"))
            printed += 1


@click.command("events")
@common_options
@click.option("-f", "--follow", is_flag=True, help="Go on with what happens from now.")
@click.option("--last", type=click.IntRange(0, 10_000), default=100, show_default=True, help="How many older ones.")
@click.option(
    "--level",
    type=click.Choice(["info", "warning", "error"]),
    default="info",
    show_default=True,
    help="Least level: warning leaves out ends of requests, and all that went well.",
)
def events_command(common: Common, follow: bool, last: int, level: Level) -> None:
    """Print what happened, in order.

    An engine that has ended has those of its last hour. -f waits for a successor of the same name if it ends. --json
    prints one event a line.
    """
    run(lambda: _events(common, follow, last, level))


async def _events(common: Common, follow: bool, last: int, level: Level) -> None:
    from ppengine.protocol.recording import LinkState
    from ppengine.protocol.severity import is_at_least
    from ppengine.protocol.snapshot import Event

    from ppconsole.cli.render import event_line
    from ppconsole.link.ended import EndedSource
    from ppconsole.link.source import LinkLost

    events: asyncio.Queue[Event] = asyncio.Queue()

    def take(update: Update) -> None:
        if isinstance(update, Event):
            events.put_nowait(update)
        elif isinstance(update, LinkState) and update.state == "ended":
            if follow:  # otherwise it has ended before, and the first line says so
                say(f"{update.text}{WAITS}")
        elif isinstance(update, LinkState) and update.state not in ("connecting", "live"):
            say(f"{update.state}: {update.text}")

    def put(event: Event) -> None:
        if not is_at_least(event, level):
            return
        if common.json:
            print_json(event)
        else:
            click.echo(event_line(event))

    async with opened(common, take, slow=True, backlog=last if level == "info" else 0) as source:
        if isinstance(source, EndedSource):
            for event in source.events(last, level):
                put(event)
            return
        newest = (await source.attached()).event_seq
        seen = newest if last == 0 or level != "info" else 0
        for event in await source.newest_of(level, last, newest) if level != "info" else ():
            put(event)
        while follow or seen < newest:
            try:
                async with asyncio.timeout(None if follow else common.timeout or 10):
                    event = await events.get()
            except TimeoutError:
                raise LinkLost(f"events up to {newest} did not come; the last was {seen}", sent=False) from None
            seen = event.seq
            put(event)
