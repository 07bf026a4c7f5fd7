"""Scores of prompts, and answers that follow a grammar, from an engine on GPUs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from real import needs_gpu

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "engine"), str(HERE.parent / "end_to_end")]
pytest.importorskip("msgspec", reason="needs the engine's packages")
pytest.importorskip("transformers", reason="the judge")

import reference  # noqa: E402
from checkpoints import make_checkpoint, reference_logits  # noqa: E402
from ppengine import LLM, SamplingParams, StructuredOutputsParams  # noqa: E402
from ppengine.common.config import Profile, build_profile, profiles_dir  # noqa: E402

pytestmark = needs_gpu
layouts = pytest.mark.parametrize(("stages", "tensor"), [(1, 1), (2, 1), (1, 2)], ids=["lone", "stages", "ranks"])
DEVICE, TOP, NEAR = "cuda", 3, 2e-3
TINY = profiles_dir() / "models" / "tiny"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}


def profile(folder: Path, stages: int, tensor: int, device: str, *, words: bool = False) -> Profile:
    return build_profile(
        {
            "name": f"answers-{os.getpid()}",
            "model": {"path": str(folder), "dtype": "float32", "max_model_len": 256, "skip_tokenizer": not words},
            "parallel": {"pipeline": stages, "tensor": tensor, "device": device},
            "memory": {"device_mib": 4096 if device == "cuda" else 64, "swap_space_gib": 0.01},
            "scheduler": {"max_num_seqs": 32, "max_num_batched_tokens": 64, "schedule_ahead": True},
        },
        base=Path(),
    )


@layouts
def test_scores_of_prompts_are_those_of_transformers(stages: int, tensor: int, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "llama", "llama")
    prompts = reference.prompts(12, 100, low=3, high=150, seed=9)
    scored = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, prompt_logprobs=TOP)
    plain = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    with LLM(profile(folder, stages, tensor, DEVICE)) as llm:
        outputs = llm.generate([*inputs, *inputs], [scored] * 12 + [plain] * 12, use_tqdm=False)
    for prompt, output in zip(prompts, outputs[:12], strict=True):
        expected = torch.log_softmax(reference_logits(folder, prompt, torch.float64), -1)
        found = output.prompt_logprobs
        assert found is not None and found[0] is None and len(found) == len(prompt)
        for at, one in enumerate(found[1:], 1):
            values, score = expected[at - 1], float(expected[at - 1][prompt[at]])
            assert one.logprob == pytest.approx(score, abs=NEAR)
            surely, perhaps = ((values > score + sign * NEAR).sum() for sign in (1, -1))
            assert int(surely) <= one.rank - 1 <= int(perhaps), "tokens nearer than that may change places"
            assert [value for _, value in one.top] == pytest.approx(values.topk(TOP).values.tolist(), abs=NEAR)
            assert all(value == pytest.approx(float(values[token]), abs=NEAR) for token, value in one.top)


@layouts
def test_structured_answers_are_those_of_a_cpu(stages: int, tensor: int) -> None:
    """Half of the rows of a batch have masks, two of them the same grammar; some are sampled with a seed."""
    form = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    other = StructuredOutputsParams(choice=["red", "green"])
    kinds = [{"structured_outputs": form}, {}, {"structured_outputs": form}, {"structured_outputs": other}, {}, {}]
    params = [
        SamplingParams(temperature=0.8 if at % 2 else 0.0, seed=at, max_tokens=60, **each)
        for at, each in enumerate(kinds * 2)
    ]
    found = {}
    for device in dict.fromkeys([DEVICE, "cpu"]):
        made = profile(TINY, stages if device == DEVICE else 1, tensor if device == DEVICE else 1, device, words=True)
        with LLM(made) as llm:
            outputs = llm.generate(["Once upon a time"] * len(params), params, use_tqdm=False)
        found[device] = [output.outputs[0].text for output in outputs]
    for at, text in enumerate(found[DEVICE]):
        if at % 6 in (0, 2):
            assert set(json.loads(text)) == {"name", "kind"}, text
        if at % 6 == 3:
            assert text in ("red", "green")
    same = sum(one == two for one, two in zip(found[DEVICE], found["cpu"], strict=True))
    assert same >= len(params) - 1, found
