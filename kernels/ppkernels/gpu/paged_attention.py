"""Attention over a paged KV cache: a kernel for rows with one token, one for chunks, and one for chunks on Hopper
cards.
"""

from __future__ import annotations

from torch import Tensor

from ppkernels.attention_plan import AttentionPlan
from ppkernels.gpu import hopper
from ppkernels.gpu.paged_decode import attend_decodes
from ppkernels.gpu.paged_prefill import attend_chunks


def paged_attention(fused: Tensor, kv: Tensor, plan: AttentionPlan) -> Tensor:
    """Return attention [T, heads * head_dim]. Blocks are trusted: a check would wait."""
    batch, heads = plan.batch, plan.heads
    output = fused.new_empty(len(fused), heads * kv.shape[4])
    # Each kernel gets all rows and skips the other's, so that nothing is sorted or gathered.
    if batch.decode_only or 1 in batch.query_lens:
        attend_decodes(fused, kv, batch, heads, output)
    if batch.decode_only:
        return output
    if hopper.serves(kv, batch, heads):
        # Gluon is experimental: only cards that gain by it import it.
        from ppkernels.gpu.hopper import launch

        launch.attend_chunks(fused, kv, batch, heads, output)
    else:
        attend_chunks(fused, kv, batch, heads, output)
    return output
