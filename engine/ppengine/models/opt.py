"""OPT, with the projected embedding and the norms behind (not before) each block of OPT-350m."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import torch
from ppkernels.batch import Batch
from ppkernels.norms import layer_norm
from ppkernels.paged_attention import AttentionPlan, paged_attention
from ppkernels.store_kv import store_kv
from torch import Tensor, nn
from torch.nn import functional

from ppengine.checkpoint import ModelSpec
from ppengine.models.layers import Linear, WeightTable, part_of
from ppengine.models.stage import StageModel

POSITION_OFFSET = 2
"""Rows of the position table before position 0, left over from padding ids."""
_PREFIX = "model.decoder."


class OptStage(StageModel):
    """Stage of an OPT model."""

    def __init__(
        self,
        spec: ModelSpec,
        layers: tuple[int, int],
        first: bool,
        last: bool,
        table: WeightTable,
        max_model_len: int,
    ) -> None:
        super().__init__(spec, layers, first, last, table)
        hidden, width = spec.hidden_size, spec.embed_dim
        tied, projected = spec.tie_word_embeddings, spec.embed_dim != spec.hidden_size
        self.embedding = self.positions = self.head = self.norm = self.project_in = self.project_out = None
        embedding = _PREFIX + "embed_tokens.weight"
        if first and not (last and tied):
            self.embedding = table.take(embedding, spec.vocab_size, width)
        if first:
            rows = spec.max_position + POSITION_OFFSET
            self.positions = table.take(_PREFIX + "embed_positions.weight", rows, hidden)
            if projected:
                self.project_in = table.linear([(_PREFIX + "project_in", hidden)], width, bias=False)
        self.layers = nn.ModuleList([OptLayer(spec, index, table) for index in range(*layers)])
        if last:
            self.norm = LayerNorm(_PREFIX + "final_layer_norm", spec, table) if spec.final_norm else None
            if projected:
                self.project_out = table.linear([(_PREFIX + "project_out", width)], hidden, bias=False)
            self.head = Linear(table.take(embedding if tied else "lm_head.weight", spec.vocab_size, width), None)

    def _embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        if self.head is not None and self.spec.tie_word_embeddings:
            hidden = self.head.rows(token_ids)
        else:
            hidden = functional.embedding(token_ids, part_of(self.embedding, "first"))
        if self.project_in is not None:
            hidden = self.project_in(hidden)
        positions = positions + POSITION_OFFSET
        return hidden.add_(functional.embedding(positions, part_of(self.positions, "first")))

    def _parts(
        self, hidden: Tensor, batch: Batch, plan: AttentionPlan, kv: list[Tensor]
    ) -> Iterator[tuple[int, str, Tensor]]:
        layers = cast(Iterable[OptLayer], self.layers)
        for index, layer, cache in zip(range(*self.layer_range), layers, kv, strict=True):
            hidden = layer.attend(hidden, plan, cache)
            yield index, "attention", hidden
            hidden = layer.feed(hidden)
            yield index, "MLP", hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        if self.norm is not None:
            hidden = self.norm(hidden)
        if self.project_out is not None:
            hidden = self.project_out(hidden)
        logits: Tensor = part_of(self.head, "last")(hidden)
        return logits


class LayerNorm(nn.Module):
    """Layer norm of the hidden states."""

    def __init__(self, name: str, spec: ModelSpec, table: WeightTable) -> None:
        super().__init__()
        self.eps = spec.norm_eps
        self.weight = table.take(name + ".weight", spec.hidden_size) if spec.norm_affine else None
        self.bias = table.take(name + ".bias", spec.hidden_size) if spec.norm_affine else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the normed `hidden` [T, H]."""
        return layer_norm(hidden, self.weight, self.bias, self.eps)


class OptLayer(nn.Module):
    """Attention and MLP added to the residual stream, each normed before or behind."""

    def __init__(self, spec: ModelSpec, index: int, table: WeightTable) -> None:
        super().__init__()
        prefix = f"{_PREFIX}layers.{index}."
        hidden, attention = spec.hidden_size, prefix + "self_attn."
        self.heads, self.head_dim = spec.num_heads, spec.head_dim
        self.norm_before = spec.norm_before
        self.activation = functional.gelu if spec.activation == "gelu" else torch.relu_
        parts = [(attention + name, hidden) for name in ("q_proj", "k_proj", "v_proj")]
        self.qkv = table.linear(parts, hidden, spec.qkv_bias)
        self.out = table.linear([(attention + "out_proj", hidden)], hidden, spec.out_bias)
        self.attention_norm = LayerNorm(prefix + "self_attn_layer_norm", spec, table)
        self.up = table.linear([(prefix + "fc1", spec.intermediate_size)], hidden, spec.mlp_bias)
        self.down = table.linear([(prefix + "fc2", hidden)], spec.intermediate_size, spec.mlp_bias)
        self.mlp_norm = LayerNorm(prefix + "final_layer_norm", spec, table)

    def attend(self, hidden: Tensor, plan: AttentionPlan, kv: Tensor) -> Tensor:
        """Return the residual stream [T, H] behind the attention, as a new tensor."""
        heads, count = self.heads, hidden.shape[0]
        qkv = self.qkv(self.attention_norm(hidden) if self.norm_before else hidden)
        qkv = qkv.view(count, 3 * heads, self.head_dim)
        store_kv(kv, qkv, plan.slots)
        hidden = self.out.added(hidden, paged_attention(qkv, kv, plan))
        return hidden if self.norm_before else self.attention_norm(hidden)

    def feed(self, hidden: Tensor) -> Tensor:
        """Return the residual stream [T, H] behind the MLP; `hidden` may be written."""
        inner = self.up(self.mlp_norm(hidden) if self.norm_before else hidden)
        self.down.add_to(hidden, self.activation(inner))
        return hidden if self.norm_before else self.mlp_norm(hidden)
