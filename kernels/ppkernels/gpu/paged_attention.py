"""Attention over a paged KV cache: rows with one token and chunks of prompts each have a kernel of their own."""

from __future__ import annotations

from torch import Tensor

from ppkernels.batch import Batch
from ppkernels.gpu.paged_decode import attend_decodes
from ppkernels.gpu.paged_prefill import attend_chunks


def paged_attention(fused: Tensor, kv: Tensor, batch: Batch, heads: int) -> Tensor:
    """See `ppkernels.paged_attention`. Blocks are trusted: a check would wait for the device."""
    output = fused.new_empty(len(fused), heads * kv.shape[4])
    # Both kernels see all rows and leave the other's alone, so that nothing is sorted or gathered.
    if batch.decode_only or 1 in batch.query_lens:
        attend_decodes(fused, kv, batch, heads, output)
    if not batch.decode_only:
        attend_chunks(fused, kv, batch, heads, output)
    return output
