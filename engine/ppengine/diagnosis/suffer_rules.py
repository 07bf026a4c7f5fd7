"""Stages that only suffer, starved or blocked by another one. Never a root."""

from __future__ import annotations

from ppengine.diagnosis.budgets import SUFFERS_AFTER_S, is_lost, is_unseen
from ppengine.diagnosis.case import Case
from ppengine.diagnosis.evidence import Key, StageEvidence
from ppengine.diagnosis.phrases import doing
from ppengine.diagnosis.wait_graph import Node, Wait, main_of
from ppengine.protocol.snapshot import Cause, Verdict


def sufferers(case: Case) -> list[Verdict]:
    """Return `starved` or `blocked` for the stages whose waits lead to a root."""
    named = {key for verdict in case.found for key in case.places(verdict)}
    stages = (stage for stage in case.evidence.stages if stage.key not in named)
    return [verdict for stage in stages if (verdict := _suffering(stage, case)) is not None]


def _suffering(stage: StageEvidence, case: Case) -> Verdict | None:
    chain, guilty = case.graph.follow(main_of(stage), soft=True), case.guilty
    # The operation of an old sample is no longer the present one.
    unseen = is_unseen(stage)
    since = chain[0].since_s if unseen and chain else stage.op_age_s or 0.0
    if is_lost(stage) or since < SUFFERS_AFTER_S:
        return None
    reached = next((wait for wait in chain if _is_guilty(wait.on, guilty)), None)
    if reached is None:
        return None
    cause: Cause = "blocked" if stage.op in ("room", "send") else "starved"
    root = "the engine core" if reached.on.kind == "core" else case.at(reached.on).name
    between = _between(stage, chain, reached)
    does = chain[0].text if unseen else doing(stage)
    via = f" through {between}" if between and between != root else ""
    return Verdict(
        stage=stage.stage,
        rank=stage.shown_rank,
        cause=cause,
        summary=f"{stage.name} is {cause} {'on' if cause == 'blocked' else 'by'} {root}{via}: {does}",
        since_s=since,
        evidence=[f"waits for {chain[0].on}: {chain[0].text}", f"process state {stage.process_state or 'unknown'}"],
        suggest=f"see {root}",
        root=False,
    )


def _is_guilty(node: Node, guilty: set[Key | None]) -> bool:
    return None in guilty if node.kind == "core" else node.key in guilty


def _between(stage: StageEvidence, chain: list[Wait], reached: Wait) -> str:
    """Return the first stage (or the core) on the way that is neither this one nor the root."""
    for wait in chain:
        if wait is reached:
            return ""
        if wait.on.kind == "core" or wait.on.key != stage.key:
            return str(wait.on)
    return ""
