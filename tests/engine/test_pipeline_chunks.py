"""Prompt tokens of a step: few if few are left, so that a pipeline fills and drains soon."""

from __future__ import annotations

import pytest
from ppengine.core.scheduler import wait_reasons
from ppengine.core.scheduler.pipeline_chunks import FIXED_TOKENS, LEAST_TOKENS
from scheduler_world import World


def world(stages: int, most: int, **config: object) -> World:
    return World(
        stages=stages, max_num_batched_tokens=most, max_model_len=40_000, num_blocks=3000, block_size=64,
        max_num_seqs=300, checked=False, **config,
    )  # fmt: skip


def steps_of(world: World) -> list[int]:
    """Return the prompt tokens of each step until no prompt is left."""
    sizes = []
    for _ in range(1000):
        while (step := world.schedule()) is not None:
            sizes.append(sum(row.count for row in step.rows if row.count > 1))
        world.model.drain()
        if world.retire() is None:
            return [size for size in sizes if size]
    raise AssertionError("the prompts do not end")


def makespan(steps: list[int], stages: int) -> int:
    """Return the token times in which a pipeline of `stages` computes `steps`, one after the other."""
    ends = [0] * stages
    for tokens in steps:
        begun = 0
        for stage in range(stages):
            begun = ends[stage] = max(begun, ends[stage]) + tokens + FIXED_TOKENS
    return ends[-1]


def uniform(tokens: int, size: int) -> list[int]:
    return [min(size, tokens - begun) for begun in range(0, tokens, size)]


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("tokens", [700, 2_000, 12_000, 40_000 - 64])
def test_one_prompt_takes_about_as_long_as_in_the_best_equal_steps(stages: int, tokens: int) -> None:
    few = world(stages, 32_768)
    few.add([7] * tokens, max_tokens=1)
    steps = steps_of(few)
    assert sum(steps) == tokens
    sizes = range(LEAST_TOKENS, tokens + 64, 64)
    best = min(makespan(uniform(tokens, size), stages) for size in sizes)
    assert makespan(steps, stages) <= (1.1 if tokens > 2 * LEAST_TOKENS else 1.2) * best
    assert makespan(steps, stages) <= makespan([tokens], stages), "than as one step"


def test_one_stage_and_short_steps_are_as_the_profile_says() -> None:
    alone = world(1, 16_384)
    alone.add([7] * 12_000, max_tokens=1)
    assert steps_of(alone) == [12_000]
    short = world(4, 256)
    short.add([7] * 1_000, max_tokens=1)
    assert steps_of(short) == [256, 256, 256, 232]
    uncut = world(2, 16_384, chunked_prefill=False)
    uncut.add([7] * 12_000, max_tokens=1)
    assert steps_of(uncut) == [12_000]


def test_a_long_line_fills_steps() -> None:
    many = world(2, 4_096)
    for number in range(30):
        many.add([number + 9] * 3_000, max_tokens=1)
    steps = steps_of(many)
    assert set(steps[:-1]) == {4_096}


def test_tokens_that_the_prefix_cache_has_are_not_counted() -> None:
    shared = world(2, 32_768)
    begin = [number % 50 + 5 for number in range(6_400)]
    for round_ in range(2):
        for number in range(40):
            shared.add([*begin, *[60 + number + 100 * round_] * 64], max_tokens=1)
        steps = steps_of(shared)
    assert sum(steps) == 40 * 64, "the prefix is there"
    assert max(steps) < 1_280, "not one step for all"


def test_a_new_prompt_behind_cached_ones_begins_with_no_tiny_step() -> None:
    """Prompts that came before were nearly all in the cache, so that few tokens seem to be left of it."""
    shared = world(2, 32_768)
    for _ in range(60):
        shared.add([7] * 6_401, max_tokens=1)
        steps_of(shared)
    shared.add([8] * 6_400, max_tokens=1)
    steps = steps_of(shared)
    assert sum(steps) == 6_400
    assert min(steps[:-1]) >= LEAST_TOKENS


def test_decodes_come_on_top() -> None:
    beside = world(2, 4_096)
    for number in range(200):
        beside.add([number % 50 + 5] * 3, max_tokens=300, ignore_eos=True)
    for _ in range(4):
        beside.round()
    beside.add([9] * 1_280, max_tokens=1)
    (second,) = beside.add([8] * 100, max_tokens=1)
    step = beside.schedule()
    assert step is not None
    decodes = sum(row.count == 1 for row in step.rows)
    assert decodes >= 100
    assert sum(row.count for row in step.rows) == decodes + 704, "half of 1,380 tokens"
    why = wait_reasons.why(beside.scheduler, second)
    assert why.text == f"step full, {decodes + 704} tokens"
