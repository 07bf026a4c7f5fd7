"""The input of a rule, and the parts that all verdicts share."""

from __future__ import annotations

from typing import NamedTuple

from ppengine.diagnosis.budgets import SPINS, holds_gil, is_lost, wants_core
from ppengine.diagnosis.device_evidence import device_lines
from ppengine.diagnosis.evidence import Evidence, Key, StageEvidence
from ppengine.diagnosis.phrases import percent, seconds, stack_lines
from ppengine.diagnosis.wait_graph import Graph, Node
from ppengine.protocol.snapshot import Verdict


class Case(NamedTuple):
    """The evidence, the waits in it, and the verdicts of the rules before."""

    evidence: Evidence
    graph: Graph
    found: list[Verdict]

    @property
    def guilty(self) -> set[Key | None]:
        """Places that are a root already; None: the core. A verdict without a stage (wrong tokens) counts for none."""
        found: set[Key | None] = set()
        for verdict in self.found:
            if verdict.root and (verdict.stage is not None or verdict.cause == "core"):
                found |= set(self.places(verdict)) if verdict.stage is not None else {None}
        return found

    @property
    def edges_close(self) -> bool:
        """Whether a stage is lost, or a wire that is not healed.

        The neighbours then leave their steps and edges, and theirs in turn. All idle until a generation begins.
        """
        evidence = self.evidence
        return any(map(is_lost, evidence.stages)) or any(loss.healed_s is None for loss in evidence.losses)

    def places(self, verdict: Verdict) -> list[Key]:
        """Return the places that a verdict is about: without a rank, all of its stage."""
        return [
            stage.key
            for stage in self.evidence.stages
            if stage.stage == verdict.stage and verdict.rank in (None, stage.rank)
        ]

    def at(self, node: Node) -> StageEvidence:
        """Return the stage of a node that is not the core."""
        return next(stage for stage in self.evidence.stages if stage.key == node.key)

    def name(self, key: Key) -> str:
        """Return the name of a place for operators."""
        return next((stage.name for stage in self.evidence.stages if stage.key == key), f"stage {key[0]}")


def thread_lines(stage: StageEvidence) -> list[str]:
    """Return the evidence from outside: the main thread's state, kernel wait, cores, ticks, the device, stacks."""
    where = f" in {stage.wchan}" if stage.wchan else ""
    lines = [f"pid {stage.pid}: process state {stage.process_state or 'unknown'}"]
    state = stage.main_state or "unknown"
    cpu = ""
    if stage.cpu is not None:
        used = stage.cpu.main_user + stage.cpu.main_system
        word = "spins" if wants_core(stage.cpu) >= SPINS else "sleeps" if used < 0.05 else "works"
        cpu = f", {word}: {percent(used)} of a core (user {percent(stage.cpu.main_user)})"
        if stage.cpu.main_waited is not None and stage.cpu.main_waited >= 0.05:
            cpu += f", without a core {percent(stage.cpu.main_waited)} of the time"
    lines.append(f"main thread: state {state}{where}{cpu}")
    if stage.tick_age_s is not None:
        free = "" if holds_gil(stage) else ": the GIL is not held for long" if stage.tick_age_s < 1.0 else ""
        lines.append(f"control thread (10 Hz) ticked {seconds(stage.tick_age_s)} ago{free}")
    return lines + device_lines(stage) + stack_lines(stage)
