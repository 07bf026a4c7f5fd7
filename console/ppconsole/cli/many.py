"""Verbs on requests: one by its id, or many by ids, owner, age, state or filter, with one plan and one outcome."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
from ppengine.protocol.verb_table import ROWS

from ppconsole.cli import exits
from ppconsole.cli.effects import carry_out, help_of, send, show_outcome, show_refused
from ppconsole.cli.options import Common, Effect, effect_options, filter_of
from ppconsole.cli.session import attached_with_snapshot, run, say
from ppconsole.model.grammar import command_class, many_parameters

if TYPE_CHECKING:
    from ppengine.protocol.control import Outcome
    from ppengine.protocol.snapshot import Snapshot
    from ppengine.protocol.verbs import Many, Verb

STATES = ("waiting", "running", "swapped", "held", "loading")
CONFLICTS_SHOWN = 5
"""Most conflicts that are printed with a plan."""
_MORE = """
    Several requests, or an option that chooses them, make one plan. It is printed first, and a terminal is asked. A
    request that cannot be done is a conflict (exit code 6), and the others are done all the same.
"""
_CHOOSING = (
    click.option("--owner", metavar="NAME", help="All requests of this owner."),
    click.option("--older", metavar="AGE", help="All that are older: 90, 5m, 2h."),
    click.option("--state", type=click.Choice(STATES), help="All in this state."),
    click.option("--filter", "wanted", metavar="FILTER", help="All that it matches: 'state:wait blk>40'."),
    click.option("--yes", is_flag=True, help="Do not ask."),
)


def verb_command(name: str) -> click.Command:
    """Return the command of a verb on requests, generated from its row."""
    row = ROWS[name]

    def command(common: Common, effect: Effect, requests: tuple[str, ...], yes: bool, **values: Any) -> int:
        choosing = [values.pop(key) for key in ("owner", "older", "state", "wanted")]
        text = filter_text(*choosing)
        ids = list(dict.fromkeys(requests))
        if bool(ids) == bool(text):
            wrong = "requests are named and chosen by options, too" if ids else "no request is named or chosen"
            raise click.UsageError(f"{wrong}; give ids, or --owner, --older, --state and --filter.")
        if len(ids) == 1:
            return carry_out(_built(name, values, ids[0]), common, effect)
        if effect.if_rev is not None:
            raise click.UsageError("--if-rev is for one request; a filter takes the revisions that it saw.")

        def verb_of(request: str) -> Verb:
            return _built(name, values, request)

        return run(lambda: _many(verb_of, ids, text, common, effect, yes))

    chosen = functools.reduce(lambda made, option: option(made), reversed(_CHOOSING), command)
    text = help_of(row) + "\n" + _MORE
    return click.command(name, cls=command_class(row), params=many_parameters(row), help=text)(effect_options(chosen))


def filter_text(owner: str | None, older: str | None, state: str | None, wanted: str | None) -> str:
    """Return the filter of some options; all of them must hold."""
    from ppconsole.model.filters import quoted

    words = [f"owner={quoted(owner)}"] if owner is not None else []
    words += [f"age>{older}"] if older is not None else []
    words += [f"state={state}"] if state is not None else []
    return " ".join([*words, *([wanted] if wanted else [])])


def _built(name: str, values: dict[str, Any], request: str) -> Verb:
    from ppengine.protocol.verbs import build

    try:
        return build(name, {**values, "request": request})
    except ValueError as error:
        raise exits.Failure(str(error), exits.USAGE) from None


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
        try:
            many = Many(verbs=[verb_of(each) for each in ids], revisions=revisions)  # type: ignore[misc]
        except ValueError as error:
            raise exits.Failure(str(error), exits.USAGE) from None
        plan = await link.command(many, dry_run=True, reason=effect.reason, timeout=common.timeout or 10.0)
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
    wanted = filter_of(text)
    found = [request for request in snapshot.requests if request.state != "finished" and wanted.matches(request)]
    if snapshot.requests_total > len(snapshot.requests):
        say(f"the filter sees the first {len(snapshot.requests)} of {snapshot.requests_total} requests")
    if not found:
        raise exits.Failure(f"no request matches {text}; {snapshot.requests_total} are here", exits.NOT_FOUND)
    return [request.id for request in found], [request.revision for request in found]


def _say_plan(plan: Outcome) -> None:
    """Print the plan and its first conflicts; the outcome has all."""
    lines = [*plan.plan, *(f"not {each.request}: {each.text}" for each in plan.conflicts[:CONFLICTS_SHOWN])]
    if (more := len(plan.conflicts) - CONFLICTS_SHOWN) > 0:
        lines.append(f"... and {more} more that cannot be done")
    for line in lines:
        say(f"  {line}")


def _asked(many: Many) -> bool:
    """Ask on the terminal; return whether the answer is yes."""
    from ppengine.protocol.verbs import label_of

    return click.confirm(f"{label_of(many)} {len(many.verbs)} requests?", err=True)
