"""OPT, with the projected embedding and the norms behind (not before) each block of OPT-350m."""

from __future__ import annotations

from ppkernels.activation_kind import Activation
from ppkernels.attention_plan import AttentionPlan
from ppkernels.norms import Norm
from ppkernels.paged_attention import paged_attention
from ppkernels.store_kv import store_kv
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from ppengine.checkpoint.model_spec import ModelSpec
from ppengine.common.groups import ATTENTION, MLP, site
from ppengine.models.layers import Cut, Linear, WeightTable, part_of, token_rows, uncut
from ppengine.models.residual import Residual
from ppengine.models.stage_model import Layer, StageModel

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
            self.embedding = table.vocabulary(embedding, width)
        if first:
            rows = spec.max_position + POSITION_OFFSET
            self.positions = table.take(_PREFIX + "embed_positions.weight", rows, hidden)
            if projected:
                self.project_in = table.linear([(_PREFIX + "project_in", uncut(hidden))], width, bias=False)
        self.layers = nn.ModuleList([OptLayer(spec, index, table) for index in range(*layers)])
        if last:
            self.norm = _layer_norm(_PREFIX + "final_layer_norm", spec, table) if spec.final_norm else None
            if projected:
                self.project_out = table.linear([(_PREFIX + "project_out", uncut(width))], hidden, bias=False)
            self.head = Linear(table.vocabulary(embedding if tied else "lm_head.weight", width), None)

    @override
    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        hidden = token_rows(self._rows, token_ids, self.shard, self.group)
        if self.project_in is not None:
            hidden = self.project_in(hidden)
        positions = positions + POSITION_OFFSET
        return hidden.add_(functional.embedding(positions, part_of(self.positions, "first")))

    def _rows(self, indices: Tensor) -> Tensor:
        if self.head is not None and self.spec.tie_word_embeddings:
            return self.head.rows(indices)
        return functional.embedding(indices, part_of(self.embedding, "first"))

    @override
    def logits(self, hidden: Tensor) -> Tensor:
        head, last = part_of(self.head, "last"), Residual(hidden)
        if self.project_out is None:
            return last.through(self.norm, head)
        logits: Tensor = head(last.through(self.norm, self.project_out))
        return logits


def _layer_norm(name: str, spec: ModelSpec, table: WeightTable) -> Norm:
    weight, bias = (
        table.take(f"{name}.{part}", spec.hidden_size) if spec.norm_affine else None for part in ("weight", "bias")
    )
    return Norm(weight, bias, spec.norm_eps, centred=True)


class OptLayer(Layer):
    """Attention and MLP, each normed before or behind."""

    def __init__(self, spec: ModelSpec, index: int, table: WeightTable) -> None:
        super().__init__()
        prefix = f"{_PREFIX}layers.{index}."
        hidden, shard, attention = spec.hidden_size, table.shard, prefix + "self_attn."
        heads = Cut(spec.num_heads, *shard.heads).times(spec.head_dim)
        inner = Cut(spec.intermediate_size, *shard.inner)
        self.heads, self.head_dim = shard.num_heads, spec.head_dim
        self.norm_before = spec.norm_before
        self.activation = Activation(spec.activation)
        parts = [(attention + name, heads) for name in ("q_proj", "k_proj", "v_proj")]
        self.qkv = table.linear(parts, hidden, spec.qkv_bias)
        self.out = table.summed(attention + "out_proj", hidden, heads, spec.out_bias, site(index, ATTENTION))
        self.attention_norm = _layer_norm(prefix + "self_attn_layer_norm", spec, table)
        self.up = table.linear([(prefix + "fc1", inner)], hidden, spec.mlp_bias)
        self.down = table.summed(prefix + "fc2", hidden, inner, spec.mlp_bias, site(index, MLP))
        self.mlp_norm = _layer_norm(prefix + "final_layer_norm", spec, table)

    @override
    def attend(self, residual: Residual, plan: AttentionPlan, kv: Tensor) -> None:
        qkv = residual.through(self.attention_norm if self.norm_before else None, self.qkv)
        qkv = qkv.view(-1, 3 * self.heads, self.head_dim)
        store_kv(kv, qkv, plan.batch.slot_mapping)
        residual.add(self.out, paged_attention(qkv, kv, plan))
        if not self.norm_before:
            residual.replace(self.attention_norm)

    @override
    def feed(self, residual: Residual) -> None:
        inner = residual.through(self.mlp_norm if self.norm_before else None, self.up, self.activation)
        residual.add(self.down, inner)
        if not self.norm_before:
            residual.replace(self.mlp_norm)
