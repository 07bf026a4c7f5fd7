"""Llama and its relatives.

| model | other than Llama |
|---|---|
| Mistral | nothing, within its window |
| Qwen2 | biases of q, k, v |
| Qwen3 | norms of q and k |
| GLM-4 | biases of q, k, v; half of a head turns, in neighbouring pairs; gate and up are one tensor |
| GLM-4-0414 | also norms behind attention and MLP |
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from ppkernels.activation_kind import Activation
from ppkernels.attention_plan import AttentionPlan
from ppkernels.batch import Batch
from ppkernels.cpu.llama_layer import BAD_SLOT, LayerWeights, Rows, absent, llama_layer
from ppkernels.cpu.paged_attention import refuse_row
from ppkernels.cpu.store_kv import refuse_slots
from ppkernels.cpu.vectors import takes_cache
from ppkernels.norms import Norm
from ppkernels.paged_attention import paged_attention
from ppkernels.rotary import rotary_tables
from ppkernels.rotate_and_store import rotate_and_store
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from ppengine.checkpoint.model_spec import ModelSpec
from ppengine.checkpoint.rope_spec import RopeSpec
from ppengine.common.groups import ATTENTION, MLP, site
from ppengine.models.layers import Cut, Linear, WeightTable, part_of, token_rows
from ppengine.models.residual import Residual
from ppengine.models.rope import head_order, inverse_frequencies
from ppengine.models.stage_model import Layer, StageModel


class LlamaStage(StageModel):
    """Stage of a Llama-like model."""

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
        hidden = spec.hidden_size
        tied = spec.tie_word_embeddings
        self.embedding = self.head = self.norm = None
        embedding = "model.embed_tokens.weight"
        if first and not (last and tied):
            self.embedding = table.vocabulary(embedding, hidden)
        rope = spec.rope or RopeSpec()
        frequencies = inverse_frequencies(rope, spec.head_dim).to(table.device)
        self._rope = rotary_tables(frequencies, max_model_len, rope.attention_factor, table.dtype, spec.head_dim)
        self._packed_layers: list[LayerWeights] = []
        self.layers = nn.ModuleList([LlamaLayer(spec, index, table, self._rope) for index in range(*layers)])
        if last:
            self.norm = _rms_norm("model.norm", hidden, spec, table)
            self.head = Linear(table.vocabulary(embedding if tied else "lm_head.weight", hidden), None)

    @override
    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        return token_rows(self._rows, token_ids, self.shard, self.group)

    def _rows(self, indices: Tensor) -> Tensor:
        if self.head is not None and self.spec.tie_word_embeddings:
            return self.head.rows(indices)
        return functional.embedding(indices, part_of(self.embedding, "first"))

    def pack(self) -> None:
        """As `StageModel.pack`; a stage whose layers are packed, and whole, runs each of them in one call."""
        super().pack()
        layers = [cast(LlamaLayer, layer) for layer in self.layers]
        if self.group.size == 1 and all(layer.packed for layer in layers):
            self._packed_layers = [layer.arrays() for layer in layers]

    def _run(self, hidden: Tensor, batch: Batch, kv: list[Tensor]) -> Tensor:
        if not self._packed_layers or not takes_cache(kv[0]):
            return super()._run(hidden, batch, kv)
        residual = np.array(hidden.numpy(), order="C")  # a copy
        starts = batch.query_start.numpy()
        rows = Rows(
            cos=self._rope[0].numpy(),
            sin=self._rope[1].numpy(),
            positions=batch.positions.numpy(),
            slots=batch.slot_mapping.numpy(),
            starts=starts[:-1],
            ends=starts[1:],
            lengths=batch.seq_lens.numpy(),
            tables=batch.block_tables.numpy(),
        )
        heads, eps = self.shard.num_heads, self.spec.norm_eps
        for weights, cache in zip(self._packed_layers, kv, strict=True):
            done = llama_layer(residual, weights, cache.numpy(), rows, heads, eps)
            if done == BAD_SLOT:
                refuse_slots(cache, batch.slot_mapping)
            refuse_row(done, cache)
        return torch.from_numpy(residual)

    @override
    def logits(self, hidden: Tensor) -> Tensor:
        return Residual(hidden).through(part_of(self.norm, "last"), part_of(self.head, "last"))


class LlamaLayer(Layer):
    """Attention and MLP, each behind an RMS norm. `rope` has the cosines and sines of all positions."""

    def __init__(self, spec: ModelSpec, index: int, table: WeightTable, rope: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        prefix = f"model.layers.{index}."
        hidden, shard = spec.hidden_size, table.shard
        order = head_order(spec.rope or RopeSpec(), spec.head_dim)
        query = Cut(spec.num_heads, *shard.heads).times(spec.head_dim)
        key = Cut(spec.num_kv_heads, *shard.kv_heads).times(spec.head_dim)
        inner = Cut(spec.intermediate_size, *shard.inner)
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        self.heads, self.kv_heads, self.head_dim = shard.num_heads, shard.num_kv_heads, spec.head_dim
        self._rope, norms = rope, spec.output_norms
        self.input_norm = _rms_norm(prefix + "input_layernorm", hidden, spec, table)
        turned_query, turned_key = query._replace(order=order), key._replace(order=order)
        parts = [(attention + "q_proj", turned_query), (attention + "k_proj", turned_key), (attention + "v_proj", key)]
        self.qkv = table.linear(parts, hidden, spec.qkv_bias)
        self.q_norm = _rms_norm(attention + "q_norm", spec.head_dim, spec, table) if spec.qk_norm else None
        self.k_norm = _rms_norm(attention + "k_norm", spec.head_dim, spec, table) if spec.qk_norm else None
        self.out = table.summed(attention + "o_proj", hidden, query, spec.out_bias, site(index, ATTENTION))
        self.out_norm = _rms_norm(prefix + "post_self_attn_layernorm", hidden, spec, table) if norms else None
        self.mlp_norm = _rms_norm(prefix + "post_attention_layernorm", hidden, spec, table)
        gate_up = [(mlp + "gate_proj", inner), (mlp + "up_proj", inner)]
        if spec.fused_gate_up:
            gate_up = [(mlp + "gate_up_proj", cut) for cut in inner.pair()]
        self.gate_up = table.linear(gate_up, hidden, spec.mlp_bias)
        self.down = table.summed(mlp + "down_proj", hidden, inner, spec.mlp_bias, site(index, MLP))
        self.down_norm = _rms_norm(prefix + "post_mlp_layernorm", hidden, spec, table) if norms else None

    @property
    def packed(self) -> bool:
        """Whether all matrices are."""
        return all(part.packed for part in (self.qkv, self.out, self.gate_up, self.down))

    def arrays(self) -> LayerWeights:
        """Return the weights, packed, as `llama_layer` takes them."""

        def array(part: Tensor | Norm | None) -> Any:
            tensor = part.weight if isinstance(part, Norm) else part
            return none if tensor is None else tensor.numpy()

        none = absent(self.qkv.weight.numpy())
        return LayerWeights(
            input_norm=array(self.input_norm),
            qkv=array(self.qkv.weight),
            qkv_bias=array(self.qkv.bias),
            q_norm=array(self.q_norm),
            k_norm=array(self.k_norm),
            out=array(self.out.weight),
            out_bias=array(self.out.bias),
            out_norm=array(self.out_norm),
            mlp_norm=array(self.mlp_norm),
            gate_up=array(self.gate_up.weight),
            gate_up_bias=array(self.gate_up.bias),
            down=array(self.down.weight),
            down_bias=array(self.down.bias),
            down_norm=array(self.down_norm),
        )

    @override
    def attend(self, residual: Residual, plan: AttentionPlan, kv: Tensor) -> None:
        heads, both = self.heads, self.heads + self.kv_heads
        qkv = residual.through(self.input_norm, self.qkv).view(-1, both + self.kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            qkv[:, :heads] = self.q_norm(qkv[:, :heads])
            qkv[:, heads:both] = self.k_norm(qkv[:, heads:both])
        rotate_and_store(kv, qkv, heads, *self._rope, plan.batch.positions, plan.batch.slot_mapping)
        residual.add(self.out, paged_attention(qkv, kv, plan), self.out_norm)

    @override
    def feed(self, residual: Residual) -> None:
        residual.add(self.down, residual.through(self.mlp_norm, self.gate_up, Activation.SILU_AND_MUL), self.down_norm)


def _rms_norm(name: str, width: int, spec: ModelSpec, table: WeightTable) -> Norm:
    return Norm(table.take(name + ".weight", width), None, spec.norm_eps, centred=False)
