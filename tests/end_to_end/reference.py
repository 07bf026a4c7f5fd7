"""The outside judge: transformers with the same checkpoint, greedy, one prompt at a time."""

from __future__ import annotations

import asyncio
import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ppengine import SamplingParams
from ppkernels import sampling
from ppkernels.sampling_inputs import Adjustment, SamplingInputs
from transformers import AutoModelForCausalLM


def prompts(count: int, vocab: int, *, low: int = 3, high: int = 40, seed: int = 0) -> list[list[int]]:
    """Return random prompts of `low` to `high` token ids."""
    source = random.Random(seed)
    return [[source.randrange(4, vocab) for _ in range(source.randint(low, high))] for _ in range(count)]


@lru_cache(maxsize=8)
def model(folder: Path, dtype: str) -> Any:
    """Return the reference model of a checkpoint.

    It has one thread: with one a core, two drills side by side took 78 s for what each does in 5, in barriers.
    """
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


_known: dict[tuple[Path, str, tuple[int, ...]], list[int]] = {}
"""The longest answers yet: many tests ask for the same ones."""


def greedy(folder: Path, prompt: list[int], steps: int, dtype: str = "float64") -> list[int]:
    """Return `steps` greedy tokens after `prompt`, end of sequence ignored, with transformers' own cache."""
    known = _known.get((folder, dtype, tuple(prompt)), [])
    if len(known) < steps:
        known = _known[folder, dtype, tuple(prompt)] = [
            *known,
            *_further(folder, prompt + known, steps - len(known), dtype),
        ]
    return known[:steps]


async def greedy_aside(folder: Path, prompt: list[int], steps: int) -> list[int]:
    """Return `greedy` of it, from a thread: a console that answers no pings meanwhile would lose its link."""
    return await asyncio.to_thread(greedy, folder, prompt, steps)


def _further(folder: Path, ids: list[int], steps: int, dtype: str) -> list[int]:
    judge = model(folder, dtype)
    found: list[int] = []
    with torch.inference_mode():
        past, fresh = None, torch.tensor([ids])
        for _ in range(steps):
            answer = judge(fresh, past_key_values=past, use_cache=True)
            past = answer.past_key_values
            found.append(int(answer.logits[0, -1].argmax()))
            fresh = torch.tensor([[found[-1]]])
    return found


def sampled(folder: Path, prompt: list[int], steps: int, params: SamplingParams) -> list[int]:
    """Return `steps` tokens after `prompt` by transformers' logits in float64 and the kernels' sampling of one row."""
    judge, found, past, fresh = model(folder, "float64"), list[int](), None, torch.tensor([prompt])
    with torch.inference_mode():
        for position in range(len(prompt), len(prompt) + steps):
            answer = judge(fresh, past_key_values=past, use_cache=True)
            past = answer.past_key_values
            adjustment = Adjustment(
                np.array(prompt), np.array(found, np.int64), params.min_p, params.presence_penalty,
                params.frequency_penalty, params.repetition_penalty, params.logit_bias or {}, params.bad_words_ids,
                params.allowed_token_ids,
            )  # fmt: skip
            inputs = SamplingInputs(
                [params.temperature], [params.top_p], [params.top_k], [params.seed or 0], [0], [position],
                adjustments={0: adjustment},
            )  # fmt: skip
            found.append(int(sampling.sample(answer.logits[:, -1], inputs).tokens))
            fresh = torch.tensor([[found[-1]]])
    return found


def assert_as_near(folder: Path, dtype: str, prompts: list[list[int]], samples: list[Any]) -> None:
    """Assert that greedy `samples` (with logprobs) are as near to float64 as transformers itself is in `dtype`.

    Twice the largest error of transformers is the tolerance.
    """
    judges, tolerance = assert_tokens_as_near(folder, dtype, prompts, [sample.token_ids for sample in samples])
    for judge, sample in zip(judges, samples, strict=True):
        for row, token, entry in zip(judge, sample.token_ids, sample.logprobs, strict=True):
            assert abs(entry.chosen - float(row[token])) < tolerance


def assert_tokens_as_near(
    folder: Path, dtype: str, prompts: list[list[int]], outputs: list[list[int]]
) -> tuple[list[torch.Tensor], float]:
    """Assert of greedy tokens alone what `assert_as_near` does; return what float64 says of them, and the tolerance."""
    pairs = list(zip(prompts, outputs, strict=True))
    judges = [log_probabilities(folder, prompt, tokens) for prompt, tokens in pairs]
    theirs = [log_probabilities(folder, prompt, tokens, dtype) for prompt, tokens in pairs]
    tolerance = 2 * max(float((a - b).abs().max()) for a, b in zip(judges, theirs, strict=True))
    assert 0 < tolerance < 1, "a reference that is off by more judges nothing"
    for judge, tokens in zip(judges, outputs, strict=True):
        short = judge.max(dim=-1).values - judge.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        assert float(short.max()) < 2 * tolerance, f"at output {int(short.argmax())}: short by {float(short.max())}"
    return judges, tolerance


def log_probabilities(folder: Path, prompt: list[int], output: list[int], dtype: str = "float64") -> torch.Tensor:
    """Return [len(output), vocab]: log-probabilities before each output token, teacher-forced in `dtype`."""
    judge = model(folder, dtype)
    with torch.inference_mode():
        logits = judge(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.double(), -1)
