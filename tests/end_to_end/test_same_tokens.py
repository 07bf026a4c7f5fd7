"""Greedy output of real engines equals transformers' with the same checkpoint (float64), however it was scheduled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import disturbed
import pytest
import reference
from checkpoints import make_checkpoint
from injected import Injector
from ppengine import LLM, SamplingParams
from ppengine.common.config import profiles_dir
from serving import Served

from profiles import small

STEPS = 24
TINY = profiles_dir() / "models" / "tiny"


def folder_of(root: Path, family: str) -> Path:
    if family == "tiny":
        return TINY
    folder = root / family
    return folder if folder.exists() else make_checkpoint(folder, family, dtype="float64", layers=4)


class Case(NamedTuple):
    """An engine for the scenario: model, stages, threads a stage, sections of its profile."""

    family: str
    stages: int
    threads: int
    sections: dict[str, Any]


def case(family: str, stages: int, threads: int = 1, tensor: int = 1, **sections: Any) -> Any:
    sections["parallel"] = {**sections.get("parallel", {}), "tensor": tensor}
    return pytest.param(Case(family, stages, threads, sections), id=f"{family}-{stages}x{tensor}")


SWAP, AHEAD = {"preemption": "swap"}, {"schedule_ahead": True}
# Every family with and without ranks, the bundled model and each number of stages; the first one also has errors
# planted. With four ranks, KV heads are replicated. Ray: `test_ray`. Ranks of all families: `test_models_shards`.
CASES = [
    case("llama", 2),
    case("llama", 2, tensor=2),
    case("opt", 4, scheduler=SWAP),
    case("opt-350m", 1, tensor=2),
    case("mistral", 2, tensor=2, scheduler=AHEAD, parallel={"partition": [1, 3]}),
    case("qwen2", 1, tensor=2, threads=2),
    case("qwen3", 1, tensor=4, scheduler=AHEAD),
    case("tiny", 1),
    case("tiny", 3, scheduler={**SWAP, **AHEAD}),
    case("glm", 2, tensor=2),
    case("glm4", 2, scheduler=SWAP),
    case("glm4", 1, tensor=4),
    case("opt", 2, tensor=2, scheduler=SWAP),
]


class World(NamedTuple):
    """A served engine, and the checkpoint that it serves."""

    engine: Served
    folder: Path
    vocab: int
    injector: Injector


@pytest.fixture(scope="module")
def world(
    request: pytest.FixtureRequest, checkpoint_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    wanted, injector = request.param, Injector(tmp_path_factory.mktemp("planted"))
    folder, tiny = folder_of(checkpoint_root, wanted.family), wanted.family == "tiny"
    profile = disturbed.profile(folder, wanted.stages, wanted.threads, 128 if tiny else 32, **wanted.sections)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", injector.path)
        served = Served(profile)
    with served:
        yield World(served, folder, 2000 if tiny else 100, injector)


@pytest.mark.parametrize("world", CASES, indirect=True)
async def test_through_all_that_may_befall_a_request(world: World) -> None:
    await disturbed.check(world.engine, world.folder, world.vocab, injector=world.injector)


# One stage and two, ranks, recompute and swap, with and without scheduling ahead.
@pytest.mark.parametrize("world", [CASES[0], CASES[4], CASES[7], CASES[8]], indirect=True)
async def test_adjusted_logits_through_the_same(world: World) -> None:
    """Penalties and bad words depend on tokens that the last stage knows before the core does."""
    best = reference.greedy(world.folder, disturbed.make_prompts(world.vocab, 300)[1], 4)
    sampling = {
        "temperature": 0.9, "seed": 5, "min_p": 0.02, "presence_penalty": 0.5, "frequency_penalty": 0.4,
        "repetition_penalty": 1.2, "logit_bias": {best[0]: 3.0, 7: -2.0},
        "bad_words_ids": [best[1:3], [best[3]], [9, 9]],
    }  # fmt: skip
    await disturbed.check(world.engine, world.folder, world.vocab, 300, world.injector, sampling)


@pytest.mark.parametrize("world", CASES[:1], indirect=True)
@pytest.mark.parametrize(("seed", "word"), [(100, "stale_block"), (200, "slot_off_by_one")])
async def test_planted_errors_fail_the_same_check(world: World, seed: int, word: str) -> None:
    """Other prompts each time: what an error has left in the prefix cache is none of theirs."""
    stage = world.engine.pids["stage1"]
    world.injector.plant(stage, word)
    with pytest.raises(disturbed.WrongTokensError):
        await disturbed.check(world.engine, world.folder, world.vocab, seed, world.injector)
    world.injector.plant(stage, "uproot")


# The random checkpoints wander by design; in bfloat16 transformers itself is lost on them: the bundled model judges.
@pytest.mark.usefixtures("forked_llm")
@pytest.mark.parametrize(
    ("family", "dtype", "stages", "threads"),
    [
        ("llama", "float32", 1, 2),
        ("opt", "float16", 2, 1),
        ("tiny", "bfloat16", 2, 1),
    ],
)
def test_lower_precision_is_as_near_as_transformers(
    family: str, dtype: str, stages: int, threads: int, checkpoint_root: Path
) -> None:
    folder = folder_of(checkpoint_root, family)
    prompts = reference.prompts(8, 100, seed=5)
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, logprobs=1)
    with LLM(small(folder, stages=stages, threads=threads, model={"dtype": dtype})) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    reference.assert_as_near(folder, dtype, prompts, [output.outputs[0] for output in outputs])
