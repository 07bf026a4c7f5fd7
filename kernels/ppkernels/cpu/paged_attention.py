"""Attention over a paged KV cache on a CPU."""

from __future__ import annotations

from torch import Tensor

from ppkernels import cpu
from ppkernels.attention_plan import AttentionPlan
from ppkernels.cpu.paged_tiles import attend


def paged_attention(fused: Tensor, kv: Tensor, plan: AttentionPlan) -> Tensor:
    """Return attention [T, heads * head_dim] of the first `heads` heads of `fused`, contiguous.

    With several threads torch computes the chunks. Raises IndexError for a block outside of the
    cache.
    """
    batch = plan.batch
    output = fused.new_empty(fused.shape[0], plan.heads * kv.shape[-1])
    if batch.decode_only or cpu.one_thread():
        rows = (batch.query_start[:-1], batch.query_start[1:], batch.seq_lens, batch.block_tables)
        _attend_rows(fused, kv, rows, output)
        return output
    decodes = plan.decodes
    if decodes is not None:
        _attend_rows(fused, kv, (decodes.tokens, decodes.tokens + 1, decodes.lengths, decodes.tables), output)
    for chunk in plan.chunks:
        output[chunk.tokens] = chunk.attend(fused[chunk.tokens, : plan.heads], kv)
    return output


def _attend_rows(fused: Tensor, kv: Tensor, rows: tuple[Tensor, ...], output: Tensor) -> None:
    """Write the attention of `rows` (first tokens, ends, lengths, block tables) to `output` [T,
    heads * head_dim].
    """
    heads = output.shape[1] // kv.shape[-1]
    arguments = (fused, kv, *rows, output.view(len(output), heads, -1))
    refuse_row(attend(*(each.numpy() for each in arguments)), kv)


def refuse_row(row: int, kv: Tensor) -> None:
    """Raise IndexError if a kernel found a bad block in `row`; -1 means that it found none."""
    if row >= 0:
        raise IndexError(f"row {row} has a block outside of the cache, which has {kv.shape[0]}")
