"""The requests of a benchmark: the same ones for every side of a comparison."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from ppengine.common.config import ConfigError


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen; a temperature of 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0


GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt (token ids) and how many tokens to add to it."""

    prompt: list[int]
    output_len: int
    sampling: Sampling = GREEDY


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    output_len: int | None = None


def random_jobs(
    vocab: int, requests: int, low: int, high: int, output_len: int, seed: int, number: int = 0
) -> list[Job]:
    """Return `requests` prompts of uniform length `low` to `high` and random ids.

    Each `number` has ids of its own with the same lengths: as much work, and nothing of it in a prefix cache.
    """
    lengths, ids = random.Random(seed), random.Random(f"{seed} {number}")
    return [
        Job([ids.randrange(4, vocab) for _ in range(lengths.randint(low, high))], output_len) for _ in range(requests)
    ]


def file_jobs(path: Path, output_len: int, encode: Callable[[str], list[int]]) -> list[Job]:
    """Return the jobs of a JSON-lines file: `prompt` or `prompt_token_ids`, and perhaps `output_len`, a line.

    `encode` is called for texts alone. Raises ConfigError naming the line that cannot be used.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    jobs = []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = msgspec.json.decode(text, type=_Line)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path}:{number}: {error}") from None
        ids = line.prompt_token_ids or (encode(line.prompt) if line.prompt else None)
        if not ids:
            raise ConfigError(f"{path}:{number}: give a prompt or prompt_token_ids")
        jobs.append(Job(ids, line.output_len or output_len))
    if not jobs:
        raise ConfigError(f"{path} holds no prompt")
    return jobs


def of_round(jobs: list[Job], number: int, vocab: int) -> list[Job]:
    """Return `jobs` for round `number`: behind round 0 the first token of each prompt is another one.

    So a round is as much work, and finds none of its prompts in a prefix cache. Prompts that begin alike still do.
    """
    if not number:
        return jobs
    return [replace(job, prompt=[(job.prompt[0] + number) % vocab, *job.prompt[1:]]) for job in jobs]
