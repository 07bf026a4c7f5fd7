"""What config.json says, how layers are cut, and one line for everything that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import FAMILIES, make_checkpoint
from ppengine.checkpoint.model_spec import CheckpointError, ModelSpec, read_spec
from ppengine.checkpoint.rope_spec import RopeSpec
from ppengine.common.config import ConfigError
from ppengine.common.partition import partition_layers

MODELS = Path(__file__).parents[2] / "profiles/models"
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 100,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip


def spec_of(folder: Path, base: dict[str, Any] = LLAMA, **fields: Any) -> ModelSpec:
    """Read a spec from config.json of `base` with `fields`; a field that is `...` is left out."""
    data = {key: value for key, value in {**base, **fields}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(data))
    return read_spec(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_of_what_transformers_writes(family: str, tmp_path: Path) -> None:
    spec = read_spec(make_checkpoint(tmp_path, family, dtype="bfloat16", layers=3))
    assert spec.model_type == family.removesuffix("-350m")
    assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.vocab_size) == (3, 32, 4, 128)
    assert spec.head_dim == (16 if family in ("qwen3", "glm", "glm4") else 8)
    assert spec.num_kv_heads == (4 if family.startswith("opt") else 2)
    assert spec.embed_dim == (16 if family == "opt-350m" else 32)
    assert (spec.intermediate_size, spec.max_position, spec.max_model_len) == (64, 512, 512)
    assert spec.dtype == "bfloat16"
    assert spec.eos_token_ids == [2]
    assert spec.tie_word_embeddings == (family not in ("llama", "mistral", "glm", "glm4"))
    assert spec.qkv_bias == (family in ("opt", "opt-350m", "qwen2", "glm", "glm4"))
    assert spec.qk_norm == (family == "qwen3")
    assert (spec.norm_before, spec.final_norm) == ((False, False) if family == "opt-350m" else (True, True))


def test_before_and_since_transformers_5_say_the_same(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
    old = spec_of(tmp_path, torch_dtype="float16", rope_theta=5e5, rope_scaling={"rope_type": "llama3", **scaling})
    new = spec_of(tmp_path, dtype="float16", rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    assert old == new
    assert new.rope is not None
    assert (new.rope.kind, new.rope.theta, new.rope.factor, new.rope.original_max_position) == ("llama3", 5e5, 8.0, 256)
    oldest = spec_of(tmp_path, rope_scaling={"type": "linear", "factor": 2})
    assert oldest.rope is not None
    assert (oldest.rope.kind, oldest.rope.factor, oldest.rope.theta) == ("linear", 2.0, 10_000.0)
    assert spec_of(tmp_path, rope_scaling=None).dtype == "float32"
    assert spec_of(tmp_path, rope_parameters={"rope_type": "llama3", **scaling}, rope_scaling=scaling).rope


def test_yarn_stretches_the_length_that_the_model_was_trained_for(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    assert spec_of(tmp_path, rope_scaling=scaling).max_model_len == 8192
    assert spec_of(tmp_path, rope_scaling=scaling, max_position_embeddings=8192).max_model_len == 8192
    without = spec_of(tmp_path, rope_scaling={**scaling, "factor": None}, max_position_embeddings=8192)
    assert without.rope is not None
    assert (without.max_model_len, without.rope.factor) == (8192, 4.0)


def test_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    assert spec_of(tmp_path).eos_token_ids == [2]
    assert spec_of(tmp_path, eos_token_id=[4, 5]).eos_token_ids == [4, 5]
    assert spec_of(tmp_path, eos_token_id=None, bos_token_id=...).eos_token_ids == []
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8], "bos_token_id": null}')
    spec = spec_of(tmp_path)
    assert (spec.eos_token_ids, spec.bos_token_id) == ([7, 8], 1)


def test_what_an_old_config_leaves_out(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, num_key_value_heads=..., architectures=..., rms_norm_eps=...)
    assert (spec.num_kv_heads, spec.head_dim, spec.architecture, spec.norm_eps) == (8, 8, "LlamaForCausalLM", 1e-6)
    assert spec_of(tmp_path, model_type="qwen3", architectures=["Qwen3ForCausalLM"]).head_dim == 128


def test_fields_that_glm_leaves_out(tmp_path: Path) -> None:
    """The defaults of transformers, which writes the factor among the parameters of the rope."""
    glm = {**LLAMA, "model_type": "glm", "architectures": ["GlmForCausalLM"], "num_key_value_heads": ...}
    spec = spec_of(tmp_path, glm, rms_norm_eps=..., mlp_bias=True)
    assert (spec.head_dim, spec.num_kv_heads, spec.norm_eps) == (128, 2, 1.5625e-7)
    assert (spec.qkv_bias, spec.out_bias, spec.mlp_bias) == (True, False, False)
    assert (spec.fused_gate_up, spec.output_norms) == (True, False)
    assert spec.rope == RopeSpec(width=64, interleaved=True)
    glm4 = {**glm, "model_type": "glm4", "architectures": ["Glm4ForCausalLM"]}
    spec = spec_of(tmp_path, glm4, head_dim=32, rope_parameters={"rope_theta": 5e5, "partial_rotary_factor": 0.25})
    assert spec.output_norms
    assert spec.rope == RopeSpec(theta=5e5, width=8, interleaved=True)
    with pytest.raises(CheckpointError, match=r"partial_rotary_factor 0\.1 turns 3 of the 32 dimensions of a head; it"):
        spec_of(tmp_path, glm4, head_dim=32, partial_rotary_factor=0.1)
    with pytest.raises(CheckpointError, match=r"head_dim is 7; it must be even"):
        spec_of(tmp_path, glm4, head_dim=7)


def test_sliding_windows_cap_the_length(tmp_path: Path) -> None:
    mistral = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    spec = spec_of(tmp_path, mistral, sliding_window=512)
    assert spec.max_model_len == 512
    assert spec.length_note == "sequences end at 512 of 2048 tokens: sliding windows are not built yet"
    for fields in ({"sliding_window": None}, {"sliding_window": 4096}, {}):
        spec = spec_of(tmp_path, mistral, **fields)
        assert (spec.max_model_len, spec.length_note) == (2048, "")
    qwen = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "sliding_window": 512}
    assert spec_of(tmp_path, qwen).max_model_len == 2048
    assert spec_of(tmp_path, qwen, use_sliding_window=True, max_window_layers=6).max_model_len == 2048
    assert spec_of(tmp_path, qwen, use_sliding_window=True, max_window_layers=5).max_model_len == 512
    kinds = ["full_attention"] * 5 + ["sliding_attention"]
    assert spec_of(tmp_path, qwen, use_sliding_window=True, layer_types=kinds).max_model_len == 512


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": (
        {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"},
        "GPT2LMHeadModel is not supported; these work: OPTForCausalLM, LlamaForCausalLM, MistralForCausalLM, "
        "Qwen2ForCausalLM, Qwen3ForCausalLM, GlmForCausalLM, Glm4ForCausalLM",
    ),
    "another type": ({"architectures": ..., "model_type": "mamba"}, "'mamba' is not supported; these work: OPT"),
    "no head": ({"architectures": ["LlamaModel"]}, "LlamaModel is not supported"),
    "type and architecture differ": ({"model_type": "opt"}, "with model_type 'opt'; it must be 'llama'"),
    "architectures of another kind": ({"architectures": 7}, "architectures is 7"),
    "size missing": ({"hidden_size": ...}, "hidden_size is None; it must be a whole number"),
    "size a text": ({"num_hidden_layers": "6"}, "num_hidden_layers is '6'"),
    "size zero": ({"vocab_size": 0}, "vocab_size is 0"),
    "heads do not divide": ({"num_key_value_heads": 3}, "8 is not a multiple of num_key_value_heads 3"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only silu"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantized weights are not supported"),
    "dtype": ({"torch_dtype": "int8"}, "dtype is 'int8'; these work: float64, float32"),
    "dynamic rope": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
    "rope without factor": ({"rope_scaling": {"type": "linear"}}, "needs a factor"),
    "rope factor zero": ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope factor is 0"),
    "two ropes": (
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "rope_parameters and rope_scaling differ",
    ),
    "rope of another kind": ({"rope_scaling": [1]}, "rope_scaling is"),
    "partial rope": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
    "ids": ({"eos_token_id": "</s>"}, "token id is '</s>'"),
    "norm eps": ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_config_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    fields, text = WRONG[case]
    with pytest.raises(CheckpointError) as caught:
        spec_of(tmp_path, **fields)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", '{"a": "\\ud800"}', "\x00\x01"])
def test_a_broken_config_is_refused_in_one_line(content: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json") as caught:
        read_spec(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [(8, 2, [4, 4]), (8, 3, [3, 3, 2]), (7, 2, [4, 3]), (10, 4, [2, 3, 3, 2]), (11, 4, [3, 3, 3, 2]), (5, 5, [1] * 5)],
)
def test_even_cuts_give_the_rest_to_the_middle(layers: int, stages: int, counts: list[int]) -> None:
    cuts = partition_layers(layers, stages)
    assert [end - start for start, end in cuts] == counts
    assert [start for start, _ in cuts] == [0, *[end for _, end in cuts[:-1]]]
    assert cuts[-1][1] == layers


@pytest.mark.parametrize(
    ("head", "stages", "counts"),
    [(0.9, 4, [8, 8, 8, 8]), (1.2, 4, [8, 9, 8, 7]), (9.5, 4, [10, 11, 10, 1]), (99.0, 2, [31, 1]), (9.0, 1, [32])],
)
def test_the_last_stage_has_fewer_layers_for_a_long_head(head: float, stages: int, counts: list[int]) -> None:
    assert [end - start for start, end in partition_layers(32, stages, head=head)] == counts


@pytest.mark.parametrize(("name", "head"), [("tiny", 0.50), ("opt-6.7b", 0.51), ("llama-8b", 1.20)])
def test_a_head_is_counted_in_layers(name: str, head: float) -> None:
    assert read_spec(MODELS / name).head_layers == pytest.approx(head, abs=0.005)


def test_explicit_cuts_are_taken_or_refused() -> None:
    assert partition_layers(8, 3, [1, 5, 2]) == [(0, 1), (1, 6), (6, 8)]
    for partition, text in (
        ([4, 5], "adds up to 9 layers, the model has 8"),
        ([8, 0], "needs at least 1 layer"),
        ([9, -1], "needs at least 1 layer"),
        ([8], "names 1 stages, parallel.pipeline is 2"),
    ):
        with pytest.raises(ConfigError, match=text):
            partition_layers(8, 2, partition)
    with pytest.raises(ConfigError, match=r"parallel\.pipeline is 9; the model has 8 layers"):
        partition_layers(8, 9)
