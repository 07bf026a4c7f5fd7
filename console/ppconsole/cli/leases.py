"""`lease`: take or release control of an engine, or show the holder."""

from __future__ import annotations

from typing import Any

import click
from ppengine.protocol.verb_table import ROWS

from ppconsole.cli import exits
from ppconsole.cli.effects import carry_out, help_of
from ppconsole.cli.options import Common, Effect, effect_options
from ppconsole.cli.session import one_snapshot, print_json, run
from ppconsole.model.grammar import command_class, parameters


def verb_command(name: str) -> click.Command:
    """Return the command: the actions of the row, and `show`, which sends no verb."""
    row = ROWS[name]
    action, *options = parameters(row)
    assert isinstance(action.type, click.Choice), "the row has a choice of actions"
    action.type = click.Choice([*action.type.choices, "show"])

    @click.command(name, cls=command_class(row), params=[action, *options], help=help_of(row))
    @effect_options
    def command(common: Common, effect: Effect, action: str, **values: Any) -> int:
        if action == "show":
            return run(lambda: _show(common))
        from ppengine.protocol.verbs import build

        try:
            verb = build(name, {"action": action, **values})
        except ValueError as error:
            raise exits.Failure(str(error), exits.USAGE) from None
        return carry_out(verb, common, effect)

    return command


async def _show(common: Common) -> int:
    """Print the holder."""
    from ppconsole.model.safe import clean

    lease = (await one_snapshot(common)).lease
    if common.json:
        print_json({"lease": lease})
    elif lease is None:
        click.echo("no key holds the control lease")
    else:
        click.echo(clean(f"key {lease.principal} ({lease.by}) holds the control lease for {lease.left_s:.0f} s more"))
    return exits.DONE
