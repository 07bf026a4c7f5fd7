"""Logits of every family are those of transformers, however the model is cut and the prompt is fed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, make_checkpoint, reference_greedy, reference_logits
from ppengine.protocol.steps import TOKEN_REGISTERED, Row
from stage_runs import BLOCK, Pipeline, exact_logits, random_tokens
from torch import Tensor

LENGTH = 37
TIGHT = {"rtol": 0, "atol": 1e-9}
Maker = Callable[..., Path]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """Return a maker of float64 checkpoints that makes each one once."""
    made: dict[str, Path] = {}

    def make(family: str, **fields: Any) -> Path:
        key = f"{family} {sorted(fields.items())}"
        if key not in made:
            made[key] = make_checkpoint(tmp_path_factory.mktemp(family), family, **{"dtype": "float64", **fields})
        return made[key]

    return make


def chunked(pipeline: Pipeline, slot: int, chunks: list[int]) -> Tensor:
    """Return logits [T, V] of a registered sequence that is fed in `chunks`."""
    starts = [sum(chunks[:index]) for index in range(len(chunks))]
    return torch.cat([pipeline.step((slot, start, count)) for start, count in zip(starts, chunks, strict=True)])


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_float64_whole_chunked_and_decoded(family: str, stages: int, checkpoint: Maker) -> None:
    folder = checkpoint(family)
    tokens = random_tokens(LENGTH, 128)
    expected = exact_logits(folder, tokens, torch.float64)
    pipeline = Pipeline(folder, torch.float64, stages)
    for slot, chunks in enumerate([[LENGTH], [10, 1, 20, 6], [BLOCK, BLOCK, 21], [5] + [1] * 32]):
        pipeline.add(slot, tokens)
        torch.testing.assert_close(chunked(pipeline, slot, chunks), expected, **TIGHT)


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_weights_give_the_same_as_packed_ones(family: str, checkpoint: Maker) -> None:
    """Plain weights are what machines without the packed kernel, and stages of several threads, compute with."""
    folder = checkpoint(family)
    tokens = random_tokens(LENGTH, 128)
    logits = []
    for packed in (True, False):
        pipeline = Pipeline(folder, torch.float64, 2, packed=packed)
        pipeline.add(0, tokens)
        logits.append(chunked(pipeline, 0, [20, 1, 16]))
    torch.testing.assert_close(*logits, **TIGHT)
    assert not torch.equal(*logits), "sums are added up in another order"


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_within_its_rounding(family: str, checkpoint: Maker) -> None:
    folder = checkpoint(family)
    tokens = random_tokens(LENGTH, 128, seed=1)
    exact = exact_logits(folder, tokens, torch.float64)
    theirs = (reference_logits(folder, tokens, torch.float32).double() - exact).abs().max()
    pipeline = Pipeline(folder, torch.float32, 2)
    pipeline.add(0, tokens)
    ours = (chunked(pipeline, 0, [20, 17]).double() - exact).abs().max()
    assert ours < 3 * theirs, "rounding is as good as that of transformers"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["opt", "llama", "qwen3"])
def test_half_precision_is_as_near_as_transformers(family: str, dtype: torch.dtype, checkpoint: Maker) -> None:
    folder = checkpoint(family)
    tokens = random_tokens(LENGTH, 128, seed=2)
    exact = exact_logits(folder, tokens, torch.float64)
    theirs = (reference_logits(folder, tokens, dtype).double() - exact).abs().mean()
    pipeline = Pipeline(folder, dtype, 2)
    pipeline.add(0, tokens)
    output = chunked(pipeline, 0, [20, 15, 1, 1])
    assert output.dtype == dtype
    assert (output.double() - exact).abs().mean() < 2 * theirs


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batches_leave_each_sequence_alone(family: str, checkpoint: Maker) -> None:
    folder = checkpoint(family)
    sequences = [random_tokens(length, 128, seed=length) for length in (30, 19, 41, 9)]
    expected = [exact_logits(folder, tokens, torch.float64) for tokens in sequences]
    pipeline = Pipeline(folder, torch.float64, 3)
    for slot, tokens in enumerate(sequences):
        pipeline.add(slot, tokens)
    done = [0, 0, 0, 0]
    for step in ([20, 18, 7, 0], [1, 1, 16, 3], [1, 0, 1, 1], [8, 0, 17, 5]):
        rows = [(slot, done[slot], count) for slot, count in enumerate(step) if count]
        output = pipeline.step(*rows)
        first = 0
        for slot, start, count in rows:
            wanted = expected[slot][start : start + count]
            torch.testing.assert_close(output[first : first + count], wanted, **TIGHT)
            first += count
            done[slot] += count
    assert done == [30, 19, 41, 9]


@pytest.mark.parametrize("family", ["opt-350m", "llama", "qwen3"])
@pytest.mark.parametrize("partition", [[1, 3], [3, 1], [1, 2, 1], [2, 1, 1]])
def test_uneven_partitions(family: str, partition: list[int], checkpoint: Maker) -> None:
    folder = checkpoint(family)
    tokens = random_tokens(LENGTH, 128)
    pipeline = Pipeline(folder, torch.float64, len(partition), partition)
    assert [len(caches) for caches in pipeline.caches] == partition
    pipeline.add(0, tokens)
    torch.testing.assert_close(pipeline.step((0, 0, LENGTH)), exact_logits(folder, tokens, torch.float64), **TIGHT)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_that_of_transformers(family: str, checkpoint: Maker) -> None:
    folder = checkpoint(family)
    prompt = random_tokens(11, 128, seed=3)
    expected = reference_greedy(folder, prompt, 24, torch.float64)
    assert len(set(expected)) > 4, "an output of one token would hide a wrong position"
    pipeline = Pipeline(folder, torch.float64, 2)
    pipeline.add(0, prompt, length=11 + 24)
    output = [int(pipeline.step((0, 0, 11))[-1].argmax())]
    while len(output) < 24:
        row = Row(0, 10 + len(output), 1, True, output[-1])
        output.append(int(pipeline.forward(*pipeline.batch([row]))[-1].argmax()))
    assert output == expected


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama one kv head, wide heads": ("llama", {"num_key_value_heads": 1, "head_dim": 16}),
    "llama no grouping": ("llama", {"num_key_value_heads": 4}),
    "rope theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}),
    "rope linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0}}),
    "rope llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            }
        },
    ),
    "rope yarn": (
        "qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 128,
                "beta_fast": 8.0, "beta_slow": 1.0,
            }
        },
    ),
    "rope yarn mscale": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 128,
                "mscale": 1.5, "mscale_all_dim": 0.7, "truncate": False,
            }
        },
    ),
    "glm rope yarn": (
        "glm",
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 128,
                "partial_rotary_factor": 0.5,
            }
        },
    ),
    "glm that turns a quarter": ("glm", {"partial_rotary_factor": 0.25}),
    "glm4 that turns whole heads": ("glm4", {"partial_rotary_factor": 1.0}),
    "glm4 no biases, tied": ("glm4", {"attention_bias": False, "tie_word_embeddings": True}),
    "qwen2 untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3 biases": ("qwen3", {"attention_bias": True, "tie_word_embeddings": False}),
    "mistral within its window": ("mistral", {"sliding_window": 40}),
    "opt gelu, no biases": ("opt", {"activation_function": "gelu", "enable_bias": False}),
    "opt norms without weights": ("opt", {"layer_norm_elementwise_affine": False}),
    "opt untied": ("opt", {"tie_word_embeddings": False}),
    "opt without the last norm": ("opt", {"_remove_final_layer_norm": True}),
    "norm eps": ("llama", {"rms_norm_eps": 0.3}),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_the_config(variant: str, checkpoint: Maker) -> None:
    family, fields = VARIANTS[variant]
    folder = checkpoint(family, **fields)
    tokens = random_tokens(LENGTH, 128)
    expected = exact_logits(folder, tokens, torch.float64)
    plain = exact_logits(checkpoint(family), tokens, torch.float64)
    if not variant.startswith("mistral"):
        assert (expected - plain).abs().max() > 1e-3, "the variant makes a difference"
    pipeline = Pipeline(folder, torch.float64, 2)
    pipeline.add(0, tokens)
    torch.testing.assert_close(chunked(pipeline, 0, [30, 1, 6]), expected, **TIGHT)


@pytest.mark.parametrize("family", FAMILIES)
def test_planted_errors_show(family: str, checkpoint: Maker) -> None:
    """A slot off by one, a stale block, a position off by one: the comparison above fails."""
    folder = checkpoint(family)
    tokens = random_tokens(LENGTH, 128)
    expected = exact_logits(folder, tokens, torch.float64)[30:]

    def difference(plant: Callable[[Pipeline], None], move: int = 0) -> float:
        pipeline = Pipeline(folder, torch.float64, 2)
        pipeline.add(0, tokens)
        rows = [Row(0, 0, 30, True, TOKEN_REGISTERED)]
        batch, ids = pipeline.batch(rows)
        slots = batch.slot_mapping.clone()
        slots[12:20] += move
        pipeline.forward(replace(batch, slot_mapping=slots), ids)
        plant(pipeline)
        return float((pipeline.step((0, 30, 7)) - expected).abs().nan_to_num(1e9).max())

    def stale_block(pipeline: Pipeline) -> None:
        for cache in pipeline.caches[1]:
            cache[pipeline.tables[0][1]] = cache[pipeline.tables[0][2]]

    assert difference(lambda _: None) < 1e-9
    assert difference(lambda _: None, move=1) > 1e-3
    assert difference(stale_block) > 1e-3
    shifted = Pipeline(folder, torch.float64, 1)
    shifted.add(0, tokens)
    batch, ids = shifted.batch([Row(0, 0, LENGTH, True, TOKEN_REGISTERED)])
    positions = batch.positions.clone()
    positions[20:] += 1
    assert (shifted.forward(replace(batch, positions=positions), ids)[30:] - expected).abs().max() > 1e-3
