"""The outside judge: transformers with the same checkpoint, greedy, one prompt at a time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
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


def greedy(folder: Path, prompt: list[int], steps: int, dtype: str = "float64", draft: Sequence[int] = ()) -> list[int]:
    """Return `steps` greedy tokens after `prompt`, end of sequence ignored, with transformers' own cache.

    A `draft`, such as the engine's answer, changes the time alone: one pass checks as many of its tokens as are right.
    """
    known = _known.get((folder, dtype, tuple(prompt)), [])
    if len(known) < steps:
        rest = draft[len(known) : steps] if list(draft[: len(known)]) == known else ()
        further = _further(folder, prompt + known, steps - len(known), dtype, rest)
        known = _known[folder, dtype, tuple(prompt)] = [*known, *further]
    return known[:steps]


def greedy_each(folder: Path, prompts: Sequence[list[int]], steps: int) -> list[list[int]]:
    """Return `greedy` of each prompt. One padded batch makes the drafts, an eighth of the passes for eight prompts."""
    judge, length = model(folder, "float64"), max(map(len, prompts))
    judge.generation_config.eos_token_id = None
    padded = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        drafts = judge.generate(padded, attention_mask=mask, max_new_tokens=steps, do_sample=False, pad_token_id=0)
    rows = drafts[:, length:].tolist()
    return [greedy(folder, prompt, steps, draft=row) for prompt, row in zip(prompts, rows, strict=True)]


async def greedy_aside(folder: Path, prompt: list[int], steps: int, draft: Sequence[int] = ()) -> list[int]:
    """Return `greedy` of it, from a thread: a console that answers no pings meanwhile would lose its link."""
    return await asyncio.to_thread(greedy, folder, prompt, steps, draft=draft)


def _further(folder: Path, ids: list[int], steps: int, dtype: str, draft: Sequence[int]) -> list[int]:
    judge = model(folder, dtype)
    with torch.inference_mode():
        answer = judge(torch.tensor([[*ids, *draft]]), use_cache=True)
        found = _agreed(answer.logits[0, len(ids) - 1 :].argmax(dim=-1).tolist(), draft)[:steps]
        past = _cropped(answer.past_key_values, len(draft) + 1 - len(found))
        while len(found) < steps:
            answer = judge(torch.tensor([[found[-1]]]), past_key_values=past, use_cache=True)
            found.append(int(answer.logits[0, -1].argmax()))
    return found


def _agreed(best: list[int], draft: Sequence[int]) -> list[int]:
    """Return the tokens of `best`, each of which follows those of `draft` before it, up to the first other one."""
    right = next((place for place, token in enumerate(draft) if token != best[place]), len(draft))
    return best[: right + 1]


def _cropped(past: Any, spare: int) -> Any:
    """Return transformers' cache without its last `spare` tokens."""
    if spare:
        past.crop(-spare)
    return past


def sampled(
    folder: Path, prompt: list[int], steps: int, params: SamplingParams, draft: Sequence[int] = ()
) -> list[int]:
    """Return `steps` tokens after `prompt` by transformers' logits in float64 and the kernels' sampling of one row.

    `draft`: as for `greedy`.
    """
    judge = model(folder, "float64")
    with torch.inference_mode():
        answer = judge(torch.tensor([[*prompt, *draft]]), use_cache=True)
        logits = answer.logits[0, len(prompt) - 1 :]
        best = [_sample(row, prompt, draft[:place], params) for place, row in enumerate(logits)]
        found = _agreed(best, draft)[:steps]
        past = _cropped(answer.past_key_values, len(draft) + 1 - len(found))
        while len(found) < steps:
            answer = judge(torch.tensor([[found[-1]]]), past_key_values=past, use_cache=True)
            found.append(_sample(answer.logits[0, -1], prompt, found, params))
    return found


def _sample(logits: torch.Tensor, prompt: list[int], output: Sequence[int], params: SamplingParams) -> int:
    """Return the token that follows `output`, of one row of logits."""
    adjustment = Adjustment(
        np.array(prompt), np.array(output, np.int64), params.min_p, params.presence_penalty,
        params.frequency_penalty, params.repetition_penalty, params.logit_bias or {}, params.bad_words_ids,
        params.allowed_token_ids,
    )  # fmt: skip
    inputs = SamplingInputs(
        [params.temperature], [params.top_p], [params.top_k], [params.seed or 0], [0], [len(prompt) + len(output)],
        adjustments={0: adjustment},
    )  # fmt: skip
    return int(sampling.sample(logits.unsqueeze(0), inputs).tokens)


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
