"""Verbs with an effect, on a request, on memory or on the engine: each is sent once and has one end."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import click

from ppconsole.cli import exits
from ppconsole.cli.options import Common, Effect, effect_options
from ppconsole.cli.session import attached, has_ended, print_json, run, say

if TYPE_CHECKING:
    from ppengine.protocol.control import Accepted, Deferred, Outcome, Refused

    from ppconsole.link.engine_link import EngineLink

STOP_S = 10.0
"""A link that breaks at a stop is what was asked, if the engine has ended so soon after."""
END_S = 60.0
"""How long a verb waits for its end when no --timeout says otherwise."""


@click.command("abort")
@click.argument("request")
@effect_options
def abort_command(request: str, common: Common, effect: Effect) -> int:
    """End REQUEST.

    Its blocks come back once its last step has retired.
    """
    from ppengine.protocol.control import Abort

    return carry_out(Abort(request=request), common, effect)


@click.command("preempt")
@click.argument("request")
@click.option("--mode", type=click.Choice(["recompute", "swap"]), help="Drop its blocks, or move them to the host.")
@click.option("--hold", is_flag=True, help="Keep it off until it is released.")
@effect_options
def preempt_command(request: str, mode: Any, hold: bool, common: Common, effect: Effect) -> int:
    """Take the blocks of REQUEST.

    The scheduler brings it back unless it is held.
    """
    from ppengine.protocol.control import Preempt

    return carry_out(Preempt(request=request, mode=mode, hold=hold), common, effect)


@click.command("swap-out")
@click.argument("request")
@click.option("--no-hold", is_flag=True, help="Let the scheduler bring it back when it likes.")
@effect_options
def swap_out_command(request: str, no_hold: bool, common: Common, effect: Effect) -> int:
    """Move REQUEST to the host and hold it there."""
    from ppengine.protocol.control import SwapOut

    return carry_out(SwapOut(request=request, hold=not no_hold), common, effect)


@click.command("swap-in")
@click.argument("request")
@effect_options
def swap_in_command(request: str, common: Common, effect: Effect) -> int:
    """Bring REQUEST back and let it run."""
    from ppengine.protocol.control import SwapIn

    return carry_out(SwapIn(request=request), common, effect)


@click.command("release")
@click.argument("request")
@effect_options
def release_command(request: str, common: Common, effect: Effect) -> int:
    """End the hold of REQUEST.

    The rest is left to the scheduler.
    """
    from ppengine.protocol.control import Release

    return carry_out(Release(request=request), common, effect)


@click.command("set-memory")
@click.argument("utilization", type=float)
@effect_options
def set_memory_command(utilization: float, common: Common, effect: Effect) -> int:
    """Give the KV cache more or less memory.

    UTILIZATION is of each device's memory, above 0 and at most 1.
    """
    from ppengine.protocol.control import SetMemory

    if not math.isfinite(utilization):
        raise exits.Failure(f"memory utilization is {utilization}; it must be above 0 and at most 1", exits.USAGE)
    return carry_out(SetMemory(utilization=utilization), common, effect)


@click.command("pause")
@click.option(
    "--mode",
    type=click.Choice(["wait", "keep", "abort"]),
    default="wait",
    show_default=True,
    help="Finish what runs and start nothing; stop at once and keep all; or abort all.",
)
@effect_options
def pause_command(mode: Any, common: Common, effect: Effect) -> int:
    """Stop scheduling."""
    from ppengine.protocol.control import Pause

    return carry_out(Pause(mode=mode), common, effect)


@click.command("resume")
@effect_options
def resume_command(common: Common, effect: Effect) -> int:
    """Undo pause."""
    from ppengine.protocol.control import Resume

    return carry_out(Resume(), common, effect)


@click.command("drain")
@click.option("--undo", is_flag=True, help="Take requests again.")
@effect_options
def drain_command(undo: bool, common: Common, effect: Effect) -> int:
    """Take no new requests and finish the others."""
    from ppengine.protocol.control import Drain

    return carry_out(Drain(undo=undo), common, effect)


@click.command("stop")
@effect_options
def stop_command(common: Common, effect: Effect) -> int:
    """Stop the engine and all its processes."""
    from ppengine.protocol.control import Stop

    return carry_out(Stop(), common, effect)


@click.command("check")
@click.argument("check", type=click.Choice(["ledger", "strict", "finite", "shadow"]))
@click.argument("mode", type=click.Choice(["on", "off"]))
@click.option("--share", type=float, metavar="S", help="Of the steps, for `shadow on`; 0.01 if left out.")
@effect_options
def check_command(check: Any, mode: Any, share: float | None, common: Common, effect: Effect) -> int:
    """Switch a live CHECK on or off.

    All stages do it at one step, while requests run.

    \b
    ledger  who hands which buffer to whom, and what orders the two
    strict  wait for every operation before the next (as CUDA_LAUNCH_BLOCKING, without a restart)
    finite  values that leave a stage: the first that is NaN or infinite
    shadow  a single-stage reference repeats a share of the steps and compares tokens

    What they find is told by `explain`; off forgets it.
    """
    from ppengine.protocol.control import SetCheck

    return carry_out(SetCheck(check=check, mode=mode, share=share), common, effect)


def carry_out(verb: Any, common: Common, effect: Effect, end_s: float = END_S) -> int:
    """Send one verb, print what becomes of it, and return the exit code. `end_s`: how long its end is waited for."""
    return run(lambda: _carry_out(verb, common, effect, end_s))


async def _carry_out(verb: Any, common: Common, effect: Effect, end_s: float) -> int:
    from ppengine.protocol.control import Accepted, Refused, Stop

    from ppconsole.link.source import LinkLost

    name = verb_name(verb)
    async with attached(common, slow=True) as link:
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
                on_progress=progress,
                timeout=common.timeout or end_s,
            )
        )
        waits: list[asyncio.Future[Any]] = [command] if effect.wait or effect.dry_run else [command, accepted]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not command.done():
                return _show_accepted(name, accepted.result(), common)
            end = command.result()
        except LinkLost as lost:
            if isinstance(verb, Stop) and lost.sent and await has_ended(link.record, STOP_S):
                return _show_stopped(link, common)
            text = _unknown(str(lost), verb, taken=accepted.done()) if lost.sent else str(lost)
            raise exits.Failure(text, exits.TIMEOUT) from None
        finally:
            command.cancel()
            await asyncio.gather(command, return_exceptions=True)
    return show_refused(end, name, common) if isinstance(end, Refused) else _show_outcome(end, name, common)


def verb_name(verb: Any) -> str:
    """Return the name of a verb as it is typed."""
    return str(type(verb).__struct_config__.tag)


def show_refused(refused: Refused, name: str, common: Common) -> int:
    """Print a refusal and return its exit code."""
    if common.json:
        print_json(refused)
    say(f"error: {name} refused: {refused.text} ({refused.code})")
    return exits.OF_CODE[refused.code]


def _show_accepted(name: str, accepted: Accepted, common: Common) -> int:
    if common.json:
        print_json(accepted)
    else:
        click.echo(f"{name} accepted as {accepted.op}")
    return exits.DONE


def _show_outcome(outcome: Outcome, name: str, common: Common) -> int:
    from ppconsole.model.safe import clean

    if common.json:
        print_json(outcome)
    else:
        at = f" at step {outcome.step}" if outcome.step is not None else ""
        revision = f" (revision {outcome.revision})" if outcome.revision is not None else ""
        click.echo(f"{name} {outcome.state}{at}{revision}: {clean(outcome.text)}")
        for line in outcome.plan:
            click.echo(f"  {clean(line)}")
    return exits.OF_STATE[outcome.state]


def _show_stopped(link: EngineLink, common: Common) -> int:
    if common.json:
        print_json({"type": "outcome", "state": "applied", "text": "the engine has ended"})
    else:
        click.echo(f"stop applied: engine {link.record.id} ({link.record.name}) has ended")
    return exits.DONE


def _unknown(text: str, verb: Any, *, taken: bool) -> str:
    request = getattr(verb, "request", None)
    check = f"ppconsole show {request}" if request else "ppconsole status"
    fate = "it may have happened, or happen yet" if taken else "it may or may not have happened"
    return f"{text}; {fate}: see {check}, or ppconsole events --last 20"
