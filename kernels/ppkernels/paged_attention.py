"""Attention over a paged KV cache, for decodes, chunks of prompts, and both in one step.

`plan_attention` turns a step's block tables into indices once; every layer then runs `paged_attention` with them.
Slots that a row must not see are never read: their index points at the row's first slot, and a mask hides the value.
So whatever an earlier owner left in a block, NaN included, cannot leak into another request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ppkernels.batch import Batch
from ppkernels.store_kv import kv_rows

GATHER_BYTES = 64 << 20
"""Decodes are taken in groups that gather at most this much (always at least one row)."""


@dataclass(frozen=True)
class DecodeGroup:
    """b decodes, padded to the longest context S among them."""

    tokens: Tensor | slice
    """Which of the step's tokens these are."""
    rows: Tensor
    """[2 * b * kv_heads * S] rows of the cache seen as [blocks * 2 * block_size * kv_heads, head_dim]."""
    bias: Tensor
    """[b * kv_heads, group, S]: 0 or -inf, added to the scores."""
    gathered: Tensor
    """[2 * b * kv_heads * S, head_dim]: room for what `rows` picks, one for all layers, so that it stays in cache."""


@dataclass(frozen=True)
class Chunk:
    """n tokens of one prompt that see L tokens."""

    tokens: slice
    rows: Tensor
    """[2 * kv_heads * L], as in `DecodeGroup`."""
    bias: Tensor | None
    """[n, L]: 0 or -inf; None where the chunk is all that there is (plainly causal)."""


@dataclass(frozen=True)
class AttentionPlan:
    """Indices and masks of one step, the same for all layers."""

    heads: int
    kv_heads: int
    store_rows: Tensor
    """[T, 2]: see `kv_rows`."""
    decodes: list[DecodeGroup]
    chunks: list[Chunk]


def plan_attention(batch: Batch, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> AttentionPlan:
    """Return the plan of one step for a cache of `kv_heads` heads of `head_dim` values of `dtype`."""
    decodes, chunks = [], []
    seq_lens = batch.seq_lens.tolist()
    if batch.decode_only:
        decode_rows = list(range(len(seq_lens)))
    else:
        decode_rows = [row for row, count in enumerate(batch.query_lens) if count == 1]
    limit = max(1, GATHER_BYTES // (2 * kv_heads * head_dim * dtype.itemsize))
    for group in _groups(decode_rows, seq_lens, limit):
        decodes.append(_plan_decodes(batch, group, seq_lens, (heads // kv_heads, kv_heads, head_dim), dtype))
    if not batch.decode_only:
        starts = batch.query_start.tolist()
        for row, count in enumerate(batch.query_lens):
            if count > 1:
                chunks.append(_plan_chunk(batch, row, starts[row], count, seq_lens[row], kv_heads, dtype))
    return AttentionPlan(heads, kv_heads, kv_rows(batch.slot_mapping, batch.block_size), decodes, chunks)


def paged_attention(query: Tensor, kv: Tensor, plan: AttentionPlan) -> Tensor:
    """Return attention [T, heads * head_dim] of `query` [T, heads, head_dim] over the cache of one layer.

    `kv` [blocks, 2, block_size, kv_heads, head_dim] is contiguous and already holds this step's keys and values.
    Scores are scaled by 1 / sqrt(head_dim); consecutive query heads share a key head.
    """
    return paged_attention_reference(query, kv, plan)


def paged_attention_reference(query: Tensor, kv: Tensor, plan: AttentionPlan) -> Tensor:
    """Torch version of `paged_attention`."""
    flat = kv.view(-1, kv.shape[-1])
    if not plan.chunks and len(plan.decodes) == 1:
        return _attend_decodes(query, flat, plan.decodes[0], plan)
    output = query.new_empty(query.shape[0], plan.heads * kv.shape[-1])
    for group in plan.decodes:
        output[group.tokens] = _attend_decodes(query[group.tokens], flat, group, plan)
    for chunk in plan.chunks:
        output[chunk.tokens] = _attend_chunk(query[chunk.tokens], flat, chunk, plan)
    return output


def _attend_decodes(query: Tensor, flat: Tensor, group: DecodeGroup, plan: AttentionPlan) -> Tensor:
    width = flat.shape[-1]
    count = query.shape[0]
    torch.index_select(flat, 0, group.rows, out=group.gathered)
    key, value = group.gathered.view(2, count * plan.kv_heads, -1, width).unbind(0)
    # [b * kv_heads, group, head_dim]: the query heads of one key head are one small matrix.
    queries = query.reshape(count * plan.kv_heads, -1, width)
    scores = torch.baddbmm(group.bias, queries, key.transpose(1, 2), alpha=width**-0.5)
    return torch.bmm(torch.softmax(scores, -1), value).view(count, -1)


def _attend_chunk(query: Tensor, flat: Tensor, chunk: Chunk, plan: AttentionPlan) -> Tensor:
    width = flat.shape[-1]
    count = query.shape[0]
    key, value = flat.index_select(0, chunk.rows).view(2, plan.kv_heads, 1, -1, width).unbind(0)
    queries = query.view(count, plan.kv_heads, -1, width).permute(1, 2, 0, 3)  # [kv_heads, group, n, head_dim]
    shape = (-1, queries.shape[1], -1, -1)
    output = functional.scaled_dot_product_attention(
        queries, key.expand(shape), value.expand(shape), attn_mask=chunk.bias, is_causal=chunk.bias is None
    )
    return output.permute(2, 0, 1, 3).reshape(count, -1)


def _groups(rows: list[int], seq_lens: list[int], limit: int) -> list[list[int]]:
    """Cut `rows` in order so that rows times longest context stays within `limit` tokens."""
    if rows and len(rows) * max(map(seq_lens.__getitem__, rows)) <= limit:
        return [rows]
    groups: list[list[int]] = []
    longest = 0
    for row in rows:
        longest = max(longest, seq_lens[row])
        if not groups or longest * (len(groups[-1]) + 1) > limit:
            groups.append([])
            longest = seq_lens[row]
        groups[-1].append(row)
    return groups


def _plan_decodes(
    batch: Batch, rows: list[int], seq_lens: list[int], sizes: tuple[int, int, int], dtype: torch.dtype
) -> DecodeGroup:
    group, kv_heads, head_dim = sizes
    device = batch.block_tables.device
    longest = max(map(seq_lens.__getitem__, rows))
    tables, lengths = batch.block_tables, batch.seq_lens
    tokens: Tensor | slice = slice(None)
    if len(rows) != len(seq_lens):
        index = torch.tensor(rows, device=device)
        tables, lengths = tables[index], lengths[index]
    if len(rows) != len(seq_lens) or not batch.decode_only:
        tokens = batch.query_start[torch.tensor(rows)].to(device)
    visible = torch.arange(longest, device=device)
    hidden = visible >= lengths.unsqueeze(1)  # [b, S]
    keys = _key_rows(tables, visible, batch.block_size)
    keys = torch.where(hidden, keys[:, :1], keys)
    heads = torch.arange(kv_heads, device=device).view(1, kv_heads, 1)
    cache_rows = keys.unsqueeze(1) * kv_heads + heads  # [b, kv_heads, S]
    both = torch.stack((cache_rows, cache_rows + batch.block_size * kv_heads))
    bias = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
    shape = (len(rows), kv_heads, group, longest)
    return DecodeGroup(
        tokens,
        rows=both.view(-1),
        bias=bias[:, None, None].expand(shape).reshape(-1, group, longest),
        gathered=torch.empty((both.numel(), head_dim), dtype=dtype, device=device),
    )


def _plan_chunk(
    batch: Batch, row: int, start: int, count: int, length: int, kv_heads: int, dtype: torch.dtype
) -> Chunk:
    device = batch.block_tables.device
    visible = torch.arange(length, device=device)
    keys = _key_rows(batch.block_tables[row : row + 1], visible, batch.block_size)  # [1, L]
    cache_rows = keys * kv_heads + torch.arange(kv_heads, device=device).unsqueeze(1)  # [kv_heads, L]
    both = torch.stack((cache_rows, cache_rows + batch.block_size * kv_heads))
    bias = None
    if count != length:
        last = torch.arange(length - count, length, device=device).unsqueeze(1)
        bias = torch.zeros((count, length), dtype=dtype, device=device)
        bias.masked_fill_(visible > last, float("-inf"))
    return Chunk(slice(start, start + count), both.view(-1), bias)


def _key_rows(tables: Tensor, visible: Tensor, block_size: int) -> Tensor:
    """Return [b, S]: row of the key of each visible token in a cache seen as [blocks * 2 * block_size, ...]."""
    index = torch.div(visible, block_size, rounding_mode="floor")
    return tables[:, index] * (2 * block_size) + visible % block_size
