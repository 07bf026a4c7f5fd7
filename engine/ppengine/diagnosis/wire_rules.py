"""Wires that broke between two running stages: the core heals them, and the diagnosis reports them."""

from __future__ import annotations

from ppengine.diagnosis.budgets import HEALED_TOLD_S, is_lost
from ppengine.diagnosis.case import Case
from ppengine.diagnosis.evidence import WireLoss
from ppengine.diagnosis.phrases import seconds
from ppengine.protocol.snapshot import Verdict


def broken(case: Case) -> list[Verdict]:
    """Return the wires that are broken: not all stages have met again."""
    return [_verdict(case, loss) for loss in _unexplained(case) if loss.healed_s is None]


def healed(case: Case) -> list[Verdict]:
    """Return the wires that broke a moment ago and are healed: what a stage is in now comes before them."""
    return [_verdict(case, loss) for loss in _unexplained(case) if loss.healed_s is not None]


def _unexplained(case: Case) -> list[WireLoss]:
    """Return the losses that are news, and that no end of a process or of the engine explains."""
    if case.evidence.stopping:
        return []
    ended = {stage.key for stage in case.evidence.stages if is_lost(stage)}
    return [
        loss for loss in case.evidence.losses if (loss.healed_s or 0.0) <= HEALED_TOLD_S and not set(loss.ends) & ended
    ]


def _verdict(case: Case, loss: WireLoss) -> Verdict:
    """Return the words for a loss.

    A message that was not due is its sender's fault, unless the receiver's report names the receiver itself.
    """
    name, peer = map(case.name, loss.ends)
    if loss.closed:
        summary = f"{name} lost its wire to {peer}"
    elif loss.ends[0] == loss.ends[1]:
        summary = f"{name} expected a message that its step does not have"
    else:
        summary = f"{peer} sent {name} a message that was not due"
    lines = [f"{name}: {loss.text}", "no process had ended: the connection alone broke"]
    if not loss.closed:
        lines[1] = "no process had ended"
    if loss.healed_s is None and loss.generation is None:
        lines.append("no new generation has begun: the message of the engine says why")
    elif loss.healed_s is None:
        lines.append(f"generation {loss.generation} has begun; not all stages have met in it yet")
    else:
        took = f"all stages met again after {seconds(loss.since_s - loss.healed_s)}"
        again = f", {loss.recomputed} requests recomputed" if loss.recomputed else ""
        summary += f"; {took}{again}"
        lines.append(f"{took}{again}, {seconds(loss.healed_s)} ago; reported for {HEALED_TOLD_S:g}s from then on")
    stage, rank = loss.ends[0 if loss.closed else 1]
    return Verdict(
        stage=stage,
        rank=rank if any(each.ranks > 1 for each in case.evidence.stages) else None,
        cause="link" if loss.closed else "mismatch",
        summary=summary,
        since_s=loss.since_s,
        evidence=lines,
        suggest=f"ppconsole events; if it comes again: ppconsole logs --stage {loss.peer}",
    )
