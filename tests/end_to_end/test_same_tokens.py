"""Greedy output of real engines equals transformers' with the same checkpoint (float64), however it was scheduled."""

from __future__ import annotations

from pathlib import Path

import pytest
import reference
from checkpoints import FAMILIES, make_checkpoint
from ppengine import LLM, SamplingParams
from ppengine.config import profiles_dir

from profiles import small

STEPS = 24
TINY = profiles_dir() / "models" / "tiny"


def folder_of(root: Path, family: str) -> Path:
    folder = root / family
    return folder if folder.exists() else make_checkpoint(folder, family, dtype="float64", layers=4)


def check(llm: LLM, folder: Path, prompts: list[list[int]], steps: int = STEPS) -> None:
    params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == reference.greedy(folder, prompt, steps)
        assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_in_two_stages(family: str, checkpoint_root: Path) -> None:
    folder = folder_of(checkpoint_root, family)
    with LLM(small(folder)) as llm:
        check(llm, folder, reference.prompts(8, 100))


@pytest.mark.parametrize(("family", "stages"), [("opt", 1), ("opt", 4), ("llama", 3), ("llama", 4)])
def test_one_to_four_stages(family: str, stages: int, checkpoint_root: Path) -> None:
    folder = folder_of(checkpoint_root, family)
    with LLM(small(folder, stages=stages)) as llm:
        check(llm, folder, reference.prompts(8, 100))


def test_chunked_prefill_and_prefix_hits(checkpoint_root: Path) -> None:
    folder = folder_of(checkpoint_root, "qwen3")
    shared = reference.prompts(1, 100, low=96, high=96, seed=3)[0]
    prompts = [shared + tail for tail in reference.prompts(6, 100, low=1, high=20, seed=4)] + [shared]
    with LLM(small(folder, scheduler={"max_num_batched_tokens": 24})) as llm:
        check(llm, folder, prompts)
        check(llm, folder, prompts)  # every prompt is in the prefix cache now


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_forced_preemption(mode: str, checkpoint_root: Path) -> None:
    folder = folder_of(checkpoint_root, "llama")
    profile = small(folder, scheduler={"preemption": mode}, memory={"device_mib": 2, "utilization": 0.9})
    with LLM(profile) as llm:
        prompts = reference.prompts(24, 100, low=60, high=90)
        assert llm.llm_engine.num_blocks < 24 * 7, "the pool must be too small for all of them at full length"
        check(llm, folder, prompts, steps=40)


def test_uneven_partition_and_schedule_ahead(checkpoint_root: Path) -> None:
    folder = folder_of(checkpoint_root, "mistral")
    profile = small(folder, parallel={"partition": [1, 3]}, scheduler={"schedule_ahead": True})
    with LLM(profile) as llm:
        check(llm, folder, reference.prompts(8, 100))


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_stages_as_ray_actors(checkpoint_root: Path) -> None:
    """OPT is compared in `test_restart.py`, where actors are lost beside."""
    folder = folder_of(checkpoint_root, "llama")
    with LLM(small(folder, stages=4, parallel={"executor": "ray"})) as llm:
        check(llm, folder, reference.prompts(8, 100))


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_the_bundled_model(stages: int) -> None:
    prompts = ["The engine stopped because", "Once upon a time", "To pause the engine,", "What is a block?"]
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
    with LLM(small(TINY, stages=stages, model={"skip_tokenizer": False}, memory={"device_mib": 128})) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt == prompt
        assert output.outputs[0].token_ids == reference.greedy(TINY, output.prompt_token_ids, STEPS)


# The random checkpoints wander by design; in bfloat16 transformers itself is lost on them: the bundled model judges.
@pytest.mark.parametrize(
    ("family", "dtype"),
    [("opt", "float32"), ("opt", "float16"), ("llama", "float32"), ("llama", "float16"), ("tiny", "bfloat16")],
)
def test_lower_precision_is_as_near_as_transformers(family: str, dtype: str, checkpoint_root: Path) -> None:
    folder = TINY if family == "tiny" else folder_of(checkpoint_root, family)
    prompts = reference.prompts(8, 100, seed=5)
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, logprobs=1)
    with LLM(small(folder, model={"dtype": dtype})) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    reference.assert_as_near(folder, dtype, prompts, [output.outputs[0] for output in outputs])
