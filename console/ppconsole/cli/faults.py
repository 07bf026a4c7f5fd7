"""`fault`: break an engine on demand, for tests and drills."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from ppengine.protocol.verb_table import ROWS

from ppconsole.cli import exits
from ppconsole.cli.effects import carry_out, help_of
from ppconsole.cli.inspecting import inspect
from ppconsole.cli.options import Common, Effect, effect_options
from ppconsole.cli.session import print_json
from ppconsole.model.grammar import parameters

if TYPE_CHECKING:
    from ppengine.protocol.inspection import FaultInfo


def verb_command(name: str) -> click.Command:
    """Return the command `fault`: the verbs `fault` and `clear-faults`, and the list of both."""
    row = ROWS[name]
    params = parameters(row)
    params[0].required = False

    @click.command(name, params=params, help=help_of(row))
    @click.option("--list", "listing", is_flag=True, help="Print all kinds, and the faults that are on.")
    @click.option("--clear", is_flag=True, help="End every fault that can be ended.")
    @effect_options
    def command(listing: bool, clear: bool, common: Common, effect: Effect, **values: Any) -> int:
        from ppengine.protocol.verbs import build

        if [values["kind"] is not None, listing, clear].count(True) != 1:
            raise exits.Failure("give a KIND, --list or --clear, one of them", exits.USAGE)
        if values["stage"] is not None and values["kind"] is None:
            raise exits.Failure("--stage belongs to a KIND", exits.USAGE)
        if listing:
            return _list(common)
        return carry_out(build("clear-faults" if clear else name, values), common, effect)

    return command


def _list(common: Common) -> int:
    from ppengine.protocol.inspection import FaultsDetail

    from ppconsole.model.safe import clean

    detail = inspect(common, "faults")
    if common.json or not isinstance(detail, FaultsDetail):
        print_json(detail)
        return exits.DONE
    for info in detail.faults:
        click.echo("\n".join(map(clean, _lines(info))))
    click.echo(clean("on: " + (", ".join(detail.on) or "none")))
    return exits.DONE


def _lines(info: FaultInfo) -> list[str]:
    marks = ["can be cleared" if info.clears else "cannot be cleared", *(["held out"] if info.held_out else [])]
    expects = " or ".join(info.expects) or "no alarm"
    return [
        f"{info.kind}  [{info.where}; {', '.join(marks)}]",
        f"    {info.does}",
        f"    verdict: {expects}. {info.told}",
    ]
