"""Verbs on one stage: wake it, start it anew, cordon it."""

from __future__ import annotations

import click

from ppconsole.cli.effects import carry_out
from ppconsole.cli.options import Common, Effect, effect_options

LOAD_END_S = 900.0
"""How long a verb waits for its end where a stage loads its weights, when no --timeout says otherwise."""


@click.command("continue")
@click.argument("stage", type=click.IntRange(0))
@effect_options
def continue_command(stage: int, common: Common, effect: Effect) -> int:
    """Wake a STAGE that a signal stopped."""
    from ppengine.protocol.control import Continue

    return carry_out(Continue(stage=stage), common, effect)


@click.command("restart-stage")
@click.argument("stage", type=click.IntRange(0))
@effect_options
def restart_stage_command(stage: int, common: Common, effect: Effect) -> int:
    """Start a STAGE anew, dead, stuck or not.

    The others keep their weights; every request is recomputed, and none is lost.
    """
    from ppengine.protocol.control import RestartStage

    return carry_out(RestartStage(stage=stage), common, effect, LOAD_END_S)


@click.command("cordon")
@click.option("--stage", type=click.IntRange(0), required=True, metavar="K", help="The stage.")
@click.option("--undo", is_flag=True, help="Lift the cordon.")
@effect_options
def cordon_command(stage: int, undo: bool, common: Common, effect: Effect) -> int:
    """Begin no request, to look at a stage.

    What has begun goes on; what is submitted waits. Should the stage die, it is not started anew by itself:
    `restart-stage` does it, or lifting the cordon.
    """
    from ppengine.protocol.control import Cordon

    return carry_out(Cordon(stage=stage, undo=undo), common, effect)
