"""Stages that compute wrong numbers."""

from __future__ import annotations

import contextlib
from typing import Any

from ppengine.drills.fault_points import Fault, Go, StageParts
from ppengine.drills.registry import Undo, arm, strike

_EVERY = 8


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


@strike("send", "wrong", "corrupted", clears=True, lossless=False, where="not last", needs="checksum")
def overwrite_in_flight(fault: Fault, go: Go, *args: Any) -> Any:
    """The buffer of every eighth message is overwritten between its computation and its sending.

    Verdict: the hidden states of step n changed on the edge from stage K to K+1.
    """
    step, tensor = args
    fault.tool = (fault.tool or 0) + 1
    if fault.tool % _EVERY == 0 and tensor.is_floating_point():
        tensor = tensor.clone()
        tensor.view(-1)[: tensor.shape[-1]] += 1.0
    return go(step, tensor)


@strike("receive", "wrong", "corrupted", clears=True, lossless=False, where="not first", needs="checksum")
def overwrite_received(fault: Fault, go: Go, *args: Any) -> Any:
    """The buffer into which hidden states arrive is overwritten before the layers read it.

    Verdict: the hidden states of step n changed on the edge to stage K, after they had arrived. On a GPU: on that edge.
    """
    hidden, buffers = go(*args), fault.parts.buffers
    with contextlib.nullcontext() if buffers is None else buffers.compute.use():
        hidden.view(-1)[-1] = -hidden.view(-1)[-1] - 1.0
    return hidden


@arm("wrong", "non_finite", clears=True, lossless=False, held_out=True, needs="finite")
def inf_weight(parts: StageParts) -> Undo:
    """One weight of the stage's first layer becomes infinite. Results computed with it stay wrong after a clear.

    Verdict: the first value that is not finite came from stage K, layer L, step n.
    """
    # Not one of the embedding: a rank reads only the rows of the tokens that come.
    weight = next(iter(parts.runner._model.layers.parameters())).data.view(-1)
    before = weight[0].item()
    weight[0] = float("inf")

    def undo() -> None:
        weight[0] = before

    return undo
