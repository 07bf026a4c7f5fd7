"""`export`: one file with the present state of an engine."""

from __future__ import annotations

import asyncio
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ppconsole.cli import exits
from ppconsole.cli.incidents import find_incident
from ppconsole.cli.options import Common, NewFile, engine_option, json_option, timeout_option
from ppconsole.cli.session import ATTACH_S, opened, print_json, run, say

if TYPE_CHECKING:
    from ppengine.protocol.recording import Update
    from ppengine.protocol.snapshot import Event, Snapshot

    from ppconsole.link.incident_source import Listed

EVENTS_MOST = 10_000


@click.command("export")
@click.argument("file", type=NewFile())
@engine_option
@click.option("--incident", metavar="ID", help="A fault that was, in place of the present state.")
@click.option("--with-text", is_flag=True, help="Prompts, outputs and log lines, too.")
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@json_option("Print path and parts as JSON.")
@timeout_option("Give up attaching after S seconds.")
def export_command(
    file: Path, engine: str | None, incident: str | None, with_text: bool, force: bool, as_json: bool,
    timeout: float | None,
) -> None:  # fmt: skip
    """Write the state of the engine to FILE, a zip of JSON.

    The last 64 steps of every thread, stacks, the record of the newest fault, snapshot, events, audit lines, findings,
    versions and profile. No prompt and no output, unless --with-text is given. `ppconsole replay FILE` shows it.
    """
    from ppconsole.link.export import ExportError, write

    if file.exists() and not force:
        raise exits.Failure(f"{file} exists; name a new file, or say --force")
    if incident is not None:
        listed = find_incident(Common(engine, timeout=timeout), incident)
        files, missing = run(lambda: _gather_incident(listed, with_text))
    else:
        files, missing = run(lambda: _gather(Common(engine, timeout=timeout), with_text))
    try:
        size = write(file, files, force=force)
    except ExportError as error:
        raise exits.Failure(str(error)) from None
    if as_json:
        print_json({"file": str(file), "bytes": size, "parts": sorted(files), "missing": missing})
        return
    for what, why in missing.items():
        say(f"not in it: {what}: {why}")
    say(f"{size} bytes in {file}; see it: ppconsole replay {file}")


async def _gather(common: Common, with_text: bool) -> tuple[dict[str, bytes], dict[str, str]]:
    import msgspec
    from ppengine.protocol.snapshot import Event, Snapshot

    from ppconsole.link.export import gather
    from ppconsole.link.source import LinkLost

    first: asyncio.Future[Snapshot] = asyncio.get_running_loop().create_future()
    events: list[Event] = []

    def take(update: Update) -> None:
        if isinstance(update, Snapshot) and not first.done():
            first.set_result(update)
        elif isinstance(update, Event):
            events.append(update)

    async with opened(common, take, backlog=EVENTS_MOST) as link:
        if not link.live and not first.done():
            raise exits.Failure("no picture of it was kept", exits.NOT_FOUND)
        try:
            async with asyncio.timeout(common.timeout or ATTACH_S):
                snapshot = await first
                while link.live and snapshot.event_seq and not (events and events[-1].seq >= snapshot.event_seq):
                    await asyncio.sleep(0.02)
        except TimeoutError:
            if not first.done():
                raise LinkLost("attached, but no snapshot came", sent=False) from None
            say("not all events came; the export has those that did")
        files = await gather(link, first.result(), events, with_text=with_text, program=version())
    manifest = msgspec.json.decode(files["manifest.json"])
    return files, manifest["missing"]


async def _gather_incident(listed: Listed, with_text: bool) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return the files of an export of an incident: as `_gather`, with the record of the fault and its events."""
    import msgspec

    from ppconsole.link.export import gather
    from ppconsole.link.incident_source import IncidentError, IncidentSource

    try:
        source = IncidentSource(listed, at_fault=True)
    except IncidentError as error:
        raise exits.Failure(str(error)) from None
    picture = source.history.at(source.position).snapshot
    if picture is None:
        raise exits.Failure(f"no picture of incident {listed.id} was kept", exits.NOT_FOUND)
    files = await gather(source, picture, source.incident.events, with_text=with_text, program=version())
    await source.close()
    return files, msgspec.json.decode(files["manifest.json"])["missing"]


def version() -> str:
    """Return the version of this program."""
    try:
        return f"ppconsole {metadata.version('ppconsole')}"
    except metadata.PackageNotFoundError:
        return "ppconsole from source"
