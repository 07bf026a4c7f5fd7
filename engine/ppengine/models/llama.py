"""Llama and its relatives: Mistral, Qwen2 (biases of q, k, v) and Qwen3 (norms of q and k)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from ppkernels.activation import silu_and_mul
from ppkernels.batch import Batch
from ppkernels.llama_layer import BAD_SLOT, LayerWeights, Rows, llama_layer
from ppkernels.norms import rms_norm
from ppkernels.paged_attention import AttentionPlan, paged_attention, refuse_row
from ppkernels.paged_tiles import takes as attends
from ppkernels.rotary import rotary_tables
from ppkernels.rotate_and_store import rotate_and_store
from ppkernels.store_kv import refuse_slots
from torch import Tensor, nn
from torch.nn import functional

from ppengine.checkpoint import ModelSpec, RopeSpec
from ppengine.models.layers import Linear, WeightTable, part_of
from ppengine.models.rope import inverse_frequencies
from ppengine.models.stage import StageModel


class Rope(NamedTuple):
    """Tables [length, head_dim] of the model and the positions [T] of one step's tokens."""

    cos: Tensor
    sin: Tensor
    positions: Tensor


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
        hidden, vocabulary = spec.hidden_size, spec.vocab_size
        tied = spec.tie_word_embeddings
        self.embedding = self.head = self.norm = None
        embedding = "model.embed_tokens.weight"
        if first and not (last and tied):
            self.embedding = table.take(embedding, vocabulary, hidden)
        self._packed_layers: list[LayerWeights] = []
        self.layers = nn.ModuleList([LlamaLayer(spec, index, table) for index in range(*layers)])
        if last:
            self.norm = table.take("model.norm.weight", hidden)
            self.head = Linear(table.take(embedding if tied else "lm_head.weight", vocabulary, hidden), None)
        rope = spec.rope or RopeSpec()
        frequencies = inverse_frequencies(rope, spec.head_dim).to(table.device)
        self._cos, self._sin = rotary_tables(frequencies, max_model_len, rope.attention_factor, table.dtype)

    def _embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        if self.head is not None and self.spec.tie_word_embeddings:
            return self.head.rows(token_ids)
        return functional.embedding(token_ids, part_of(self.embedding, "first"))

    def pack(self) -> None:
        """As `StageModel.pack`; a stage whose layers are packed runs each of them in one call."""
        super().pack()
        layers = [cast(LlamaLayer, layer) for layer in self.layers]
        if all(layer.packed for layer in layers):
            self._packed_layers = [layer.arrays() for layer in layers]

    def _run(self, hidden: Tensor, batch: Batch, kv: list[Tensor]) -> Tensor:
        if not self._packed_layers or not attends(kv[0]):
            return super()._run(hidden, batch, kv)
        residual = np.array(hidden.numpy(), order="C")  # a copy
        starts = batch.query_start.numpy()
        rows = Rows(
            cos=self._cos.numpy(),
            sin=self._sin.numpy(),
            positions=batch.positions.numpy(),
            slots=batch.slot_mapping.numpy(),
            starts=starts[:-1],
            ends=starts[1:],
            lengths=batch.seq_lens.numpy(),
            tables=batch.block_tables.numpy(),
        )
        heads, eps = self.spec.num_heads, self.spec.norm_eps
        for weights, cache in zip(self._packed_layers, kv, strict=True):
            done = llama_layer(residual, weights, cache.numpy(), rows, heads, eps)
            if done == BAD_SLOT:
                refuse_slots(cache, batch.slot_mapping)
            refuse_row(done, cache)
        return torch.from_numpy(residual)

    def _parts(
        self, hidden: Tensor, batch: Batch, plan: AttentionPlan, kv: list[Tensor]
    ) -> Iterator[tuple[int, str, Tensor]]:
        rope = Rope(self._cos, self._sin, batch.positions)
        layers = cast(Iterable[LlamaLayer], self.layers)
        for index, layer, cache in zip(range(*self.layer_range), layers, kv, strict=True):
            hidden = layer.attend(hidden, rope, plan, cache)
            yield index, "attention", hidden
            layer.feed(hidden)
            yield index, "MLP", hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        normed = rms_norm(hidden, part_of(self.norm, "last"), self.spec.norm_eps)
        logits: Tensor = part_of(self.head, "last")(normed)
        return logits


class LlamaLayer(nn.Module):
    """Attention and MLP, each behind an RMS norm, added to the residual stream."""

    def __init__(self, spec: ModelSpec, index: int, table: WeightTable) -> None:
        super().__init__()
        prefix = f"model.layers.{index}."
        hidden, inner = spec.hidden_size, spec.intermediate_size
        query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        self.eps = spec.norm_eps
        self.heads, self.kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.input_norm = table.take(prefix + "input_layernorm.weight", hidden)
        parts = [(attention + "q_proj", query), (attention + "k_proj", key), (attention + "v_proj", key)]
        self.qkv = table.linear(parts, hidden, spec.qkv_bias)
        self.q_norm = table.take(attention + "q_norm.weight", spec.head_dim) if spec.qk_norm else None
        self.k_norm = table.take(attention + "k_norm.weight", spec.head_dim) if spec.qk_norm else None
        self.out = table.linear([(attention + "o_proj", hidden)], query, spec.out_bias)
        self.mlp_norm = table.take(prefix + "post_attention_layernorm.weight", hidden)
        self.gate_up = table.linear([(mlp + "gate_proj", inner), (mlp + "up_proj", inner)], hidden, spec.mlp_bias)
        self.down = table.linear([(mlp + "down_proj", hidden)], inner, spec.mlp_bias)

    @property
    def packed(self) -> bool:
        """Whether all matrices are."""
        return all(part.packed for part in (self.qkv, self.out, self.gate_up, self.down))

    def arrays(self) -> LayerWeights:
        """Return the weights, packed, as `llama_layer` takes them."""

        def array(tensor: Tensor | None) -> Any:
            return None if tensor is None else tensor.numpy()

        return LayerWeights(
            input_norm=array(self.input_norm),
            qkv=array(self.qkv.weight),
            qkv_bias=array(self.qkv.bias),
            q_norm=array(self.q_norm),
            k_norm=array(self.k_norm),
            out=array(self.out.weight),
            out_bias=array(self.out.bias),
            mlp_norm=array(self.mlp_norm),
            gate_up=array(self.gate_up.weight),
            gate_up_bias=array(self.gate_up.bias),
            down=array(self.down.weight),
            down_bias=array(self.down.bias),
        )

    def attend(self, hidden: Tensor, rope: Rope, plan: AttentionPlan, kv: Tensor) -> Tensor:
        """Return the residual stream [T, H] behind the attention, as a new tensor."""
        heads, count = self.heads, hidden.shape[0]
        both = heads + self.kv_heads
        qkv = self.qkv(rms_norm(hidden, self.input_norm, self.eps)).view(count, both + self.kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            qkv[:, :heads] = rms_norm(qkv[:, :heads], self.q_norm, self.eps)
            qkv[:, heads:both] = rms_norm(qkv[:, heads:both], self.k_norm, self.eps)
        rotate_and_store(kv, qkv, heads, *rope, plan.slots)
        return self.out.added(hidden, paged_attention(qkv, kv, plan))

    def feed(self, hidden: Tensor) -> None:
        """Add the MLP to the residual stream [T, H] in place."""
        self.down.add_to(hidden, silu_and_mul(self.gate_up(rms_norm(hidden, self.mlp_norm, self.eps))))
