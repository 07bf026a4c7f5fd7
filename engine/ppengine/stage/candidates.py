"""Sampling from a vocabulary that is split over ranks: each rank's best tokens are gathered, or all logits.

Ranks hold consecutive ids, in rank order. All of them decide by the step alone how much is gathered,
and choose from the same numbers, so that their tokens are equal.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from ppkernels.sampling import sample
from ppkernels.sampling_inputs import SamplingInputs, SamplingOutput
from torch import Tensor

from ppengine.checkpoint.model_shard import Shard
from ppengine.common.groups import HEAD, site
from ppengine.models.group import Group
from ppengine.models.layers import gather_logits

MOST = 64
"""Candidates of a row and rank that are gathered; rows that need more have all logits gathered."""


def sample_split(logits: Tensor, inputs: SamplingInputs, shard: Shard, group: Group) -> SamplingOutput:
    """Return `sample` of the whole logits, on every rank. `logits` is this rank's [R, V / size]."""
    count = candidates_needed(inputs)
    if count == 0:
        return sample(gather_logits(logits, shard, group), inputs)
    values, ids = gather_candidates(logits, count, inputs.banned, shard, group)
    chosen = sample(values, replace(inputs, banned={})).tokens
    return SamplingOutput(ids.gather(1, chosen.unsqueeze(1)).squeeze(1), {})


def candidates_needed(inputs: SamplingInputs) -> int:
    """Return how many of each rank's best tokens decide the rows; 0 if more than `MOST`, or all, are needed."""
    if inputs.adjustments or inputs.masks or max(inputs.logprobs, default=-1) >= 0:
        return 0
    pairs = zip(inputs.temperature, inputs.top_k, strict=True)
    counts = [1 if temperature <= 0 else top_k for temperature, top_k in pairs]
    return max(counts) if counts and min(counts) >= 1 and max(counts) <= MOST else 0


def gather_candidates(
    logits: Tensor, count: int, banned: dict[int, list[int]], shard: Shard, group: Group
) -> tuple[Tensor, Tensor]:
    """Return logits [R, C] and ids [R, C] of the `count` best tokens of each rank, by ascending id.

    Among equals the lowest ids are taken. Tokens that are banned, by row, have a logit of -inf.
    """
    first, end = shard.vocabulary
    here = {row: [token - first for token in tokens if first <= token < end] for row, tokens in banned.items()}
    if any(here.values()):
        logits = logits.clone()
        for row, tokens in here.items():
            logits[row, tokens] = -math.inf
    ids = best_ids(logits, count)
    # One exchange for both: a float64 holds logits of every type, and its bits fill an int64.
    bits = logits.gather(1, ids).double().view(torch.int64)
    widths = [min(count, width) for width in shard.vocabulary_widths]
    both = group.all_gather(torch.cat([bits, ids + first], 1), [2 * width for width in widths], site(0, HEAD))
    halves = torch.split(both, [width for width in widths for _ in range(2)], 1)
    values = torch.cat(halves[::2], 1).view(torch.float64).to(logits.dtype)
    return values, torch.cat(halves[1::2], 1)


def best_ids(logits: Tensor, count: int) -> Tensor:
    """Return the `count` best tokens of each row of `logits` [R, V], by ascending id: the lowest among equals.

    With fewer tokens than that, all are returned.
    """
    rows, width = logits.shape
    if count >= width:
        return torch.arange(width, device=logits.device).expand(rows, -1)
    if count == 1:
        return _greedy(logits).unsqueeze(1)
    values = logits.topk(count).values
    if values.isnan().any():
        return best_ids(logits.nan_to_num(math.inf, math.inf, -math.inf), count)
    least = values[:, -1:]
    above, equal = logits > least, logits == least
    missing = count - above.sum(1, keepdim=True)
    kept = above | (equal & (equal.cumsum(1) <= missing))
    return kept.nonzero()[:, 1].view(rows, count)


def _greedy(logits: Tensor) -> Tensor:
    rows = len(logits)
    nothing = [0] * rows
    return sample(logits, SamplingInputs([0.0] * rows, [1.0] * rows, nothing, nothing, nothing, nothing)).tokens
