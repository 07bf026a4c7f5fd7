"""Attention over a paged KV cache, for decodes, chunks of prompts, and both in one step.

`plan_attention` makes the plan of a step; every layer then runs `paged_attention` with it. Slots that a row must
not see have no effect: whatever an earlier owner left in a block, NaN included, cannot leak into another request.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ppkernels import gpu, jit, paged_tiles
from ppkernels.batch import Batch
from ppkernels.kv_layout import keys, values

GATHER_BYTES = 64 << 20
"""The reference takes decodes in groups that gather at most this much (always at least one row)."""


@dataclass(frozen=True)
class Decodes:
    """b rows with one token each."""

    tokens: Tensor
    """[b] which of the step's tokens these are."""
    tables: Tensor
    """[b, M] blocks of each row, padded with the null block."""
    lengths: Tensor
    """[b] tokens that are visible, the row's own included."""


@dataclass(frozen=True)
class Chunk:
    """n tokens of one prompt that see L tokens."""

    tokens: slice
    table: Tensor
    """[ceil(L / block_size)]"""
    length: int
    bias: Tensor | None
    """[n, L]: 0 or -inf; None where the chunk is all that there is (plainly causal)."""


@dataclass(frozen=True)
class AttentionPlan:
    """The rows of one step, the same for all layers; sorted when somebody asks, which kernels for GPUs never do."""

    batch: Batch
    heads: int
    dtype: torch.dtype

    @property
    def slots(self) -> Tensor:
        """[T]: where each token's key and value go, for `store_kv`."""
        return self.batch.slot_mapping

    @functools.cached_property
    def decodes(self) -> Decodes | None:
        """The rows with one token, if there are any."""
        batch, device = self.batch, self.batch.block_tables.device
        if batch.decode_only:
            return Decodes(torch.arange(len(batch.query_lens), device=device), batch.block_tables, batch.seq_lens)
        single = [row for row, count in enumerate(batch.query_lens) if count == 1]
        if not single:
            return None
        rows = torch.tensor(single)
        tokens = batch.query_start[rows.to(batch.query_start.device)].to(device)
        rows = rows.to(device)
        return Decodes(tokens, batch.block_tables[rows], batch.seq_lens[rows])

    @functools.cached_property
    def chunks(self) -> list[Chunk]:
        """The other rows."""
        if self.batch.decode_only:
            return []
        starts, lengths = self.batch.query_start.tolist(), self.batch.seq_lens.tolist()
        return [
            _plan_chunk(self.batch, row, starts[row], count, lengths[row], self.dtype)
            for row, count in enumerate(self.batch.query_lens)
            if count > 1
        ]


def plan_attention(batch: Batch, heads: int, dtype: torch.dtype) -> AttentionPlan:
    """Return the plan of one step for `heads` query heads of `dtype`."""
    return AttentionPlan(batch, heads, dtype)


def paged_attention(fused: Tensor, kv: Tensor, plan: AttentionPlan) -> Tensor:
    """Return attention [T, heads * head_dim] of the first `heads` heads of `fused` [T, ..., head_dim].

    `kv` is the cache of one layer (see `kv_layout`) and already holds this step's keys and values. Scores are scaled
    by 1 / sqrt(head_dim); consecutive query heads share a key head. A block beyond the cache raises IndexError, but on
    a GPU, where raising would wait for the device, blocks are trusted.
    """
    if gpu.serves(kv) and fused.is_contiguous():
        from ppkernels.gpu.paged_attention import paged_attention as attend_on_gpu

        return attend_on_gpu(fused, kv, plan.batch, plan.heads)
    if not (paged_tiles.takes(kv) and fused.is_contiguous()):
        return paged_attention_reference(fused, kv, plan)
    batch, apart = plan.batch, plan.batch.decode_only or not jit.one_thread()
    output = fused.new_empty(fused.shape[0], plan.heads * kv.shape[-1])
    if not apart:
        _attend_rows(
            fused, kv, (batch.query_start[:-1], batch.query_start[1:], batch.seq_lens, batch.block_tables), output
        )
        return output
    decodes = plan.decodes
    if decodes is not None:
        _attend_rows(fused, kv, (decodes.tokens, decodes.tokens + 1, decodes.lengths, decodes.tables), output)
    for chunk in plan.chunks:
        output[chunk.tokens] = _attend_chunk(fused[chunk.tokens, : plan.heads], kv, chunk)
    return output


def _attend_rows(fused: Tensor, kv: Tensor, rows: tuple[Tensor, ...], output: Tensor) -> None:
    """Put the attention of `rows` (first tokens, ends, lengths, block tables) into `output` [T, heads * head_dim]."""
    heads = output.shape[1] // kv.shape[-1]
    arguments = (fused, kv, *rows, output.view(len(output), heads, -1))
    refuse_row(paged_tiles.attend(*(each.numpy() for each in arguments)), kv)


def refuse_row(row: int, kv: Tensor) -> None:
    """Raise IndexError if a kernel found a bad block in `row`, and did not return -1."""
    if row >= 0:
        raise IndexError(f"row {row} has a block outside of the cache, which has {kv.shape[0]}")


def paged_attention_reference(fused: Tensor, kv: Tensor, plan: AttentionPlan) -> Tensor:
    """Torch version of `paged_attention`."""
    query = fused[:, : plan.heads]
    output = query.new_empty(query.shape[0], plan.heads * kv.shape[-1])
    if plan.decodes is not None:
        tokens, tables, lengths = plan.decodes.tokens, plan.decodes.tables, plan.decodes.lengths
        size = max(1, GATHER_BYTES // (tables.shape[1] * kv[0].nbytes))
        for first in range(0, len(tokens), size):
            some = slice(first, first + size)
            output[tokens[some]] = _attend_decodes(query[tokens[some]], kv, tables[some], lengths[some])
    for chunk in plan.chunks:
        output[chunk.tokens] = _attend_chunk(query[chunk.tokens], kv, chunk)
    return output


def _attend_decodes(query: Tensor, kv: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
    count, (_, kv_heads, block_size, width) = query.shape[0], values(kv).shape
    hidden = torch.arange(tables.shape[1] * block_size, device=kv.device) >= lengths.unsqueeze(1)  # [b, S]
    key = keys(kv)[tables].permute(0, 2, 3, 1, 4).reshape(count, kv_heads, width, -1)
    value = values(kv)[tables].transpose(1, 2).reshape(count, kv_heads, -1, width)
    # [b, kv_heads, group, head_dim]: the query heads of one key head are one small matrix.
    scores = query.reshape(count, kv_heads, -1, width) @ key * width**-0.5
    scores = scores.masked_fill(hidden[:, None, None], float("-inf"))
    weights = torch.softmax(scores, -1).masked_fill(hidden[:, None, None], 0.0)  # not NaN where nothing is seen
    # A weight of 0 does not hide a NaN.
    value = value.masked_fill(hidden[:, None, :, None], 0.0)
    return (weights @ value).view(count, -1)


def _attend_chunk(query: Tensor, kv: Tensor, chunk: Chunk) -> Tensor:
    count, width, kv_heads = query.shape[0], query.shape[2], values(kv).shape[1]
    key = keys(kv)[chunk.table].permute(1, 0, 3, 2).reshape(kv_heads, 1, -1, width)[:, :, : chunk.length]
    value = values(kv)[chunk.table].transpose(0, 1).reshape(kv_heads, 1, -1, width)[:, :, : chunk.length]
    queries = query.reshape(count, kv_heads, -1, width).permute(1, 2, 0, 3)  # [kv_heads, group, n, head_dim]
    shape = (-1, queries.shape[1], -1, -1)
    output = functional.scaled_dot_product_attention(
        queries, key.expand(shape), value.expand(shape), attn_mask=chunk.bias, is_causal=chunk.bias is None
    )
    return output.permute(2, 0, 1, 3).reshape(count, -1)


def _plan_chunk(batch: Batch, row: int, start: int, count: int, length: int, dtype: torch.dtype) -> Chunk:
    device = batch.block_tables.device
    bias = None
    if count != length:
        last = torch.arange(length - count, length, device=device).unsqueeze(1)
        bias = torch.zeros((count, length), dtype=dtype, device=device)
        bias.masked_fill_(torch.arange(length, device=device) > last, float("-inf"))
    table = batch.block_tables[row, : -(-length // batch.block_size)]
    return Chunk(slice(start, start + count), table, length, bias)
