"""`ls`: the engines of this user on this host."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from ppconsole.cli import exits
from ppconsole.cli.options import SECONDS, json_option
from ppconsole.cli.session import print_json, run, say

if TYPE_CHECKING:
    from ppconsole.link.survey import Surveyed


@click.command("ls")
@json_option()
@click.option("--all", "ended", is_flag=True, help="Also engines that have ended, as long as their files are kept.")
@click.option("--timeout", type=SECONDS, default=2.0, metavar="S", show_default=True, help="Wait for their states.")
def ls_command(as_json: bool, ended: bool, timeout: float) -> None:
    """List the engines that run here.

    The run folders of ended engines are removed; their logs, incidents and last hour are kept.
    """
    from ppengine.protocol.discovery import ended_engines

    from ppconsole.cli import render

    rows = run(lambda: _states(timeout))
    past = ended_engines() if ended else []
    if as_json:
        import msgspec

        live = [{**msgspec.structs.asdict(record), "state": state} for record, state, _ in rows]
        old = [{**msgspec.structs.asdict(one.record), "state": "ended", "end": one.end} for one in past]
        print_json([*live, *old])
        return
    if rows:
        click.echo("\n".join(render.engine_lines([(record, word) for record, _, word in rows], time.time())))
    if past:
        click.echo("\n".join([*([""] if rows else []), *render.ended_lines(past, time.time())]))
    if not rows and not past:
        more = "; those that have ended: ppconsole ls --all" if ended_engines() else ""
        say(f"no engine runs here; start one: ppconsole demo, or ppconsole serve PROFILE{more}")


async def _states(timeout: float) -> list[Surveyed]:
    from ppengine.protocol.discovery import RuntimeDirError

    from ppconsole.link.survey import survey

    try:
        return await survey(timeout)
    except RuntimeDirError as error:
        raise exits.Failure(str(error)) from None
