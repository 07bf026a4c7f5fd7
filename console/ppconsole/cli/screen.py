"""`attach`: open the console on an engine."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from ppconsole.cli import exits
from ppconsole.cli.options import Common, engine_option, json_option, timeout_option
from ppconsole.cli.session import attached, print_json, run

if TYPE_CHECKING:
    from ppengine.protocol.discovery import EngineRecord


@click.command("attach")
@click.argument("named", metavar="[ENGINE]", required=False)
@engine_option
@click.option("--read-only", is_flag=True, help="Watch; offer no verbs and send none.")
@json_option("Print the engines to choose from as JSON: a screen has none.")
@timeout_option("Give up if the engine does not answer within S seconds (exit code 5).")
def attach_command(named: str | None, engine: str | None, read_only: bool, as_json: bool, timeout: float | None) -> int:
    """Open the console on ENGINE.

    ENGINE may be left out when one runs here. Leaving never touches the engine.
    """
    if named and engine and named != engine:
        raise exits.Failure(f"two engines are named, {named} and -e {engine}; attach takes one", exits.USAGE)
    record = _choose(named or engine, as_json)
    if as_json:
        text = f"attach --json: a screen has no JSON; see ppconsole -e {record.id} status --json"
        raise exits.Failure(text, exits.USAGE)
    if not has_terminal():
        text = "attach needs a terminal; without one: ppconsole status, watch, events -f"
        raise exits.Failure(text, exits.USAGE)
    if timeout is not None:
        run(lambda: _answers(record, timeout))
    return open_console(record, read_only=read_only)


async def _answers(record: EngineRecord, timeout: float) -> None:
    """Raise LinkLost unless the engine answers within `timeout` seconds."""
    async with attached(Common(engine=record.id, timeout=timeout), passing=True):
        pass


def open_console(record: EngineRecord, *, read_only: bool = False, note: str = "") -> int:
    """Run the console on an engine until the operator leaves; return its exit code. The screen shows `note`."""
    from ppconsole.app import run_console
    from ppconsole.link.engine_link import EngineLink

    # The display changes once a second, and nine snapshots of ten would be decoded for nothing. A verdict or a
    # stage that died comes at once in both rhythms.
    link = EngineLink(record, read_only=read_only, slow=True)
    return run_console(link, read_only=read_only, title=note)


def has_terminal() -> bool:
    """Whether a full screen can be drawn and keys read."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _choose(wanted: str | None, as_json: bool) -> EngineRecord:
    """Return the engine to open; of several, the one that the operator picks. Raises Failure."""
    from ppengine.protocol.discovery import RuntimeDirError

    from ppconsole.link.find import NoEngine, SeveralEngines, find_engine

    try:
        return find_engine(wanted)
    except SeveralEngines as several:
        return _pick(several.records, str(several), as_json)
    except NoEngine as error:
        if as_json:
            print_json([])
        raise exits.Failure(str(error), exits.NO_ENGINE) from None
    except RuntimeDirError as error:
        raise exits.Failure(str(error)) from None


def _pick(records: list[EngineRecord], text: str, as_json: bool) -> EngineRecord:
    """Let the operator choose by number; without a terminal print the list and end with a usage error."""
    from ppconsole.cli.render import engine_lines

    if as_json:
        print_json(records)
        raise exits.Failure(text, exits.USAGE)
    lines = engine_lines([(record, "-") for record in records], time.time())
    if not has_terminal():
        click.echo("\n".join(lines))
        raise exits.Failure(text, exits.USAGE)
    for number, line in enumerate(lines):
        click.echo(f"{number or '':>3} {line}", err=True)
    choice: int = click.prompt("attach to", type=click.IntRange(1, len(records)), err=True)
    return records[choice - 1]
