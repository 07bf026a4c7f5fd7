"""Sampling on cards whose ranks have a split vocabulary: they exchange best tokens where those decide, else logits."""

from __future__ import annotations

from collections.abc import Iterable

from ppengine.protocol.steps import Register, Step
from ppengine.stage.backends.cuda.card_group import CardGroup
from ppengine.stage.rank_group import RankGroup


def greedy_ranks(group: RankGroup, step: Step, finite: bool, requests: Iterable[Register]) -> CardGroup | None:
    """Return the group if its ranks' best tokens decide all rows of a step; None if whole logits are needed.

    Ranks must launch the same, so the step alone decides; `finite`, the finite check is on, is of steps, too.
    """
    if not isinstance(group, CardGroup) or finite or step.masks or step.late:
        return None
    greedy = all(one.temperature <= 0 and one.adjustments is None and one.logprobs < 0 for one in requests)
    return group if greedy else None
