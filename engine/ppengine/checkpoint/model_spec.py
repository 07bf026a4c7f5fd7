"""The model of a Hugging Face folder, read without torch: shapes, rope and ids."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from ppengine.checkpoint.config_json import CheckpointError, count, number, read_json, token_ids, typed
from ppengine.checkpoint.tensor_files import check_weights, tensor_files
from ppengine.common.config import DTYPES

__all__ = [
    "ARCHITECTURES",
    "CheckpointError",
    "ModelSpec",
    "RopeSpec",
    "check_weights",
    "read_spec",
    "tensor_files",
]

ARCHITECTURES = {
    "OPTForCausalLM": "opt",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Supported architectures of config.json, with their `model_type`."""
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
OPT_ACTIVATIONS = ("relu", "gelu")


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding; which fields count depends on `kind`, one of `ROPE_KINDS`."""

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Cosines and sines are multiplied by this (yarn)."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of one model. `max_position` counts tokens; `sliding_window` None: full attention."""

    model_type: str
    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    dtype: str
    """Type of the weights, one of `ppengine.common.config.DTYPES`: the meaning of `dtype: auto`."""
    tie_word_embeddings: bool
    norm_eps: float
    activation: str
    eos_token_ids: list[int]
    bos_token_id: int | None = None
    sliding_window: int | None = None
    rope: RopeSpec | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    embed_dim: int = 0
    """Width of the token embedding; other than `hidden_size` in OPT-350m alone."""
    norm_before: bool = True
    """OPT: layer norms stand before attention and MLP (350m: behind)."""
    final_norm: bool = True
    norm_affine: bool = True

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens that can be served.

        Up to its window, sliding window attention is full attention; beyond, this engine would compute something else.
        """
        return self.max_position if self.sliding_window is None else min(self.max_position, self.sliding_window)

    @property
    def head_layers(self) -> float:
        """How many layers take as long as the head, about.

        Half of what its weights are beside a layer's: a layer reads its KV cache as well. On an H200, at 128 decodes
        with some 400 tokens of context, Llama-8B's was 1.4 layers long (1.2 by this), OPT-6.7B's 0.6 (0.5).
        """
        matrices = 2 if self.model_type == "opt" else 3
        heads = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        layer = self.hidden_size * (heads + matrices * self.intermediate_size)
        return 0.5 * self.vocab_size * (self.embed_dim or self.hidden_size) / layer

    @property
    def length_note(self) -> str:
        """Why `max_model_len` is less than the model's positions, for the operator; empty if it is not."""
        if self.max_model_len == self.max_position:
            return ""
        return (
            f"sequences end at {self.sliding_window} of {self.max_position} tokens: sliding windows are not built yet"
        )


def read_spec(folder: Path) -> ModelSpec:
    """Return the spec of the checkpoint in `folder`. Raises CheckpointError if it is broken or not supported."""
    data = read_json(folder / "config.json")
    model_type, architecture = _identify(data, folder)
    if data.get("quantization_config"):
        raise CheckpointError(
            f"{folder}: quantized weights are not supported; use a float32, bfloat16 or float16 checkpoint"
        )
    ids = {key: data.get(key) for key in ("eos_token_id", "bos_token_id")}
    generation = folder / "generation_config.json"
    if generation.is_file():
        ids |= {key: value for key, value in read_json(generation).items() if value is not None}
    fields: dict[str, Any] = {
        "model_type": model_type,
        "architecture": architecture,
        "dtype": _dtype(data),
        "eos_token_ids": token_ids(ids.get("eos_token_id")),
        "bos_token_id": next(iter(token_ids(ids.get("bos_token_id"))), None),
        "vocab_size": count(data, "vocab_size"),
        "num_layers": count(data, "num_hidden_layers"),
        "hidden_size": count(data, "hidden_size"),
        "num_heads": count(data, "num_attention_heads"),
        "max_position": count(data, "max_position_embeddings"),
    }
    family = _opt_fields(data) if model_type == "opt" else _llama_fields(data, model_type)
    spec = msgspec.convert({**fields, **family}, ModelSpec)
    if spec.num_heads % spec.num_kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads {spec.num_heads} is not a multiple of num_key_value_heads "
            f"{spec.num_kv_heads}"
        )
    return spec


def _identify(data: dict[str, Any], folder: Path) -> tuple[str, str]:
    works = ", ".join(ARCHITECTURES)
    named = typed(data, "architectures", list, [])
    by_type = {model_type: architecture for architecture, model_type in ARCHITECTURES.items()}
    architecture = str(named[0] if named else by_type.get(str(data.get("model_type")), ""))
    if architecture not in ARCHITECTURES:
        shown = architecture or f"model_type {data.get('model_type')!r}"
        raise CheckpointError(f"{folder}: {shown} is not supported; these work: {works}")
    model_type = ARCHITECTURES[architecture]
    if data.get("model_type", model_type) != model_type:
        raise CheckpointError(
            f"{folder}: {architecture} with model_type {data['model_type']!r}; it must be {model_type!r}"
        )
    return model_type, architecture


def _opt_fields(data: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = count(data, "hidden_size"), count(data, "num_attention_heads")
    if hidden % heads:
        raise CheckpointError(f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    activation = data.get("activation_function", "relu")
    if activation not in OPT_ACTIVATIONS:
        raise CheckpointError(
            f"config.json: activation_function is {activation!r}; these work: {', '.join(OPT_ACTIVATIONS)}"
        )
    bias = bool(data.get("enable_bias", True))
    before = bool(data.get("do_layer_norm_before", True))
    return {
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "intermediate_size": count(data, "ffn_dim"),
        "tie_word_embeddings": bool(data.get("tie_word_embeddings", True)),
        "norm_eps": 1e-5,
        "activation": activation,
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": bias,
        "embed_dim": count(data, "word_embed_proj_dim", hidden),
        "norm_before": before,
        "final_norm": before and not data.get("_remove_final_layer_norm", False),
        "norm_affine": bool(data.get("layer_norm_elementwise_affine", True)),
    }


def _llama_fields(data: dict[str, Any], model_type: str) -> dict[str, Any]:
    hidden, heads = count(data, "hidden_size"), count(data, "num_attention_heads")
    activation = data.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(f"config.json: hidden_act is {activation!r}; only silu works for {model_type}")
    bias = bool(data.get("attention_bias", False)) and model_type in ("llama", "qwen3")
    max_position = count(data, "max_position_embeddings")
    rope = _rope(data, max_position)
    head_dim = count(data, "head_dim", 128 if model_type == "qwen3" else hidden // heads)
    return {
        "num_kv_heads": count(data, "num_key_value_heads", heads),
        "head_dim": head_dim,
        "intermediate_size": count(data, "intermediate_size"),
        "tie_word_embeddings": bool(data.get("tie_word_embeddings", False)),
        "norm_eps": number(data, "rms_norm_eps", 1e-6),
        "activation": activation,
        "qkv_bias": bias or model_type == "qwen2",
        "out_bias": bias,
        "mlp_bias": bool(data.get("mlp_bias", False)) and model_type == "llama",
        "qk_norm": model_type == "qwen3",
        "embed_dim": hidden,
        "rope": rope,
        # Qwen's configs keep the trained length and let yarn stretch it; others write the stretched one.
        "max_position": max(max_position, int(rope.factor * rope.original_max_position) * (rope.kind == "yarn")),
        "sliding_window": _sliding_window(data, model_type),
    }


def _sliding_window(data: dict[str, Any], model_type: str) -> int | None:
    if model_type == "llama":
        return None
    if model_type == "mistral":
        slides = True
    elif not data.get("use_sliding_window"):
        slides = False
    elif kinds := typed(data, "layer_types", list, []):
        slides = "sliding_attention" in kinds
    else:
        slides = number(data, "max_window_layers", 28) < count(data, "num_hidden_layers")
    if not slides or data.get("sliding_window", 4096) is None:
        return None
    return count(data, "sliding_window", 4096)


def _rope(data: dict[str, Any], max_position: int) -> RopeSpec:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    given = typed(data, "rope_parameters", dict, {}) or typed(data, "rope_scaling", dict, {})
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ROPE_KINDS or any(isinstance(value, dict) for value in given.values()):
        raise CheckpointError(f"config.json: rope type {kind!r} is not supported; these work: {', '.join(ROPE_KINDS)}")
    both = {**data, **given}
    if number(both, "partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError("config.json: partial_rotary_factor is not supported; it must be 1")
    theta = number(both, "rope_theta", 0.0) or 10_000.0
    if kind == "default":
        return RopeSpec(theta=theta)
    original = count({**given, **data}, "original_max_position_embeddings", max_position)
    if given.get("factor") is None and kind != "yarn":
        raise CheckpointError(f"config.json: rope type {kind!r} needs a factor")
    factor = number(given, "factor", max_position / original)
    if factor == 0:
        raise CheckpointError("config.json: rope factor is 0; it must be above 0")
    optional = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
    return RopeSpec(
        kind=kind,
        theta=theta,
        factor=factor,
        original_max_position=original,
        attention_factor=_yarn_attention(given, factor) if kind == "yarn" else 1.0,
        **{name: number(given, name, 0.0) for name in optional if given.get(name)},
        truncate=given.get("truncate") is not False,
    )


def _yarn_attention(given: dict[str, Any], factor: float) -> float:
    """Return the scale of cosines and sines (YaRN, arXiv 2309.00071, equation 22; `mscale` as DeepSeek writes it)."""
    if given.get("attention_factor") is not None:
        return number(given, "attention_factor", 1.0)

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    above, below = number(given, "mscale", 0.0), number(given, "mscale_all_dim", 0.0)
    return scale(above) / scale(below) if above and below else scale(1.0)


def _dtype(data: dict[str, Any]) -> str:
    dtype = str(data.get("dtype") or data.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise CheckpointError(f"config.json: dtype is {dtype!r}; these work: {', '.join(DTYPES)}")
    return dtype
