"""The outside judge: transformers with the same checkpoint, greedy, one prompt at a time."""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def prompts(count: int, vocab: int, *, low: int = 3, high: int = 40, seed: int = 0) -> list[list[int]]:
    """Return random prompts of `low` to `high` token ids."""
    source = random.Random(seed)
    return [[source.randrange(4, vocab) for _ in range(source.randint(low, high))] for _ in range(count)]


@lru_cache(maxsize=8)
def model(folder: Path, dtype: str) -> Any:
    """Return the reference model of a checkpoint."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def greedy(folder: Path, prompt: list[int], steps: int, dtype: str = "float64") -> list[int]:
    """Return `steps` greedy tokens after `prompt`, end of sequence ignored, the whole sequence recomputed each time."""
    judge = model(folder, dtype)
    ids = list(prompt)
    with torch.inference_mode():
        past = None
        fresh = torch.tensor([ids])
        for _ in range(steps):
            answer = judge(fresh, past_key_values=past, use_cache=True)
            past = answer.past_key_values
            ids.append(int(answer.logits[0, -1].argmax()))
            fresh = torch.tensor([[ids[-1]]])
    return ids[len(prompt) :]


def log_probabilities(folder: Path, prompt: list[int], output: list[int], dtype: str = "float64") -> torch.Tensor:
    """Return [len(output), vocab]: log-probabilities before each output token, teacher-forced in `dtype`."""
    judge = model(folder, dtype)
    with torch.inference_mode():
        logits = judge(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.double(), -1)
