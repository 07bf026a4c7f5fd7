"""Sampling of a step's rows on the last stage, with the parameters that each request was registered with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ppkernels.sampling import sample
from ppkernels.sampling_inputs import Adjustment, SamplingInputs
from torch import Tensor

from ppengine.checkpoint.model_shard import Shard
from ppengine.models.group import ALONE, Group
from ppengine.protocol.steps import Mask, Register, Sampled
from ppengine.protocol.token_mask import TokenMask
from ppengine.stage.candidates import sample_split
from ppengine.stage.token_history import TokenHistory, adjustment_of


def sample_rows(
    logits: Tensor,
    requests: Mapping[int, Register],
    history: TokenHistory,
    slots: list[int],
    positions: list[int],
    shard: Shard | None = None,
    group: Group = ALONE,
    masks: Mapping[int, TokenMask] | None = None,
) -> tuple[Tensor, list[Sampled]]:
    """Return tokens [R] int64 and their wire form, in row order.

    `logits` is [R, V], or this rank's columns of it if `shard` says that the vocabulary is split over
    `group`: all of its ranks return the same. `positions` say where in its sequence each token goes,
    which keys its random number. `history` has the tokens before them of requests with adjustments,
    and gets the new ones. `masks` are those of constrained requests, by slot.
    """
    rows = [requests[slot] for slot in slots]
    inputs = SamplingInputs(
        temperature=[row.temperature for row in rows],
        top_p=[row.top_p for row in rows],
        top_k=[row.top_k for row in rows],
        seed=[row.seed for row in rows],
        sample=[row.sample for row in rows],
        position=positions,
        banned={
            index: row.stop_token_ids
            for index, (row, position) in enumerate(zip(rows, positions, strict=True))
            if position - row.prompt_len < row.min_tokens and row.stop_token_ids
        },
        logprobs=[row.logprobs for row in rows],
        adjustments=_adjustments(rows, positions, history),
        masks={index: masks[slot] for index, slot in enumerate(slots) if slot in masks} if masks else {},
    )
    if shard is None or shard.size == 1:
        output = sample(logits, inputs)
    else:
        output = sample_split(logits, inputs, shard, group)
    sampled = [Sampled(slot, token) for slot, token in zip(slots, output.tokens.tolist(), strict=True)]
    for index in inputs.adjustments:
        history.append(slots[index], sampled[index].token)
    for index, (chosen, best) in output.logprobs.items():
        sampled[index].logprob, sampled[index].top = chosen, best
    return output.tokens, sampled


def masks_by_slot(masks: Iterable[Mask]) -> dict[int, TokenMask]:
    """Return the masks of constrained rows."""
    return {slot: mask.tokens for mask in masks for slot in mask.slots}


def _adjustments(rows: list[Register], positions: list[int], history: TokenHistory) -> dict[int, Adjustment]:
    """Return the adjustments of the rows that have some, by row."""
    return {
        index: adjustment_of(row, history.before(row.slot, position))
        for index, (row, position) in enumerate(zip(rows, positions, strict=True))
        if row.adjustments is not None
    }
