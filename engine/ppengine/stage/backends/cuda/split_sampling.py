"""Sampling on cards whose ranks have a split vocabulary: they exchange best tokens if those decide, or all logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ppkernels.gpu import top_k_ranks
from ppkernels.gpu.sampling import DeviceSampling
from torch import Tensor

from ppengine.checkpoint.model_shard import Shard
from ppengine.protocol.steps import Register, Step
from ppengine.stage.backends.cuda.card_group import CardGroup
from ppengine.stage.rank_group import RankGroup


class BestTokens(NamedTuple):
    """Ranks whose best tokens decide all rows of a step."""

    group: CardGroup
    most: int
    """Largest top-k of the rows; 0 if all are greedy."""

    def choose(
        self, logits: Tensor, shard: Shard, parameters: DeviceSampling, slots: Tensor, positions: Tensor,
        newest: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Return the tokens [R] from all ranks' `logits` [R, w], which are not gathered."""
        if self.most == 0:
            return self.group.choose_greedy(logits, shard, parameters, slots, positions, newest)
        return self.group.choose_below(logits, shard, parameters, slots, positions, self.most, newest)


def best_tokens(group: RankGroup, step: Step, finite: bool, requests: Sequence[Register]) -> BestTokens | None:
    """Return how ranks choose from their best tokens; None if whole logits are needed.

    Ranks must launch the same, so the step alone decides; `finite`, the finite check is on, is of steps, too.
    """
    if not isinstance(group, CardGroup) or finite or step.masks or step.late:
        return None
    if any(one.adjustments is not None or one.logprobs >= 0 for one in requests):
        return None
    numbers = [one.top_k for one in requests if one.temperature > 0]
    if not numbers:
        return BestTokens(group, 0)
    fitting = min(numbers) >= 1 and top_k_ranks.fits(len(requests), max(numbers))
    return BestTokens(group, max(numbers)) if fitting else None
