"""The finite check: finds the first value that leaves a stage and is not finite, and traces it to its origin.

While all is well it costs one pass over the results of the stage. On a GPU the host looks when the
step is done, and waits for nothing before (`cuda.cuda_runner`). At the first value that is no
number, the step's layers run once more on the same input (they write the same keys and values) and
stop at the first part that fails. A stage of several ranks names weights and KV blocks instead.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from ppkernels.batch import Batch
from torch import Tensor

from ppengine.models import StageModel
from ppengine.protocol.reports import Finding
from ppengine.stage.backends.base import KvCache
from ppengine.stage.batch_state import BatchState, Ints, Plan
from ppengine.stage.checks import StageChecks

_SUMMARY_MOST = 100
_NAMED = 4
"""Requests, weights and blocks that are named; of the rest there is a count."""
HOLD_S = 0.5
"""How long a stage waits before it reports bad input: the stage that sent it knows the origin better."""


def is_finite(values: Tensor) -> bool:
    """Return whether no value is infinite or NaN, in one pass and without a copy."""
    if not values.numel():
        return True
    return all(math.isfinite(end.item()) for end in torch.aminmax(values))


class FiniteCheck:
    """Looks at the results of one stage; `checks` takes its findings."""

    def __init__(self, stage: int, model: StageModel, state: BatchState, cache: KvCache, checks: StageChecks) -> None:
        self._stage = stage
        self._model = model
        self._state = state
        self._cache = cache
        self._checks = checks

    def look(self, number: int, plan: Plan, hidden: Tensor, out: Tensor) -> None:
        """Check `out` [T, H], which the layers of this stage made of `hidden` [T, H] in step `number`."""
        if not is_finite(out):
            self.explain(number, plan, plan.batch, hidden, out)

    def explain(self, number: int, plan: Plan, batch: Batch, hidden: Tensor, out: Tensor) -> None:
        """Find the origin of values in `out` that are not finite. `batch` is the plan's, in the kernels' memory."""
        if is_finite(hidden) and self._model.group.size > 1:
            # Another run of the layers would meet other calls of the other ranks, which may have found nothing.
            self._name(number, plan, out)
        elif is_finite(hidden):
            self._trace(number, plan, batch, hidden, out)
        elif self._model.first:
            self._report(number, plan, "embedding", hidden, self._weights())
        else:
            text = f"it came so from stage {self._stage - 1}: if that one found nothing, the link between them did it"
            self._report(number, plan, f"input from stage {self._stage - 1}", hidden, [text], HOLD_S)

    def look_at_logits(self, number: int, plan: Plan, logits: Tensor) -> None:
        """Check `logits` [R, V]; their input has been found finite."""
        if not is_finite(logits):
            self.explain_logits(number, plan, logits)

    def explain_logits(self, number: int, plan: Plan, logits: Tensor) -> None:
        """Say whose `logits` are not finite."""
        self._report(number, plan, "head", logits, self._weights(), rows=plan.sampled)

    def _trace(self, number: int, plan: Plan, batch: Batch, hidden: Tensor, out: Tensor) -> None:
        for layer, part, behind in self._model.parts(hidden, batch, self._cache.layers):
            if not is_finite(behind):
                causes = self._weights(layer) or self._blocks(layer, plan)
                name = f"layer {layer} {part}"
                self._report(number, plan, name, behind, causes or ["weights and KV blocks of the layer are finite"])
                return
        name = f"layers {self._model.layer_range[0]} to {self._model.layer_range[1] - 1}"
        again = "a second run of the step is finite: no weight does it; something wrote where it should not"
        self._report(number, plan, name, out, [again, "try: ppconsole check ledger on"])

    def _name(self, number: int, plan: Plan, out: Tensor) -> None:
        """Name this rank's weights and KV blocks that are not finite, without another run."""
        found = []
        for layer in range(*self._model.layer_range):
            found += self._weights(layer) or self._blocks(layer, plan)
        name = f"layers {self._model.layer_range[0]} to {self._model.layer_range[1] - 1}"
        self._report(number, plan, name, out, found[:_NAMED] or ["weights and KV blocks of this rank are finite"])

    def _report(
        self,
        number: int,
        plan: Plan,
        part: str,
        values: Tensor,
        more: list[str],
        hold_s: float = 0.0,
        rows: Ints | None = None,
    ) -> None:
        bad = ~torch.isfinite(values)
        at = bad.any(1).nonzero().flatten().cpu().numpy()
        if rows is None:
            owners = np.unique(np.searchsorted(plan.query_start, at, side="right") - 1)
        else:
            owners = rows[at]
        what = "NaN" if bool(torch.isnan(values).any()) else "infinite values"
        names = [self._state.requests[int(slot)].request for slot in plan.slots[owners]]
        token = f", first at position {self._position(plan, int(at[0]))}" if rows is None else ""
        verb = "has" if part.startswith("input") else "gives"
        text = f"stage {self._stage}: {part} {verb} {what} in m{number}, request {names[0]}"
        others = len(names) - _NAMED
        evidence = [
            f"{part} {verb} {int(bad.sum())} of {bad.numel()} values that are not finite{token}",
            f"requests: {', '.join(names[:_NAMED])}{f' and {others} more' if others > 0 else ''} "
            f"({len(names)} of {len(plan.slots)} in the step)",
        ]
        if not part.startswith("input") and part != "embedding":
            evidence.append("what came into it is finite: it is the first")
        finding = Finding(
            stage=self._stage,
            cause="non_finite",
            summary=text if len(text) <= _SUMMARY_MOST else text[: _SUMMARY_MOST - 3] + "...",
            since_s=0.0,
            evidence=evidence + more,
        )
        self._checks.non_finite(number, finding, hold_s)

    def _position(self, plan: Plan, token: int) -> int:
        row = int(np.searchsorted(plan.query_start, token, side="right")) - 1
        return int(plan.starts[row]) + token - int(plan.query_start[row])

    def _weights(self, layer: int | None = None) -> list[str]:
        """Name weights that are not finite: of a layer, else of the embedding or the head."""
        found = []
        for source in self._model.sources:
            name, weight = source.name, source.target
            inside = f".layers.{layer}." in name if layer is not None else ".layers." not in name
            if inside and not is_finite(weight):
                bad = int((~torch.isfinite(weight)).sum())
                found.append(f"weight {name} has {bad} of {weight.numel()} values that are not finite")
        return found[:_NAMED]

    def _blocks(self, layer: int, plan: Plan) -> list[str]:
        """Name KV blocks of the step's requests with values that are not finite."""
        cache = self._cache.layers[layer - self._model.layer_range[0]]
        used = torch.unique(plan.batch.block_tables)
        bad = [block for block in used.tolist() if block and not is_finite(cache[block])]
        if not bad:
            return []
        listed = ", ".join(str(block) for block in bad[:_NAMED])
        return [f"weights of layer {layer} are finite, {len(bad)} of its KV blocks are not: {listed}"]
