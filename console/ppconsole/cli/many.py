"""Verbs on requests: one by its id, or many by ids, owner, age, state or filter, with one plan and one outcome."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
from ppengine.protocol.verb_table import ROWS

from ppconsole.cli import exits
from ppconsole.cli.effects import help_of, send, show_outcome, show_refused
from ppconsole.cli.options import Common, Effect, effect_options
from ppconsole.cli.session import attached_with_snapshot, named, run, say
from ppconsole.model import choosing
from ppconsole.model.grammar import command_class, many_parameters

if TYPE_CHECKING:
    from ppengine.protocol.control import Outcome
    from ppengine.protocol.snapshot import Snapshot
    from ppengine.protocol.verbs import Many, Verb

_MORE = """
    Several requests, or an option that chooses them, make one plan. It is printed first, and a terminal is asked. A
    request that cannot be done is a conflict (exit code 6), and the others are done all the same.
"""


def verb_command(name: str) -> click.Command:
    """Return the command of a verb on requests, generated from its row."""
    row = ROWS[name]

    @click.option("--yes", is_flag=True, help="Do not ask.")
    def command(common: Common, effect: Effect, yes: bool, **values: Any) -> int:
        ids, choice = choosing.take(values)

        def verb_of(request: str) -> Verb:
            return _built(name, values, request)

        if not ids and not choice.filter:
            raise choosing.nothing()
        verb_of(ids[0] if ids else "")  # wrong values are refused without an engine
        if len(ids) == 1:
            return run(lambda: _one(verb_of, ids[0], common, effect))
        if effect.if_rev is not None:
            raise click.UsageError("--if-rev is for one request; a filter takes the revisions that it saw.")
        return run(lambda: _many(verb_of, ids, choice.filter, common, effect, yes))

    text = help_of(row) + "\n" + _MORE
    return click.command(name, cls=command_class(row), params=many_parameters(row), help=text)(effect_options(command))


def _built(name: str, values: dict[str, Any], request: str) -> Verb:
    from ppengine.protocol.verbs import build

    try:
        return build(name, {**values, "request": request})
    except ValueError as error:
        raise exits.Failure(str(error), exits.USAGE) from None


async def _one(verb_of: Callable[[str], Verb], text: str, common: Common, effect: Effect) -> int:
    """Carry out a verb on the one request that `text` names."""
    async with attached_with_snapshot(common) as (link, snapshot):
        return await send(link, verb_of(named(text, snapshot)), common, effect)


async def _many(
    verb_of: Callable[[str], Verb], ids: list[str], text: str, common: Common, effect: Effect, yes: bool
) -> int:
    """Choose the requests, show the plan, ask, and carry it out."""
    from ppengine.protocol.control import Refused
    from ppengine.protocol.verbs import Many, label_of

    revisions: list[int | None] = []
    async with attached_with_snapshot(common) as (link, snapshot):
        if text:
            ids, revisions = _chosen(snapshot, text)
        else:
            ids = list(dict.fromkeys(named(each, snapshot) for each in ids))
        try:
            many = Many(verbs=[verb_of(each) for each in ids], revisions=revisions)  # type: ignore[misc]
        except ValueError as error:
            raise exits.Failure(str(error), exits.USAGE) from None
        plan = await link.command(
            many, dry_run=True, reason=effect.reason, override=effect.override, timeout=common.timeout or 10.0
        )
        if isinstance(plan, Refused):
            return show_refused(plan, label_of(many), common)
        if effect.dry_run:
            return show_outcome(plan, label_of(many), common)
        _say_plan(plan)
        if not yes and sys.stdin.isatty() and not await asyncio.to_thread(_asked, many):
            say("nothing was done")
            return exits.INTERRUPTED
        return await send(link, many, common, replace(effect, if_rev=None))


def _chosen(snapshot: Snapshot, text: str) -> tuple[list[str], list[int | None]]:
    """Return ids and revisions of the requests that a filter matches. Raises Failure."""
    from ppconsole.model.filters import FilterError

    if note := choosing.unlisted(snapshot):
        say(note)
    try:
        found = choosing.matching(snapshot, text)
    except FilterError as error:
        raise exits.Failure(str(error), exits.USAGE) from None
    except LookupError as error:
        raise exits.Failure(str(error), exits.NOT_FOUND) from None
    return [request.id for request in found], [request.revision for request in found]


def _say_plan(plan: Outcome) -> None:
    """Print the plan and its first conflicts; the outcome has all."""
    from ppconsole.view.plan import conflict_lines

    for line in [*plan.plan, *conflict_lines(plan)]:
        say(f"  {line}")


def _asked(many: Many) -> bool:
    """Ask on the terminal; return whether the answer is yes."""
    from ppengine.protocol.verbs import label_of

    return click.confirm(f"{label_of(many)} {len(many.verbs)} requests?", err=True)
