"""`fault`: break an engine on demand, for tests and drills."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ppconsole.cli import exits
from ppconsole.cli.effects import carry_out
from ppconsole.cli.inspecting import inspect
from ppconsole.cli.options import Common, Effect, effect_options
from ppconsole.cli.session import print_json

if TYPE_CHECKING:
    from ppengine.protocol.inspection import FaultInfo


@click.command("fault")
@click.argument("kind", required=False)
@click.option("--stage", type=click.IntRange(0), metavar="K", help="The stage that it strikes.")
@click.option("--list", "listing", is_flag=True, help="Print all kinds, and the faults that are on.")
@click.option("--clear", is_flag=True, help="End every fault that can be ended.")
@effect_options
def fault_command(
    kind: str | None, stage: int | None, listing: bool, clear: bool, common: Common, effect: Effect
) -> int:
    """Break something on purpose, by KIND.

    Only in an engine that was started with --allow-faults; any other refuses (exit code 4).
    """
    from ppengine.protocol.control import ClearFaults, Fault

    if [kind is not None, listing, clear].count(True) != 1:
        raise exits.Failure("give a KIND, --list or --clear, one of them", exits.USAGE)
    if stage is not None and kind is None:
        raise exits.Failure("--stage belongs to a KIND", exits.USAGE)
    if listing:
        return _list(common)
    return carry_out(ClearFaults() if kind is None else Fault(kind=kind, stage=stage), common, effect)


def _list(common: Common) -> int:
    from ppengine.protocol.inspection import FaultsDetail

    detail = inspect(common, "faults")
    if common.json or not isinstance(detail, FaultsDetail):
        print_json(detail)
        return exits.DONE
    for info in detail.faults:
        click.echo("\n".join(_lines(info)))
    click.echo("on: " + (", ".join(detail.on) or "none"))
    return exits.DONE


def _lines(info: FaultInfo) -> list[str]:
    marks = ["can be cleared" if info.clears else "cannot be cleared", *(["held out"] if info.held_out else [])]
    expects = " or ".join(info.expects) or "no alarm"
    return [f"{info.kind}  [{info.where}; {', '.join(marks)}]", f"    {info.does}", f"    told: {expects}. {info.told}"]
