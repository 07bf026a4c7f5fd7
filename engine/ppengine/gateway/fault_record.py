"""The record of a fault: the engine's last steps, kept as soon as a verdict names a new root.

It needs no attached console, and stays after the fault is over, until the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from ppengine.protocol import frames
from ppengine.protocol.control import Failed, Inspect, Inspected
from ppengine.protocol.inspection import FaultDetail, RingsDetail, StacksDetail
from ppengine.protocol.snapshot import Cause, Verdict, WaitInfo, is_beside

NONCE = -2
"""Nonce of the question for the rings."""
STEPS = 64
RESUME_S = 10.0
"""Seconds for the verdict of a fault to come again after the gateway was replaced."""
_Who = tuple[int | None, int | None]
"""Stage and rank of a verdict."""
_KINDS: dict[Cause, str] = {
    "stopped": "stopped", "straggler": "slow",
    **dict.fromkeys(("self_stuck", "gil_held", "deadlock", "stream_stuck"), "stuck"),
    **dict.fromkeys(("dead", "killed_oom", "crashed", "out_of_memory"), "ended"),
}  # fmt: skip
"""Causes by their effect. A cause with another effect is another fault; one with the same is better known."""


def _who(verdict: Verdict) -> _Who:
    return verdict.stage, verdict.rank


def _is_another(before: Verdict, now: Verdict) -> bool:
    """Return whether the verdict on a place is on another fault than the one before."""
    kinds = _KINDS.get(before.cause), _KINDS.get(now.cause)
    return None not in kinds and kinds[0] != kinds[1]


class FaultRecorder:
    """Asks the agent for the rings once per new fault, and adds the stacks that are taken for its verdicts."""

    def __init__(self, ask: Callable[[Inspect], str]) -> None:
        """`ask` sends a question to the agent and returns the obstacle, empty without one."""
        self._ask = ask
        self._roots: set[_Who] = set()
        self.kept: FaultDetail | None = None
        self._begun = 0.0
        """Monotonic time of the begin of `kept`."""
        self._unseen_until = 0.0
        """Time until which a resumed fault may be without its verdict."""

    def resume(self, fault: FaultDetail | None) -> None:
        """Go on with the record of another gateway; its verdict comes again when the evidence is there again."""
        self.kept = fault
        if fault is not None and fault.over_wall is None:
            self._roots = {_who(fault.verdict)}
            self._begun = time.monotonic() - max(0.0, time.time() - fault.wall)
            self._unseen_until = time.monotonic() + RESUME_S

    def look(self, verdicts: list[Verdict], waits: list[WaitInfo], retired: list[int | None]) -> None:
        """Begin a new record if `verdicts` name a stage (None: the core) that was not a root, or not by such a cause.

        A fault that begins during the recorded one may be its consequence: its record begins after that one is over.
        """
        # A fault outside of all steps has no last steps, and must not hide the begin of another one.
        verdicts = [verdict for verdict in verdicts if verdict.root and not is_beside(verdict.cause, verdict.stage)]
        roots = {_who(verdict): verdict for verdict in reversed(verdicts)}
        if self.kept is not None and self.kept.over_wall is None:
            who = _who(self.kept.verdict)
            now = roots.get(who)
            if now is not None and not _is_another(self.kept.verdict, now):
                self.kept.verdict = now
                self._roots &= roots.keys()
                return
            if now is None and time.monotonic() < self._unseen_until:
                return
            self._roots.discard(who)
            # The wall clock may have been set since the begin.
            self.kept.over_wall = self.kept.wall + time.monotonic() - self._begun
        fresh = roots.keys() - self._roots
        self._roots = set(roots)
        if fresh:
            self._begin(next(verdict for verdict in verdicts if _who(verdict) in fresh), waits, retired)

    def take(self, answer: Inspected | Failed) -> None:
        """Keep the rings of the agent's answer."""
        if self.kept is None:
            return
        if isinstance(answer, Failed):
            self.kept.missing.append(f"rings: {answer.text}")
        elif self.kept.rings is None:
            self.kept.rings = frames.decode_as(RingsDetail, bytes(answer.data))

    def take_stacks(self, detail: StacksDetail) -> None:
        """Keep stacks that were taken for a verdict: the first of each process, which are nearest to the fault."""
        if self.kept is None or self.kept.over_wall is not None:
            return
        known = self.kept.stacks or StacksDetail(stages=[], ability=detail.ability)
        taken = {(one.stage, one.rank) for one in known.stages}
        fresh = [each for each in detail.stages if (each.stage, each.rank) not in taken]
        stages = sorted([*known.stages, *fresh], key=lambda each: (each.stage or 0, each.rank))
        self.kept.stacks = msgspec.structs.replace(known, stages=stages, core=known.core or detail.core)

    def _begin(self, verdict: Verdict, waits: list[WaitInfo], retired: list[int | None]) -> None:
        number, self._begun = self.kept.number + 1 if self.kept else 1, time.monotonic()
        self.kept = FaultDetail(number=number, wall=time.time(), verdict=verdict, waits=waits, retired=retired)
        if why := self._ask(Inspect(nonce=NONCE, what="rings", lines=STEPS)):
            self.kept.missing.append(f"rings: {why}")
