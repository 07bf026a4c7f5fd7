"""Log-probabilities of prompts on the last stage: the logits of all positions, some at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from ppkernels.best_ids import best_ids
from torch import Tensor

from ppengine.protocol.prompt_scores import PromptLogprob, PromptScores
from ppengine.stage.batch_state import BatchState, Plan

AT_ONCE = 32
"""Positions whose logits are in memory together: on a GPU beside the activations that the profile run counts."""


class Positions(NamedTuple):
    """Some positions of one prompt in a step."""

    request: str
    begin: int
    """Index of the first one among the tokens of the step."""
    first: int
    """Position of the token that it predicts."""
    targets: list[int]
    """The tokens of the prompt that they predict."""
    top: int


def positions_of(plan: Plan, state: BatchState) -> Iterator[Positions]:
    """Yield the positions of a step whose log-probabilities are wanted, `AT_ONCE` at most in each."""
    if not state.scored:
        return
    rows = zip(plan.slots.tolist(), plan.starts.tolist(), plan.ends.tolist(), plan.query_start.tolist(), strict=False)
    for slot, start, end, begin in rows:
        register = state.requests[slot]
        # The last position of the prompt predicts the output.
        last = min(end, register.prompt_len - 1) if register.prompt_logprobs >= 0 else start
        for at in range(start, last, AT_ONCE):
            targets = list(register.tokens[at + 1 : min(at + AT_ONCE, last) + 1])
            yield Positions(register.request, begin + at - start, at + 1, targets, register.prompt_logprobs)


def wants_positions(plan: Plan, state: BatchState) -> bool:
    """Return whether a step has positions whose log-probabilities are wanted."""
    return next(positions_of(plan, state), None) is not None


def score(wanted: Positions, hidden: Tensor, logits: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return log-probabilities [P], ranks [P], best tokens [P, K] and theirs [P, K] on the device of `hidden` [T, H].

    `logits` makes the whole logits of rows.
    """
    rows = logits(hidden[wanted.begin : wanted.begin + len(wanted.targets)])
    values = torch.log_softmax(rows if rows.dtype == torch.float64 else rows.float(), -1)
    targets = torch.tensor(wanted.targets).unsqueeze(1)
    if values.is_cuda:
        # From pinned memory, so that the host need not wait for the device.
        targets = targets.pin_memory().to(values.device, non_blocking=True)
    chosen = values.gather(1, targets)
    best = best_ids(values, min(wanted.top, values.shape[1]))
    return [chosen.squeeze(1), (values >= chosen).sum(-1), best, values.gather(1, best)]


def scores_of(wanted: Positions, parts: list[Tensor]) -> PromptScores:
    """Return what `score` has computed, in the form of messages."""
    chosen, ranks, tokens, values = (part.tolist() for part in parts)
    logprobs = [
        PromptLogprob(value, rank, sorted(zip(*best, strict=True), key=lambda pair: (-pair[1], pair[0])))
        for value, rank, *best in zip(chosen, ranks, tokens, values, strict=True)
    ]
    return PromptScores(wanted.request, wanted.first, logprobs)
