"""The verdict: a pure function of evidence. Missing evidence gives "undetermined", never a guess.

`wait_graph` has the waits between threads; each family of causes has a file of rules; `RULES` is their order.
A stage gets one verdict, from the first rule that names it. Stages that only suffer come last and are never a root.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from ppengine.diagnosis import (
    core_rules,
    finding_rules,
    gil_rules,
    helper_rules,
    memory_rules,
    message_rules,
    process_rules,
    quota_rules,
    rank_rules,
    shortage_rules,
    slow_rules,
    store_rules,
    stuck_rules,
    suffer_rules,
    wire_rules,
)
from ppengine.diagnosis.budgets import PHASE_BUDGET_S, stuck_limit_s
from ppengine.diagnosis.case import Case
from ppengine.diagnosis.evidence import Evidence
from ppengine.diagnosis.wait_graph import build
from ppengine.protocol.snapshot import OUTSIDE_STEPS, Cause, Verdict, WaitInfo

__all__ = ["PHASE_BUDGET_S", "RULES", "STACKS_WANTED", "diagnose", "failure", "stuck_limit_s", "waits"]

RULES: tuple[Callable[[Case], list[Verdict]], ...] = (
    rank_rules.differing,
    message_rules.mismatched,
    process_rules.ended,
    process_rules.stopped,
    core_rules.core,
    core_rules.ray_head,
    shortage_rules.short,
    wire_rules.broken,
    finding_rules.found,
    memory_rules.growing,
    quota_rules.throttled,
    quota_rules.starved,
    gil_rules.holders,
    stuck_rules.idlers_in_vain,
    slow_rules.slow_phases,
    stuck_rules.blocked_work,
    gil_rules.sharers,
    stuck_rules.hanging_maps,
    stuck_rules.without_control,
    message_rules.remembered,
    finding_rules.remembered,
    wire_rules.healed,
    slow_rules.slow_links,
    slow_rules.stragglers,
    helper_rules.helpers,
    store_rules.stores,
    suffer_rules.sufferers,
)
STACKS_WANTED = frozenset({"self_stuck", "gil_held", "deadlock", "undetermined", "core"})
"""Causes whose evidence is better with the line of code."""
_MOST_CHARACTERS = 200
"""Room for a rank that waits through another one for a third; a banner that is narrower cuts it itself."""


def diagnose(evidence: Evidence) -> list[Verdict]:
    """Return the verdicts, roots first, each once; empty without a fault."""
    case = Case(evidence, build(evidence), [])
    nodes = {stage.stage: stage.node for stage in evidence.stages if stage.node}
    for rule in RULES:
        for verdict in rule(case):
            if not {_key(verdict), _whole(verdict)} & set(map(_key, case.found)):
                case.found.append(_one_line(_on_node(verdict, nodes)))
    last = ("starved", "blocked", *OUTSIDE_STEPS)
    return sorted(case.found, key=lambda verdict: (not verdict.root, verdict.cause in last))


def waits(evidence: Evidence) -> list[WaitInfo]:
    """Return the waits of this moment, as the picture of the pipeline shows them."""
    return [
        WaitInfo(waiter=str(wait.waiter), on=str(wait.on), what=wait.text, since_s=wait.since_s)
        for wait in build(evidence).waits.values()
    ]


def failure(error: Exception) -> Verdict:
    """Return the verdict for a diagnosis that raised `error`, with the place in the code."""
    frames = traceback.extract_tb(error.__traceback__)
    evidence = [f"in {frame.name}, {Path(frame.filename).name}:{frame.lineno}: {frame.line}" for frame in frames[-1:]]
    return _one_line(
        Verdict(
            stage=None,
            cause="undetermined",
            summary=f"the diagnosis failed: {type(error).__name__}: {error}",
            since_s=0.0,
            evidence=[*evidence, "the engine goes on; missing: every verdict"],
            suggest="ppconsole logs (the whole trace, to be reported)",
        )
    )


def _key(verdict: Verdict) -> tuple[int, int | None] | Cause:
    """Return what a verdict is alone on: a place, all ranks of a stage, or a cause that is no stage's."""
    return verdict.cause if verdict.stage is None else (verdict.stage, verdict.rank)


def _whole(verdict: Verdict) -> tuple[int, int | None] | Cause:
    """Return the key of a verdict on all ranks of the stage, which says it for each of them."""
    return _key(msgspec.structs.replace(verdict, rank=None))


def _on_node(verdict: Verdict, nodes: Mapping[int, str]) -> Verdict:
    """Name the node of a verdict's stage, in an engine that has several."""
    if verdict.stage is None or not (node := nodes.get(verdict.stage)):
        return verdict
    name = f"stage {verdict.stage}" + ("" if verdict.rank is None else f" rank {verdict.rank}")
    summary = verdict.summary
    if summary.startswith(f"{name} ") and node not in summary:
        summary = f"{name} on {node}{summary.removeprefix(name)}"
    return msgspec.structs.replace(verdict, summary=summary, evidence=[f"node: {node}", *verdict.evidence])


def _one_line(verdict: Verdict) -> Verdict:
    """Keep the summary to one line of the banner."""
    text = " ".join(verdict.summary.split())
    short = text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + "..."
    return msgspec.structs.replace(verdict, summary=short)
