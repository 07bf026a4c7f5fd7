"""`attach`: open the console on an engine."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from ppconsole.cli import exits
from ppconsole.cli.options import engine_option, json_option, timeout_option
from ppconsole.cli.session import print_json, run

if TYPE_CHECKING:
    from ppengine.protocol.discovery import EndedEngine, EngineRecord


@click.command("attach")
@click.argument("named", metavar="[ENGINE]", required=False)
@engine_option
@click.option("--server-key", metavar="KEY", help="Key of the engine at tcp://HOST:PORT: `ppconsole key ls` there.")
@click.option("--read-only", is_flag=True, help="Watch; offer no verbs and send none.")
@json_option("Print the engines to choose from as JSON: a screen has none.")
@timeout_option("Give up if the engine does not answer within S seconds (exit code 5).")
def attach_command(
    named: str | None,
    engine: str | None,
    server_key: str | None,
    read_only: bool,
    as_json: bool,
    timeout: float | None,
) -> int:
    """Open the console on ENGINE.

    ENGINE may be left out: of several that run here, the screen lists them to choose from. It may be a context, or
    tcp://HOST:PORT on another host. Leaving never touches the engine. One that has ended is shown as it was at its
    end, and its last hour can be played again.
    """
    from ppengine.protocol.discovery import EndedEngine

    if named and engine and named != engine:
        raise exits.Failure(f"two engines are named, {named} and -e {engine}; attach takes one", exits.USAGE)
    wanted = named or engine
    if server_key and not (wanted or "").startswith("tcp://"):
        raise exits.Failure("--server-key belongs to an engine at tcp://HOST:PORT", exits.USAGE)
    record = _choose(wanted, as_json, server_key)
    if isinstance(record, EndedEngine):
        return _attach_ended(record, as_json, read_only=read_only)
    if record is None:
        from ppconsole.app import run_console

        return run_console(None, read_only=read_only, title="")
    if as_json:
        text = f"attach --json: a screen has no JSON; see ppconsole -e {record.id} status --json"
        raise exits.Failure(text, exits.USAGE)
    if not has_terminal():
        text = "attach needs a terminal; without one: ppconsole status, watch, events -f"
        raise exits.Failure(text, exits.USAGE)
    if timeout is not None:
        run(lambda: _answers(record, timeout))
    return open_console(record, read_only=read_only)


def _attach_ended(ended: EndedEngine, as_json: bool, *, read_only: bool) -> int:
    """Open the console on the kept files of an engine; without a terminal print the usage error, with its end.

    `read_only` is for the live engine that the operator may choose next.
    """
    from ppconsole.app import run_console
    from ppconsole.link.ended import EndedSource
    from ppconsole.model.endings import ended_text

    text = ended_text(ended, time.time())
    if as_json:
        raise exits.Failure(f"{text}; a screen has no JSON: ppconsole -e {ended.record.id} status --json", exits.USAGE)
    if not has_terminal():
        raise exits.Failure(f"{text}; without a terminal: ppconsole -e {ended.record.id} explain", exits.USAGE)
    return run_console(EndedSource(ended), read_only=read_only, title="")


async def _answers(record: EngineRecord, timeout: float) -> None:
    """Raise LinkLost unless the engine answers within `timeout` seconds."""
    from ppconsole.link.engine_link import EngineLink

    link = EngineLink(record, backlog=0, passing=True)
    await link.start(lambda update: None)
    try:
        await link.attached(timeout)
    finally:
        await link.close()


def open_console(record: EngineRecord, *, read_only: bool = False, note: str = "") -> int:
    """Run the console on an engine until the operator leaves; return its exit code. The screen shows `note`."""
    from ppconsole.app import run_console
    from ppconsole.link.engine_link import WARNINGS, EngineLink

    # The display changes once a second, and nine snapshots of ten would be decoded for nothing. A verdict or a
    # stage that died comes at once in both rhythms.
    link = EngineLink(record, warnings=WARNINGS, read_only=read_only, slow=True)
    return run_console(link, read_only=read_only, title=note)


def has_terminal() -> bool:
    """Whether a full screen can be drawn and keys read."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _choose(wanted: str | None, as_json: bool, server_key: str | None = None) -> EngineRecord | EndedEngine | None:
    """Return the engine to open; None if there are several to choose from on the screen. Raises Failure."""
    from ppengine.protocol.discovery import RuntimeDirError

    from ppconsole.link.contexts import ContextError
    from ppconsole.link.find import NoEngine, SeveralEngines, find_any

    try:
        return find_any(wanted, server_key)
    except SeveralEngines as several:
        if as_json or not has_terminal():
            _print_engines(several.records, as_json)
            raise exits.Failure(str(several), exits.USAGE) from None
        return None
    except ContextError as error:
        raise exits.Failure(str(error), exits.USAGE) from None
    except NoEngine as error:
        if as_json:
            print_json([])
        raise exits.Failure(str(error), exits.NO_ENGINE) from None
    except RuntimeDirError as error:
        raise exits.Failure(str(error)) from None


def _print_engines(records: list[EngineRecord], as_json: bool) -> None:
    from ppconsole.cli.render import engine_lines

    if as_json:
        print_json(records)
    else:
        click.echo("\n".join(engine_lines([(record, "-") for record in records], time.time())))
