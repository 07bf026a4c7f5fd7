"""`ls`: the engines of this user on this host."""

from __future__ import annotations

import asyncio
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
    from ppengine.protocol.discovery import RuntimeDirError, list_engines

    try:
        records = list_engines()
    except RuntimeDirError as error:
        raise exits.Failure(str(error)) from None
    states = await asyncio.gather(*(_state(record, timeout) for record in records))
    return list(zip(records, states, strict=True))


async def _state(record: EngineRecord, timeout: float) -> str:
    """Return the state in the engine's first snapshot, `no answer` if none came in time."""
    from ppconsole.cli.options import Common
    from ppconsole.cli.session import one_snapshot
    from ppconsole.link.source import LinkLost

    try:
        snapshot = await one_snapshot(Common(engine=record.id, timeout=timeout))
    except (LinkLost, exits.Failure):
        return "no answer"
    return snapshot.engine.state
