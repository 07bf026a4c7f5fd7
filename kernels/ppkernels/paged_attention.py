"""Attention over a paged KV cache, for decodes, chunks of prompts, and both in one step.

An `AttentionPlan` is made for a step; every layer then runs `paged_attention` with it. Slots
that a row must not see have no effect: NaN that an earlier owner left in a block cannot leak into
another request.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ppkernels.attention_plan import AttentionPlan
from ppkernels.dispatch import choose
from ppkernels.kv_layout import keys, values

GATHER_BYTES = 64 << 20
"""Most bytes that the reference gathers for one group of decodes of at least one row."""


def paged_attention(fused: Tensor, kv: Tensor, plan: AttentionPlan) -> Tensor:
    """Return attention [T, heads * head_dim] of the first `heads` heads of `fused` [T, ...,
    head_dim].

    `kv` is the cache of one layer (see `kv_layout`) and already holds this step's keys and values.
    Scores are scaled by 1 / sqrt(head_dim); consecutive query heads share a key head. A block
    outside of the cache raises IndexError, except on a GPU, where raising would wait for the
    device: there blocks are trusted.
    """
    return choose("paged_attention", paged_attention_reference, kv, fused)(fused, kv, plan)


def paged_attention_reference(fused: Tensor, kv: Tensor, plan: AttentionPlan) -> Tensor:
    """Return `paged_attention`, computed by torch."""
    query = fused[:, : plan.heads]
    output = query.new_empty(query.shape[0], plan.heads * kv.shape[-1])
    if plan.decodes is not None:
        tokens, tables, lengths = plan.decodes.tokens, plan.decodes.tables, plan.decodes.lengths
        size = max(1, GATHER_BYTES // (tables.shape[1] * kv[0].nbytes))
        for first in range(0, len(tokens), size):
            some = slice(first, first + size)
            output[tokens[some]] = _attend_decodes(query[tokens[some]], kv, tables[some], lengths[some])
    for chunk in plan.chunks:
        output[chunk.tokens] = chunk.attend(query[chunk.tokens], kv)
    return output


def _attend_decodes(query: Tensor, kv: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
    count, (_, kv_heads, block_size, width) = query.shape[0], values(kv).shape
    hidden = torch.arange(tables.shape[1] * block_size, device=kv.device) >= lengths.unsqueeze(1)  # [b, S]
    key = keys(kv)[tables].permute(0, 2, 3, 1, 4).reshape(count, kv_heads, width, -1)
    value = values(kv)[tables].transpose(1, 2).reshape(count, kv_heads, -1, width)
    # [b, kv_heads, group, head_dim]: the query heads of one key head are one small matrix.
    scores = query.reshape(count, kv_heads, -1, width) @ key * width**-0.5
    scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
    weights = torch.softmax(scores, -1).masked_fill(hidden[:, None, None], 0.0)  # not NaN for a row that sees nothing
    # A weight of 0 does not hide a NaN.
    value = value.masked_fill(hidden[:, None, :, None], 0.0)
    return (weights @ value).view(count, -1)
