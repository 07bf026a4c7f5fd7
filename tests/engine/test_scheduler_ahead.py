"""Scheduling ahead keeps stages busy: no step needs the token of the step before it."""

from __future__ import annotations

import itertools
import random
from collections import deque

import pytest
from ppengine.common.profile_sections import SchedulerConfig
from ppengine.core.scheduler import Scheduler
from ppengine.core.scheduler.request import Request
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.steps import TOKEN_ON_DEVICE, Sampled, Step


def steps_of(stages: int, seed: int, rounds: int) -> list[Step]:
    """Return the steps of requests that arrive at once, some with prompts of several chunks."""
    source = random.Random(seed)
    config = SchedulerConfig(max_num_batched_tokens=64, schedule_ahead=True)
    scheduler = Scheduler(
        config, stages=stages, block_size=16, max_model_len=512, num_blocks=1000, num_host_blocks=0,
        eos_token_ids=frozenset(),
    )  # fmt: skip
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    for index in range(8 * stages):
        prompt = [source.randrange(100) for _ in range(source.randint(3, 90))]
        scheduler.admit([Request(id=f"r{index}", prompt_ids=prompt, sampling=params, seed=1)])
    flights: deque[Step] = deque()
    steps: list[Step] = []
    for _ in range(rounds):
        while (step := scheduler.schedule()) is not None:
            flights.append(step)
            steps.append(step)
        step = flights.popleft()
        scheduler.retire(step.number, [Sampled(row.slot, 7) for row in step.rows if row.sample])
    return steps


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_neighbouring_steps_share_no_request(stages: int, seed: int) -> None:
    decodes = [{row.slot for row in step.rows} for step in steps_of(stages, seed, 60 * stages)]
    steady = decodes[len(decodes) // 2 :]
    assert all(len(rows) == 8 for rows in steady)
    assert all(before.isdisjoint(after) for before, after in itertools.pairwise(steady))


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_no_step_keeps_the_first_stage_waiting_for_a_round_trip(stages: int, seed: int) -> None:
    """A step needs only tokens sampled one step per stage earlier, beside prompts too."""
    sampled: dict[int, int] = {}
    mixed = 0
    for step in steps_of(stages, seed, 60 * stages):
        waits = [row for row in step.rows if row.token == TOKEN_ON_DEVICE]
        mixed += bool(waits) and len(waits) < len(step.rows)
        assert all(step.number - sampled[row.slot] >= stages for row in waits)
        sampled.update({row.slot: step.number for row in step.rows if row.sample})
    assert mixed > 3, "no step had decodes beside chunks"


def test_a_request_alone_is_scheduled_ahead() -> None:
    """It waits for its token on the first stage, since nothing else can run."""
    config = SchedulerConfig(schedule_ahead=True)
    scheduler = Scheduler(
        config, stages=4, block_size=16, max_model_len=512, num_blocks=100, num_host_blocks=0, eos_token_ids=frozenset()
    )
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    scheduler.admit([Request(id="alone", prompt_ids=[1, 2, 3], sampling=params, seed=1)])
    assert [len(step.rows) for step in iter(scheduler.schedule, None)] == [1, 1]
