"""The model of a Hugging Face folder, read without torch: shapes, rope and ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ppengine.checkpoint.config_json import CheckpointError, FieldError, count, number, read_json, token_ids, typed
from ppengine.checkpoint.rope_spec import RopeSpec, read_rope
from ppengine.checkpoint.tensor_files import check_weights, tensor_files
from ppengine.common.profile_sections import DTYPES, LAYERS_MOST, MODEL_LEN_MOST
from ppengine.protocol.error_text import one_line, shown

__all__ = [
    "ARCHITECTURES",
    "DUMMY_SEED",
    "CheckpointError",
    "ModelSpec",
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
    "GlmForCausalLM": "glm",
    "Glm4ForCausalLM": "glm4",
}
"""Supported architectures of config.json, with their `model_type`."""
GLM = ("glm", "glm4")
DUMMY_SEED = 0
"""Seed of dummy weights, so that all stages and all boots agree on them."""
OPT_ACTIVATIONS = ("relu", "gelu")
MOST = {
    "vocab_size": 2**20, "num_hidden_layers": LAYERS_MOST, "hidden_size": 2**16, "num_attention_heads": 1024,
    "num_key_value_heads": 1024, "head_dim": 1024, "intermediate_size": 2**19, "ffn_dim": 2**19,
    "word_embed_proj_dim": 2**16, "max_position_embeddings": MODEL_LEN_MOST,
    "sliding_window": MODEL_LEN_MOST,
}  # fmt: skip
"""Largest value of each size: several times that of any model so far."""


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
    fused_gate_up: bool = False
    """The checkpoint has gate and up as one tensor, rows of the gate first."""
    output_norms: bool = False
    """Outputs of attention and MLP are normed before they are added to the residual stream."""
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
    path = folder / "config.json"
    try:
        fields = _fields(data)
        generation = folder / "generation_config.json"
        if generation.is_file():
            path = generation
            fields |= {key: value for key, value in _ids(read_json(path)).items() if value not in (None, [])}
    except FieldError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return msgspec.convert(fields, ModelSpec)


def _fields(data: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a spec. Raises FieldError."""
    model_type, architecture = _identify(data)
    if data.get("quantization_config"):
        raise FieldError("quantized weights are not supported; use a float32, bfloat16 or float16 checkpoint")
    fields: dict[str, Any] = {
        "model_type": model_type,
        "architecture": architecture,
        "dtype": _dtype(data),
        "vocab_size": _size(data, "vocab_size"),
        "num_layers": _size(data, "num_hidden_layers"),
        "hidden_size": _size(data, "hidden_size"),
        "num_heads": _size(data, "num_attention_heads"),
        "max_position": _positions(data),
        **_ids(data),
    }
    fields |= _opt_fields(data) if model_type == "opt" else _llama_fields(data, model_type)
    heads, kv_heads = fields["num_heads"], fields["num_kv_heads"]
    if heads % kv_heads:
        raise FieldError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    return fields


def _size(data: dict[str, Any], key: str, default: int | None = None) -> int:
    return count(data, key, MOST[key], default=default)


def _positions(data: dict[str, Any]) -> int:
    """Return the positions: a prompt of one token and one more are the least that can be served."""
    return count(data, "max_position_embeddings", MODEL_LEN_MOST, least=2)


def _ids(data: dict[str, Any]) -> dict[str, Any]:
    return {
        "eos_token_ids": token_ids(data, "eos_token_id"),
        "bos_token_id": next(iter(token_ids(data, "bos_token_id")), None),
    }


def _identify(data: dict[str, Any]) -> tuple[str, str]:
    works = ", ".join(ARCHITECTURES)
    named = typed(data, "architectures", list, [])
    by_type = {model_type: architecture for architecture, model_type in ARCHITECTURES.items()}
    architecture = str(named[0] if named else by_type.get(str(data.get("model_type")), ""))
    if architecture not in ARCHITECTURES:
        named_so = one_line(architecture, 80) or f"model_type {shown(data.get('model_type'))}"
        raise FieldError(f"{named_so} is not supported; these work: {works}")
    model_type = ARCHITECTURES[architecture]
    if data.get("model_type", model_type) != model_type:
        raise FieldError(f"{architecture} with model_type {shown(data['model_type'])}; it must be {model_type!r}")
    return model_type, architecture


def _opt_fields(data: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = _size(data, "hidden_size"), _size(data, "num_attention_heads")
    if hidden % heads:
        raise FieldError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    activation = data.get("activation_function", "relu")
    if activation not in OPT_ACTIVATIONS:
        raise FieldError(f"activation_function is {shown(activation)}; these work: {', '.join(OPT_ACTIVATIONS)}")
    bias = typed(data, "enable_bias", bool, True)
    before = typed(data, "do_layer_norm_before", bool, True)
    return {
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "intermediate_size": _size(data, "ffn_dim"),
        "tie_word_embeddings": typed(data, "tie_word_embeddings", bool, True),
        "norm_eps": 1e-5,
        "activation": activation,
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": bias,
        "embed_dim": _size(data, "word_embed_proj_dim", hidden),
        "norm_before": before,
        "final_norm": before and not typed(data, "_remove_final_layer_norm", bool, False),
        "norm_affine": typed(data, "layer_norm_elementwise_affine", bool, True),
    }


def _llama_fields(data: dict[str, Any], model_type: str) -> dict[str, Any]:
    hidden, heads = _size(data, "hidden_size"), _size(data, "num_attention_heads")
    activation = data.get("hidden_act", "silu")
    if activation != "silu":
        raise FieldError(f"hidden_act is {shown(activation)}; only silu works for {model_type}")
    glm = model_type in GLM
    bias = typed(data, "attention_bias", bool, glm) and model_type in ("llama", "qwen3", *GLM)
    max_position = _positions(data)
    head_dim = _size(data, "head_dim", 128 if model_type in ("qwen3", *GLM) else hidden // heads)
    rope = read_rope(data, max_position, head_dim, glm=glm)
    return {
        "num_kv_heads": _size(data, "num_key_value_heads", 2 if glm else heads),
        "head_dim": head_dim,
        "intermediate_size": _size(data, "intermediate_size"),
        "tie_word_embeddings": typed(data, "tie_word_embeddings", bool, False),
        "norm_eps": number(data, "rms_norm_eps", 1.5625e-7 if glm else 1e-6, 1),
        "activation": activation,
        "qkv_bias": bias or model_type == "qwen2",
        "out_bias": bias and not glm,
        "mlp_bias": typed(data, "mlp_bias", bool, False) and model_type == "llama",
        "qk_norm": model_type == "qwen3",
        "fused_gate_up": glm,
        "output_norms": model_type == "glm4",
        "embed_dim": hidden,
        "rope": rope,
        # Qwen's configs keep the trained length and let yarn stretch it; others write the stretched one.
        "max_position": max(max_position, rope.stretched),
        "sliding_window": _sliding_window(data, model_type),
    }


def _sliding_window(data: dict[str, Any], model_type: str) -> int | None:
    if model_type in ("llama", *GLM):
        return None
    if model_type == "mistral":
        slides = True
    elif not typed(data, "use_sliding_window", bool, False):
        slides = False
    elif kinds := typed(data, "layer_types", list, []):
        slides = "sliding_attention" in kinds
    else:
        slides = number(data, "max_window_layers", 28, 1e6) < _size(data, "num_hidden_layers")
    if not slides or data.get("sliding_window", 4096) is None:
        return None
    return count(data, "sliding_window", MODEL_LEN_MOST, least=2, default=4096)


def _dtype(data: dict[str, Any]) -> str:
    named = typed(data, "dtype", str, "") or typed(data, "torch_dtype", str, "") or "float32"
    dtype = named.removeprefix("torch.")
    if dtype not in DTYPES:
        raise FieldError(f"dtype is {shown(dtype)}; these work: {', '.join(DTYPES)}")
    return dtype
