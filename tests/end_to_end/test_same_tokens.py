"""Greedy output of real engines equals transformers' with the same checkpoint (float64), however it was scheduled."""

from __future__ import annotations

from pathlib import Path

import pytest
import reference
from checkpoints import FAMILIES, make_checkpoint
from ppengine import LLM, SamplingParams

from profiles import small

STEPS = 24


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


@pytest.mark.parametrize("stages", [1, 3, 4])
@pytest.mark.parametrize("family", ["opt", "llama"])
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
    # Room for three of the eight requests at their full length: the others are preempted again and again.
    profile = small(folder, scheduler={"preemption": mode}, memory={"device_mib": 1, "utilization": 1.0})
    with LLM(profile) as llm:
        check(llm, folder, reference.prompts(8, 100, low=60, high=90), steps=60)


def test_uneven_partition_and_schedule_ahead(checkpoint_root: Path) -> None:
    folder = folder_of(checkpoint_root, "mistral")
    profile = small(folder, parallel={"partition": [1, 3]}, scheduler={"schedule_ahead": True})
    with LLM(profile) as llm:
        check(llm, folder, reference.prompts(8, 100))
