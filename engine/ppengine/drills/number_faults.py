"""Stages that compute wrong numbers."""

from __future__ import annotations

from typing import Any

from ppengine.drills.fault_points import Fault, Go, StageParts
from ppengine.drills.registry import Undo, arm, strike


@strike("forward", "wrong", "non_finite", clears=True, lossless=False, needs="finite")
def nan(fault: Fault, go: Go, *args: Any) -> Any:
    """One value of every forward's output becomes NaN. Results computed with it stay wrong after a clear.

    Verdict: the first value that is not finite came from stage K, layer L, step n.
    """
    answer = go(*args)
    # A graph has more results than its output; and graphs run again once the check has a finding.
    out: Any = getattr(answer, "out", answer)
    out.view(-1)[0] = float("nan")
    return answer


@arm("wrong", "non_finite", clears=True, lossless=False, held_out=True, needs="finite")
def inf_weight(parts: StageParts) -> Undo:
    """One weight of the stage's first layer becomes infinite. Results computed with it stay wrong after a clear.

    Verdict: the first value that is not finite came from stage K, layer L, step n.
    """
    weight = next(iter(parts.runner._model.parameters())).data.view(-1)
    before = weight[0].item()
    weight[0] = float("inf")

    def undo() -> None:
        weight[0] = before

    return undo
