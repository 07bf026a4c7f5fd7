"""A whole engine on GPUs, judged by transformers: the same tokens, with graphs and without, at pipeline 1, 2 and 4.

Stages share a card where there are fewer cards than stages.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from real import needs_gpu, pipelines

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "engine"), str(HERE.parent / "end_to_end")]
pytest.importorskip("msgspec", reason="needs the engine's packages")
pytest.importorskip("transformers", reason="the judge")

import reference  # noqa: E402
from checkpoints import make_checkpoint  # noqa: E402
from ppengine import LLM, SamplingParams  # noqa: E402
from ppengine.common.config import Profile, profiles_dir  # noqa: E402

pytestmark = needs_gpu
STEPS = 24
TINY = profiles_dir() / "models" / "tiny"


def profile(folder: Path, dtype: str, stages: int, eager: bool, peer_to_peer: bool = True, tensor: int = 1) -> Profile:
    from ppengine.common.config import build_profile

    return build_profile(
        {
            "name": f"gpu-{os.getpid()}",
            "model": {"path": str(folder), "dtype": dtype, "max_model_len": 256, "skip_tokenizer": True},
            "parallel": {
                "pipeline": stages,
                "tensor": tensor,
                "device": "cuda",
                "eager": eager,
                "peer_to_peer": peer_to_peer,
            },
            "memory": {"device_mib": 4096, "swap_space_gib": 0.01},
            "scheduler": {"max_num_seqs": 32, "max_num_batched_tokens": 64, "schedule_ahead": True},
        },
        base=Path(),
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    made = {
        f"{family}{suffix}": make_checkpoint(root / f"{family}{suffix}", family, layers=4, gain=gain)
        for family in ("opt", "llama")
        for suffix, gain in (("", 1.0), ("-half", 0.5))
    }
    return {**made, "tiny": TINY}


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("stages", pipelines)
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("opt", "float32"),
        ("opt-half", "float16"),
        ("opt-half", "bfloat16"),
        ("llama", "float32"),
        ("llama-half", "float16"),
        ("llama-half", "bfloat16"),
        ("tiny", "bfloat16"),
    ],
)
def test_tokens_are_as_near_as_those_of_transformers(
    folders: dict[str, Path], family: str, dtype: str, stages: int, eager: bool
) -> None:
    folder = folders[family]
    prompts = reference.prompts(24, 100, low=3, high=90, seed=5)
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, logprobs=1)
    with LLM(profile(folder, dtype, stages, eager)) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    reference.assert_as_near(folder, dtype, prompts, [output.outputs[0] for output in outputs])


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(
    ("family", "dtype"), [("opt", "float32"), ("llama-half", "bfloat16"), ("opt-half", "float16"), ("tiny", "bfloat16")]
)
def test_tokens_of_two_ranks_are_as_near(
    folders: dict[str, Path], family: str, dtype: str, stages: int, eager: bool
) -> None:
    folder = folders[family]
    prompts = reference.prompts(24, 100, low=3, high=90, seed=15)
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, logprobs=1)
    with LLM(profile(folder, dtype, stages, eager, tensor=2)) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    reference.assert_as_near(folder, dtype, prompts, [output.outputs[0] for output in outputs])


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("tokens", [1500, 2048, 4096, 8192])
def test_large_steps_of_two_ranks(folders: dict[str, Path], tokens: int, eager: bool) -> None:
    """One step has the prompts of many requests: a graph up to 4,096 tokens."""
    folder = folders["llama-half"]
    prompts = reference.prompts(100, 100, low=60, high=95, seed=16)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)
    scheduler = {"max_num_seqs": 128, "max_num_batched_tokens": tokens, "schedule_ahead": True}
    made = profile(folder, "bfloat16", 1, eager, tensor=2)
    with LLM(msgspec.structs.replace(made, scheduler=msgspec.convert(scheduler, type(made.scheduler)))) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    reference.assert_as_near(folder, "bfloat16", prompts, [output.outputs[0] for output in outputs])


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_through_host_memory_where_cards_are_kept_apart(folders: dict[str, Path], eager: bool) -> None:
    folder = folders["opt"]
    prompts = reference.prompts(24, 100, low=3, high=90, seed=8)
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, logprobs=1)
    with LLM(profile(folder, "float32", 2, eager, peer_to_peer=False)) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    reference.assert_as_near(folder, "float32", prompts, [output.outputs[0] for output in outputs])


@pytest.mark.parametrize(("family", "dtype"), [("opt", "float32"), ("opt-half", "float16"), ("tiny", "bfloat16")])
def test_one_request_alone(folders: dict[str, Path], family: str, dtype: str) -> None:
    """Steps of one row have products of their own."""
    folder = folders[family]
    prompts = reference.prompts(3, 100, low=3, high=90, seed=7)
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, logprobs=1)
    with LLM(profile(folder, dtype, 1, False)) as llm:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = [llm.generate([each], params, use_tqdm=False)[0].outputs[0] for each in inputs]
    reference.assert_as_near(folder, dtype, prompts, outputs)


ADJUSTED: dict[str, Any] = {
    "min_p": 0.02, "presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.2,
    "logit_bias": {7: 2.0}, "bad_words_ids": [[7, 8], [9]],
}  # fmt: skip


@pytest.mark.parametrize("changes", [{}, ADJUSTED], ids=["plain", "adjusted"])
def test_seeded_samples_are_those_of_a_cpu(folders: dict[str, Path], changes: dict[str, Any]) -> None:
    """The counter-based generator gives the same tokens where rounding does not decide."""
    prompts = reference.prompts(8, 100, seed=6)
    params = SamplingParams(temperature=0.7, top_p=0.9, seed=11, max_tokens=STEPS, ignore_eos=True, **changes)
    outputs = []
    for device in ("cpu", "cuda"):
        made = profile(folders["llama"], "float32", 1, False)
        import msgspec

        made = msgspec.structs.replace(made, parallel=msgspec.structs.replace(made.parallel, device=device))
        with LLM(made) as llm:
            found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        outputs.append([output.outputs[0].token_ids for output in found])
    same = sum(a == b for a, b in zip(*outputs, strict=True))
    assert same >= len(prompts) - 1, f"{same} of {len(prompts)} are the same; torch {torch.__version__}"
