"""`ls`: the engines of this user on this host."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from ppconsole.cli import exits
from ppconsole.cli.options import SECONDS, json_option
from ppconsole.cli.session import print_json, run, say

if TYPE_CHECKING:
    from ppengine.protocol.discovery import EngineRecord


@click.command("ls")
@json_option()
@click.option("--timeout", type=SECONDS, default=2.0, metavar="S", show_default=True, help="Wait for their states.")
def ls_command(as_json: bool, timeout: float) -> None:
    """List the engines that run here.

    The files of dead engines are removed.
    """
    from ppconsole.cli import render

    rows = run(lambda: _states(timeout))
    if as_json:
        import msgspec

        print_json([{**msgspec.structs.asdict(record), "state": state} for record, state in rows])
    elif rows:
        click.echo("\n".join(render.engine_lines(rows, time.time())))
    else:
        say("no engine runs here; start one: ppconsole demo, or ppconsole serve PROFILE")


async def _states(timeout: float) -> list[tuple[EngineRecord, str]]:
    from ppengine.protocol.discovery import RuntimeDirError

    from ppconsole.link.survey import survey

    try:
        return await survey(timeout)
    except RuntimeDirError as error:
        raise exits.Failure(str(error)) from None
