"""Bytes of one place, from the model's shapes alone: weights, and the activations of the largest step."""

from __future__ import annotations

from ppengine.checkpoint.model_shard import Shard
from ppengine.checkpoint.model_spec import ModelSpec

_OPT_POSITIONS = 2
"""Rows of OPT's position table before position 0."""


def share_bytes(spec: ModelSpec, shard: Shard, layers: int, item_bytes: int, *, first: bool, last: bool) -> int:
    """Return the bytes of a rank's weights on a stage of `layers` layers; `first` has the embedding, `last` the head.

    A stage that is both has one table for a tied embedding and head.
    """
    vocabulary = shard.vocabulary[1] - shard.vocabulary[0]
    wide = spec.embed_dim or spec.hidden_size
    tables = (first and not (last and spec.tie_word_embeddings)) + last
    count = tables * vocabulary * wide + layers * _layer(spec, shard)
    if spec.model_type == "opt":
        projection = wide * spec.hidden_size if wide != spec.hidden_size else 0
        count += first * ((spec.max_position + _OPT_POSITIONS) * spec.hidden_size + projection)
        count += last * (projection + (_norm(spec) if spec.final_norm else 0))
    else:
        count += last * _norm(spec)
    return count * item_bytes


def activation_bytes(spec: ModelSpec, shard: Shard, item_bytes: int, tokens: int, rows: int, *, last: bool) -> int:
    """Return about the bytes of the largest step: `tokens` through a layer, `rows` of them through the head.

    The engine measures this at boot. Here it is the residual stream twice, the widest pair of a layer's products and
    the logits, with a copy of them where they are gathered.
    """
    heads = (shard.num_heads + 2 * shard.num_kv_heads) * spec.head_dim
    inner = (shard.inner[1] - shard.inner[0]) * (2 if spec.model_type == "opt" else 3)
    attention = heads + shard.num_heads * spec.head_dim
    layer = tokens * (3 * spec.hidden_size + max(attention, inner))
    logits = rows * (spec.vocab_size if shard.size == 1 else 2 * spec.vocab_size) if last else 0
    return item_bytes * max(layer, logits)


def _layer(spec: ModelSpec, shard: Shard) -> int:
    """Return the parameters of one layer of a rank."""
    hidden, query = spec.hidden_size, shard.num_heads * spec.head_dim
    fused = query + 2 * shard.num_kv_heads * spec.head_dim
    inner = shard.inner[1] - shard.inner[0]
    up = inner * (1 if spec.model_type == "opt" else 2)
    count = hidden * (fused + query + up + inner) + (4 if spec.output_norms else 2) * _norm(spec)
    count += fused * spec.qkv_bias + hidden * spec.out_bias + (up + hidden) * spec.mlp_bias
    return count + 2 * spec.head_dim * spec.qk_norm


def _norm(spec: ModelSpec) -> int:
    """Return the parameters of one norm: OPT's have a bias, and may have neither."""
    if spec.model_type != "opt":
        return spec.hidden_size
    return 2 * spec.hidden_size if spec.norm_affine else 0
