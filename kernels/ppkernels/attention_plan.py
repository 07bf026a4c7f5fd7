"""The rows of one step as attention takes them, sorted into decodes and chunks of prompts."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ppkernels.batch import Batch
from ppkernels.kv_layout import keys, values


@dataclass(frozen=True)
class Decodes:
    """b rows with one token each."""

    tokens: Tensor
    """[b] indices of their tokens in the step."""
    tables: Tensor
    """[b, M] blocks of each row, padded with the null block."""
    lengths: Tensor
    """[b] visible tokens, the row's own included."""


@dataclass(frozen=True)
class Chunk:
    """n tokens of one prompt, with L visible tokens."""

    tokens: slice
    """Their indices in the step."""
    table: Tensor
    """[ceil(L / block_size)] blocks."""
    length: int
    """L."""
    bias: Tensor | None
    """[n, L], 0 or -inf; None if n is L, where plain causal attention is right."""

    def attend(self, query: Tensor, kv: Tensor) -> Tensor:
        """Return attention [n, heads * head_dim] of `query` [n, heads, head_dim], by torch."""
        count, width, kv_heads = query.shape[0], query.shape[2], values(kv).shape[1]
        key = keys(kv)[self.table].permute(1, 0, 3, 2).reshape(kv_heads, 1, -1, width)[:, :, : self.length]
        value = values(kv)[self.table].transpose(0, 1).reshape(kv_heads, 1, -1, width)[:, :, : self.length]
        queries = query.reshape(count, kv_heads, -1, width).permute(1, 2, 0, 3)  # [kv_heads, group, n, head_dim]
        shape = (-1, queries.shape[1], -1, -1)
        output = functional.scaled_dot_product_attention(
            queries, key.expand(shape), value.expand(shape), attn_mask=self.bias, is_causal=self.bias is None
        )
        return output.permute(2, 0, 1, 3).reshape(count, -1)


@dataclass(frozen=True)
class AttentionPlan:
    """The rows of one step, the same for all layers. Rows are sorted on first use, which GPU
    kernels never need.
    """

    batch: Batch
    heads: int
    """Query heads."""
    dtype: torch.dtype

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
        """The rows with more than one token."""
        if self.batch.decode_only:
            return []
        starts, lengths = self.batch.query_start.tolist(), self.batch.seq_lens.tolist()
        return [
            _plan_chunk(self.batch, row, starts[row], count, lengths[row], self.dtype)
            for row, count in enumerate(self.batch.query_lens)
            if count > 1
        ]


def _plan_chunk(batch: Batch, row: int, start: int, count: int, length: int, dtype: torch.dtype) -> Chunk:
    device = batch.block_tables.device
    bias = None
    if count != length:
        last = torch.arange(length - count, length, device=device).unsqueeze(1)
        bias = torch.zeros((count, length), dtype=dtype, device=device)
        bias.masked_fill_(torch.arange(length, device=device) > last, float("-inf"))
    table = batch.block_tables[row, : -(-length // batch.block_size)]
    return Chunk(slice(start, start + count), table, length, bias)
