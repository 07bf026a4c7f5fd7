"""Scheduling ahead keeps the stages busy: a step must not need the token of the step right before it."""

from __future__ import annotations

import itertools
import random
from collections import deque

import pytest
from ppengine.config import SchedulerConfig
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.steps import Sampled, Step
from ppengine.request import Request
from ppengine.scheduler import Scheduler


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_neighbouring_steps_share_no_request(stages: int, seed: int) -> None:
    source = random.Random(seed)
    config = SchedulerConfig(max_num_batched_tokens=64, schedule_ahead=True)
    scheduler = Scheduler(
        config, stages=stages, block_size=16, max_model_len=512, num_blocks=1000, num_host_blocks=0,
        eos_token_ids=frozenset(),
    )  # fmt: skip
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    for index in range(8 * stages):
        prompt = [source.randrange(100) for _ in range(source.randint(3, 90))]
        scheduler.add([Request(id=f"r{index}", prompt_ids=prompt, sampling=params, seed=1)])
    flights: deque[Step] = deque()
    decodes: list[set[int]] = []
    for _ in range(60 * stages):
        while (step := scheduler.schedule()) is not None:
            flights.append(step)
            decodes.append({row.slot for row in step.rows})
        step = flights.popleft()
        scheduler.retire(step.number, [Sampled(row.slot, 7) for row in step.rows if row.sample])
    steady = decodes[len(decodes) // 2 :]
    assert all(len(rows) == 8 for rows in steady)
    assert all(before.isdisjoint(after) for before, after in itertools.pairwise(steady))
