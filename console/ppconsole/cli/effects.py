"""Verbs with an effect, one command a row of the verb table: each is sent once and has one end."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
from ppengine.protocol.verb_table import ROWS, Row

from ppconsole.cli import exits
from ppconsole.cli.options import Common, Effect, effect_options
from ppconsole.cli.session import attached, attached_with_snapshot, has_ended, print_json, run, say
from ppconsole.model import memory_change
from ppconsole.model.grammar import command_class, parameters, words_of

if TYPE_CHECKING:
    from ppengine.protocol.control import Accepted, Deferred, Outcome, Refused
    from ppengine.protocol.verbs import Verb

    from ppconsole.link.engine_link import EngineLink

STOP_S = 10.0
"""Seconds within which the engine must end at a stop; if the link breaks meanwhile, the stop was applied."""


def verb_command(name: str) -> click.Command:
    """Return the command of a verb, generated from its row."""
    row = ROWS[name]

    @click.command(name, cls=command_class(row), params=parameters(row), help=help_of(row))
    @effect_options
    def command(common: Common, effect: Effect, **values: Any) -> int:
        if memory_change.changes(values):
            return run(lambda: _change_memory(values, common, effect))
        return carry_out(_built(name, values), common, effect)

    return command


def _built(name: str, values: dict[str, Any]) -> Verb:
    """Return a verb. Raises Failure for values that it refuses."""
    from ppengine.protocol.verbs import build

    try:
        return build(name, values)
    except ValueError as error:
        raise exits.Failure(str(error), exits.USAGE) from None


async def _change_memory(values: dict[str, Any], common: Common, effect: Effect) -> int:
    """Change the present memory; another change meanwhile is a conflict, as this one would add to it."""
    async with attached_with_snapshot(common) as (link, snapshot):
        try:
            verb = _built("set-memory", memory_change.resolved(values, snapshot))
        except ValueError as error:
            raise exits.Failure(str(error), exits.USAGE) from None
        engine, (change,) = snapshot.engine, memory_change.changes(values)
        then = f"{engine.memory_utilization:g} -> {words_of(verb)[-1]}"
        say(f"{change.text}: utilization {then}, revision {engine.memory_revision}")
        seen = engine.memory_revision if effect.if_rev is None else effect.if_rev
        return await send(link, verb, common, replace(effect, if_rev=seen))


def help_of(row: Row) -> str:
    """Return the help text of a verb."""
    line = f"{row.help[0].upper()}{row.help[1:]}."
    return f"{line}\n\n    {row.more}" if row.more else line


def carry_out(verb: Verb, common: Common, effect: Effect) -> int:
    """Send one verb, print its answers, and return the exit code."""
    return run(lambda: _carry_out(verb, common, effect))


async def _carry_out(verb: Verb, common: Common, effect: Effect) -> int:
    async with attached(common, slow=True, passing=True) as link:
        return await send(link, verb, common, effect)


async def send(link: EngineLink, verb: Verb, common: Common, effect: Effect) -> int:
    """Send one verb on a link, print its answers, and return the exit code. Raises Failure."""
    from ppengine.protocol.control import Accepted, Refused
    from ppengine.protocol.verbs import label_of, row_of

    from ppconsole.link.source import LinkLost

    row, name = row_of(verb), label_of(verb)
    accepted: asyncio.Future[Accepted] = asyncio.get_running_loop().create_future()

    def progress(step: Accepted | Deferred) -> None:
        if isinstance(step, Accepted):
            if not accepted.done():
                accepted.set_result(step)
            say(f"{name} accepted ({step.op})")
        else:
            say(f"{name} deferred: {step.text}")

    command = asyncio.create_task(
        link.command(
            verb,
            dry_run=effect.dry_run,
            if_rev=effect.if_rev,
            reason=effect.reason,
            override=effect.override,
            on_progress=progress,
            timeout=common.timeout or row.ends_within_s,
        )
    )
    waits: list[asyncio.Future[Any]] = [command] if effect.wait or effect.dry_run else [command, accepted]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not command.done():
            return _show_accepted(name, accepted.result(), common)
        end = command.result()
    except LinkLost as lost:
        if row.ends_engine and lost.sent and await has_ended(link.record, STOP_S):
            return _show_stopped(link, common)
        text = _unknown(str(lost), verb, taken=accepted.done()) if lost.sent else str(lost)
        raise exits.Failure(text, exits.TIMEOUT) from None
    finally:
        command.cancel()
        await asyncio.gather(command, return_exceptions=True)
    if isinstance(end, Refused):
        return show_refused(end, name, common)
    code = show_outcome(end, name, common)
    ends = row.ends_engine and end.state == "applied" and not link.record.remote
    within_s = common.timeout or STOP_S
    if ends and not await has_ended(link.record, within_s):
        # Its name is free, and its memory, behind its end alone.
        from ppconsole.cli.host_report import held_up

        text = f"engine {link.record.id} is stopping and has not ended in {within_s:g} s"
        raise exits.Failure("; ".join([text, *held_up(link.record)]), exits.TIMEOUT)
    return code


def show_refused(refused: Refused, name: str, common: Common) -> int:
    """Print a refusal and return its exit code."""
    if common.json:
        print_json(refused)
    say(f"error: {name} refused: {refused.text} ({refused.code})")
    return exits.OF_CODE[refused.code]


def _show_accepted(name: str, accepted: Accepted, common: Common) -> int:
    from ppconsole.model.safe import clean

    if common.json:
        print_json(accepted)
    else:
        click.echo(clean(f"{name} accepted as {accepted.op}"))
    return exits.DONE


def show_outcome(outcome: Outcome, name: str, common: Common) -> int:
    """Print an outcome and return its exit code; a request that could not be done is a conflict."""
    from ppconsole.model.safe import clean

    if common.json:
        print_json(outcome)
    else:
        at = f" at step {outcome.step}" if outcome.step is not None else ""
        revision = f" (revision {outcome.revision})" if outcome.revision is not None else ""
        click.echo(f"{name} {outcome.state}{at}{revision}: {clean(outcome.text)}")
        for line in outcome.plan:
            if line != outcome.text:
                click.echo(f"  {clean(line)}")
        for conflict in outcome.conflicts:
            click.echo(f"  {clean(f'{conflict.request}: {conflict.text} ({conflict.code})')}")
    return exits.CONFLICT if outcome.conflicts else exits.OF_STATE[outcome.state]


def _show_stopped(link: EngineLink, common: Common) -> int:
    from ppconsole.model.safe import clean

    if common.json:
        print_json({"type": "outcome", "state": "applied", "text": "the engine has ended"})
    else:
        click.echo(clean(f"stop applied: engine {link.record.id} ({link.record.name}) has ended"))
    return exits.DONE


def _unknown(text: str, verb: Verb, *, taken: bool) -> str:
    request = getattr(verb, "request", None)
    check = f"ppconsole show {request}" if request else "ppconsole status"
    fate = "it may have happened, or happen yet" if taken else "it may or may not have happened"
    return f"{text}; {fate}: see {check}, or ppconsole events --last 20"
