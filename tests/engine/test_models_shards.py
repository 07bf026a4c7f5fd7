"""Models that are split over ranks compute transformers' logits, and every rank has the same hidden states."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, reference_greedy, reference_logits
from ppengine.checkpoint.model_shard import Shard, shard_of
from ppengine.checkpoint.model_spec import ModelSpec, read_spec
from ppengine.common.groups import ATTENTION, EMBED, MLP, site
from ppengine.models.group import LateSum
from ppengine.models.layers import Linear, SummedLinear
from ppengine.protocol.steps import Row
from ppengine.stage.sampler import sample_rows
from ppengine.stage.token_history import TokenHistory
from stage_runs import Pipeline, exact_logits, random_tokens
from thread_group import Meeting, ThreadGroup, run_ranks
from torch import Tensor

Folders = Callable[[str], Path]
Plant = Callable[[Pipeline], None]
LENGTH, LAYERS = 29, 2
TIGHT = {"rtol": 0, "atol": 1e-9}
CHUNKS = (13, 1, 8, 1, 6)
"""A first chunk, decode steps and later chunks."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": ("opt", {}),
    "opt untied, uneven": ("opt", {"tie_word_embeddings": False, "ffn_dim": 80, "vocab_size": 131}),
    "opt gelu, no biases": ("opt", {"activation_function": "gelu", "enable_bias": False}),
    "opt-350m": ("opt-350m", {"vocab_size": 144}),
    "llama, replicated KV heads": ("llama", {"num_attention_heads": 8, "vocab_size": 144}),
    "llama biases, uneven": ("llama", {"attention_bias": True, "mlp_bias": True, "intermediate_size": 70}),
    "llama tied, one KV head": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1, "vocab_size": 131}),
    "mistral": ("mistral", {"num_key_value_heads": 4}),
    "qwen2": ("qwen2", {"intermediate_size": 80}),
    "qwen2 untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", {}),
    "glm, replicated KV heads": ("glm", {"num_attention_heads": 8, "vocab_size": 144}),
    "glm4, uneven": ("glm4", {"intermediate_size": 70, "vocab_size": 131}),
    "qwen3 biases": ("qwen3", {"attention_bias": True, "tie_word_embeddings": False}),
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from the name of one of `MODELS` to its checkpoint in float64."""

    @functools.cache
    def make(name: str) -> Path:
        family, fields = MODELS[name]
        return make_checkpoint(tmp_path_factory.mktemp(family), family, dtype="float64", layers=LAYERS, **fields)

    return make


def run_split(
    folder: Path,
    size: int,
    stages: int = 1,
    dtype: torch.dtype = torch.float64,
    *,
    packed: bool = True,
    kind: type[ThreadGroup] = ThreadGroup,
    plant: Plant = lambda pipeline: None,
    shards: dict[int, Shard] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Return logits [T, V] of the tokens, fed in `CHUNKS`, and each rank's hidden states behind every stage.

    `plant` may change a pipeline before it runs, `shards` has shards of some ranks in place of the right ones.
    """

    def work(group: ThreadGroup) -> tuple[Tensor, Tensor]:
        shard = (shards or {}).get(group.rank)
        pipeline = Pipeline(folder, dtype, stages, packed=packed, group=group, shard=shard)
        pipeline.add(0, tokens_of(pipeline.spec))
        plant(pipeline)
        logits, passed, start = [], [], 0
        for count in CHUNKS:
            logits.append(pipeline.step((0, start, count)))
            passed += pipeline.passed
            start += count
        return torch.cat(logits), torch.cat(passed)

    answers = run_ranks(size, work, kind)
    return torch.cat([logits for logits, _ in answers], 1), [passed for _, passed in answers]


def tokens_of(spec: ModelSpec) -> list[int]:
    """Return tokens of all ranks' parts of the vocabulary."""
    return random_tokens(LENGTH, spec.vocab_size)


def exact(folder: Path) -> Tensor:
    """Return transformers' logits [T, V]."""
    return exact_logits(folder, tokens_of(read_spec(folder)), torch.float64)


@pytest.mark.parametrize("name", MODELS)
def test_split_models_give_the_logits_of_transformers(name: str, folders: Folders) -> None:
    folder = folders(name)
    expected = exact(folder)
    for size, stages in [(1, 1), (2, 1), (4, 2)]:
        logits, passed = run_split(folder, size, stages)
        torch.testing.assert_close(logits, expected, **TIGHT)
        assert all(torch.equal(each, passed[0]) for each in passed), f"{size} ranks, {stages} stages"


@pytest.mark.parametrize("name", ["opt", "opt-350m", "qwen3", "glm4, uneven"])
def test_plain_weights_and_float32(name: str, folders: Folders) -> None:
    folder = folders(name)
    expected = exact(folder)
    torch.testing.assert_close(run_split(folder, 2, 2, packed=False)[0], expected, **TIGHT)
    whole, _ = run_split(folder, 1, 1, torch.float32)
    logits, passed = run_split(folder, 4, 1, torch.float32)
    assert (logits - expected).abs().max() < 3 * (whole - expected).abs().max(), "rounding is as good"
    assert all(torch.equal(each, passed[0]) for each in passed)


class InPieces(ThreadGroup):
    """Sums of all steps but decodes go in two pieces, of rows that differ in number."""

    def pieces(self, rows: int, row_bytes: int) -> list[slice]:
        first = rows - rows // 3
        return [slice(0, first), slice(first, rows)] if rows > 2 else super().pieces(rows, row_bytes)


@pytest.mark.parametrize("name", ["opt", "opt-350m", "llama biases, uneven", "qwen3", "glm4, uneven"])
@pytest.mark.parametrize("packed", [True, False])
def test_sums_in_pieces_give_the_logits_of_transformers(name: str, packed: bool, folders: Folders) -> None:
    sent: list[int] = []

    class Noted(InPieces):
        def send(self, part: Tensor, site: int) -> LateSum:
            sent.append(len(part))
            return super().send(part, site)

    logits, passed = run_split(folders(name), 2, 2, packed=packed, kind=Noted)
    torch.testing.assert_close(logits, exact(folders(name)), **TIGHT)
    assert all(torch.equal(each, passed[0]) for each in passed)
    # A norm behind a product needs the sums of GLM-4-0414 at once.
    assert bool(sent) != name.startswith("glm4")


def test_a_piece_that_is_left_out_shows(folders: Folders) -> None:
    class LeavesOut(InPieces):
        def send(self, part: Tensor, site: int) -> LateSum:
            return super().send(part * 0 if self.rank == 1 and len(part) % 2 else part, site)

    folder = folders("llama biases, uneven")
    assert (run_split(folder, 2, kind=LeavesOut)[0] - exact(folder)).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_as_near_as_transformers(dtype: torch.dtype, folders: Folders) -> None:
    folder = folders("llama biases, uneven")
    expected = exact(folder)
    theirs = (reference_logits(folder, tokens_of(read_spec(folder)), dtype).double() - expected).abs().mean()
    logits, passed = run_split(folder, 4, 2, dtype)
    assert logits.dtype == dtype
    assert (logits.double() - expected).abs().mean() < 2 * theirs
    assert all(torch.equal(each, passed[0]) for each in passed)


def test_shards_of_whole_vectors_are_packed(folders: Folders) -> None:
    """Only a whole stage runs a packed layer in one call: there are sums in the middle of a split one."""
    packed: list[tuple[bool, int]] = []

    def note(pipeline: Pipeline) -> None:
        (stage,) = pipeline.stages
        linears = [module for module in stage.modules() if isinstance(module, Linear)]
        packed.append((all(linear.packed for linear in linears), len(stage._packed_layers)))

    for size in (1, 2):
        run_split(folders("llama, replicated KV heads"), size, plant=note)
    assert packed == [(True, LAYERS), (True, 0), (True, 0)]


@pytest.mark.parametrize("name", ["opt", "llama biases, uneven"])
def test_one_rank_is_the_whole_model(name: str, folders: Folders) -> None:
    """Groups of one change no bit, and nothing is exchanged."""
    folder = folders(name)
    groups: list[ThreadGroup] = []

    class Noted(ThreadGroup):
        def __init__(self, meeting: Meeting, rank: int) -> None:
            super().__init__(meeting, rank)
            groups.append(self)

    logits, _ = run_split(folder, 1, kind=Noted)
    pipeline = Pipeline(folder, torch.float64)
    pipeline.add(0, tokens_of(pipeline.spec))
    starts = itertools.accumulate(CHUNKS, initial=0)
    alone = torch.cat([pipeline.step((0, start, count)) for start, count in zip(starts, CHUNKS, strict=False)])
    assert torch.equal(logits, alone)
    assert groups[0].sites == []


def test_every_part_of_a_layer_has_its_call_site(folders: Folders) -> None:
    groups: list[ThreadGroup] = []

    def note(pipeline: Pipeline) -> None:
        groups.append(pipeline.stages[0].group)

    run_split(folders("llama, replicated KV heads"), 2, 2, plant=note)
    step = [site(0, EMBED), *(site(layer, part) for layer in range(LAYERS) for part in (ATTENTION, MLP))]
    assert [group.sites for group in groups] == [step * len(CHUNKS)] * 2


@pytest.mark.parametrize("name", ["opt", "opt-350m", "llama biases, uneven", "qwen3 biases"])
def test_planted_errors_show(name: str, folders: Folders) -> None:
    folder = folders(name)
    expected, here = exact(folder), site(1, MLP)

    def difference(**planted: Any) -> float:
        return float((run_split(folder, 2, **planted)[0] - expected).abs().nan_to_num(1e9).max())

    class LeavesOut(ThreadGroup):
        def all_reduce(self, part: Tensor, site: int) -> Tensor:
            return part if site == here else super().all_reduce(part, site)

    class Stale(ThreadGroup):
        """Rank 1 brings its part of the call before."""

        before: Tensor | None = None

        def all_reduce(self, part: Tensor, site: int) -> Tensor:
            before, self.before = self.before, part.clone()
            return super().all_reduce(before if self.rank == 1 and site == here and before is not None else part, site)

    def bias_everywhere(pipeline: Pipeline) -> None:
        for module in pipeline.stages[0].modules():
            if isinstance(module, SummedLinear):
                bias = torch.full((pipeline.spec.hidden_size,), 0.1, dtype=torch.float64)
                module.bias = torch.nn.Parameter(bias, requires_grad=False)

    shard = shard_of(read_spec(folder), 1, 2)
    heads, inner, words = shard.heads, shard.inner, shard.vocabulary
    assert difference() < 1e-9
    assert difference(kind=LeavesOut) > 1e-3
    assert difference(kind=Stale) > 1e-3
    assert difference(plant=bias_everywhere) > 1e-3
    for wrong in (
        replace(shard, heads=(heads[0] - 1, heads[1] - 1)),
        replace(shard, inner=(inner[0] - 1, inner[1] - 1)),
        replace(shard, vocabulary=(words[0] - 1, words[1] - 1)),
    ):
        assert difference(shards={1: wrong}) > 1e-3


@pytest.mark.parametrize("name", ["opt-350m", "qwen2"])
def test_greedy_output_is_that_of_transformers(name: str, folders: Folders) -> None:
    """Every rank chooses its next input itself, from the candidates of all."""
    folder, count = folders(name), 16
    prompt = random_tokens(11, 128, seed=3)
    expected = reference_greedy(folder, prompt, count, torch.float64)
    assert len(set(expected)) > 4

    def work(group: ThreadGroup) -> list[int]:
        pipeline = Pipeline(folder, torch.float64, 2, group=group)
        pipeline.add(0, prompt, length=11 + count)
        shard, requests, output = pipeline.stages[-1].shard, pipeline.state.requests, []
        logits = pipeline.step((0, 0, 11))[-1:]
        while len(output) < count:
            output.append(int(sample_rows(logits, requests, TokenHistory(), [0], [11 + len(output)], shard, group)[0]))
            row = Row(0, 10 + len(output), 1, True, output[-1])
            logits = pipeline.forward(*pipeline.batch([row]))
        return output

    assert run_ranks(4, work) == [expected] * 4


def test_a_replicated_kv_head_of_another_rank_shows(folders: Folders) -> None:
    folder = folders("llama, replicated KV heads")
    shard = shard_of(read_spec(folder), 1, 4)
    assert shard.kv_heads == (0, 1)
    logits, _ = run_split(folder, 4, shards={1: replace(shard, kv_heads=(1, 2))})
    assert (logits - exact(folder)).abs().max() > 1e-3
