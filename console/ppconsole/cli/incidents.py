"""`incidents`: faults that were, of engines that run and of those that have ended."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from ppconsole.cli import exits
from ppconsole.cli.options import Common, common_options
from ppconsole.cli.session import find_any, find_far, print_json, say

if TYPE_CHECKING:
    from ppengine.protocol.discovery import EngineRecord
    from ppengine.protocol.incidents import Incident

    from ppconsole.link.incident_source import Listed


@click.command("incidents")
@click.argument("incident", metavar="[ID]", required=False)
@common_options
@click.option("--all", "everything", is_flag=True, help="Those of all engines of this host, alive and ended.")
def incidents_command(common: Common, incident: str | None, everything: bool) -> None:
    """List the faults that were, or print one in full.

    Earlier engines of the same name are included. ID is NUMBER, or ENGINE/NUMBER for another engine.
    """
    from ppengine.protocol.kept_files import state_dir

    from ppconsole.cli.incident_text import incident_lines, table_lines

    if incident is not None:
        listed, now = find_incident(common, incident, minutes=False), time.time()
        found = _read(listed)
        if common.json:
            print_json(found)
        else:
            click.echo("\n".join(incident_lines(listed, found, now)))
        return
    rows = _listing(common, everything)
    if common.json:
        print_json([{"id": one.id, "engine": one.engine.id, "name": one.engine.name, "info": one.info} for one in rows])
    elif rows:
        click.echo("\n".join(table_lines(rows, time.time())))
    else:
        here = (everything and common.engine is None) or not _meant(common.engine).remote
        say(f"no incident was kept in {state_dir()}" if here else "no incident was kept on its host")


def _listing(common: Common, everything: bool = False) -> list[Listed]:
    """Return the incidents of the engine that is meant, or of all on this host. Raises Failure."""
    from ppconsole.cli.fetching import fetch_list
    from ppconsole.link.incident_source import list_incidents

    if everything and common.engine is None:
        return list_incidents(None, everything=True)
    meant = _meant(common.engine)
    return fetch_list(common) if meant.remote else list_incidents(meant, everything=everything)


def find_incident(common: Common, wanted: str, *, minutes: bool = True) -> Listed:
    """Return the incident that `wanted` names. ENGINE/NUMBER needs no other name of the engine. Raises Failure.

    The files of one on another host are copied: its record and, with `minutes`, the recordings around it.
    """
    from ppconsole.cli.fetching import fetch_incident
    from ppconsole.link.incident_source import IncidentError, choose

    try:
        everything = "/" in wanted and find_far(common.engine) is None
        listed = choose(_listing(common, everything), wanted)
    except IncidentError as error:
        raise exits.Failure(str(error), exits.NOT_FOUND) from None
    if listed.engine.remote:
        fetch_incident(common, listed, minutes=minutes)
    return listed


def _read(listed: Listed) -> Incident:
    from ppconsole.link.incident_source import IncidentError

    try:
        return listed.read()
    except IncidentError as error:
        raise exits.Failure(str(error)) from None


def _meant(engine: str | None) -> EngineRecord:
    from ppengine.protocol.discovery import EndedEngine

    found = find_any(engine)
    return found.record if isinstance(found, EndedEngine) else found
