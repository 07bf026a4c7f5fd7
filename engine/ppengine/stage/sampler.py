"""Sampling of a step's rows on the last stage, with the parameters that each request was registered with."""

from __future__ import annotations

from collections.abc import Mapping

from ppkernels.sampling import sample
from ppkernels.sampling_inputs import SamplingInputs
from torch import Tensor

from ppengine.protocol.steps import Register, Sampled


def sample_rows(
    logits: Tensor, requests: Mapping[int, Register], slots: list[int], positions: list[int]
) -> tuple[Tensor, list[Sampled]]:
    """Return tokens [R] int64 and their wire form, in row order.

    `logits` is [R, V]; `positions` say where in its sequence each token goes, which keys its random
    number.
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
    )
    output = sample(logits, inputs)
    sampled = [Sampled(slot, token) for slot, token in zip(slots, output.tokens.tolist(), strict=True)]
    for index, (chosen, best) in output.logprobs.items():
        sampled[index].logprob, sampled[index].top = chosen, best
    return output.tokens, sampled
