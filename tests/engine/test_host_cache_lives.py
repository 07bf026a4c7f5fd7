"""Scheduler, host cache and store desk together, as hypothesis draws them; the checks are those of `World`.

Prompts begin alike and the device is small, so that prefixes leave it and come back from the host.
Hypothesis draws the engine and the seed of its life: drawn one by one, most operations were the same
in many lives.
"""

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from ppengine.core.scheduler.cache_copies import HostLimits
from scheduler_world import STATES, Driver

LIVES = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
OPERATIONS = 1500
LIMITS = [HostLimits(1, 1, 4), HostLimits(3, 2, 4), HostLimits(2, 8, 12), HostLimits(2, 1, 4, 5)]
drivers: list[Driver] = []


@LIVES
@given(
    seed=st.integers(0, 2**32), stages=st.integers(1, 4), ahead=st.booleans(),
    preemption=st.sampled_from(["recompute", "swap"]), num_blocks=st.sampled_from([14, 20, 32]),
    num_host_blocks=st.sampled_from([4, 12, 24, 60]), seqs=st.sampled_from([1, 4, 8]),
    budget=st.sampled_from([1, 6, 32]), host_cache=st.sampled_from(LIMITS),
)  # fmt: skip
def live(seed, stages, ahead, preemption, num_blocks, num_host_blocks, seqs, budget, host_cache):
    """Live one life to its end: no request waits for ever, no slot and no block is lost, and no token is wrong."""
    driver = Driver(
        seed, stages=stages, schedule_ahead=ahead, preemption=preemption, num_blocks=num_blocks,
        num_host_blocks=num_host_blocks, max_num_seqs=seqs, max_num_batched_tokens=budget, host_cache=host_cache,
    )  # fmt: skip
    for _ in range(OPERATIONS):
        driver.step()
    driver.finish()
    drivers.append(driver)


@pytest.mark.timeout(600)  # Operations are its bound: they take 15 s of a core.
def test_lives_with_a_host_cache():
    drivers.clear()
    live()
    counts, left = Counter(), Counter()
    for driver in drivers:
        counts.update(driver.counts)
        left.update(driver.world.left)
    for state in (*STATES, "finding", "fetching"):
        assert left[state] >= 10, f"{state} is reached and left again"
    for what in ("lose a stage", "shrink", "find", "fetch", "answer", "give_up"):
        assert counts[what] >= 10, f"{what} never happened"
    copies = [driver.world.scheduler.blocks.copies for driver in drivers]
    assert sum(each.out_total for each in copies) > 1000, "blocks copied to the host cache"
    assert sum(each.in_total for each in copies) > 300, "blocks loaded from it"
    assert sum(each.cache.evicted_total for each in copies) > 100, "slots reused"
    assert sum(each.dropped_total for each in copies) > 10, "blocks that left the device first"
    assert sum(each.totals.backends["nvme0"] for each in copies) > 100, "tokens of backends"
    assert sum(driver.world.desk.late for driver in drivers) > 10, "fetches whose request had gone"
    assert sum(driver.world.scheduler.fences.swaps_total for driver in drivers) > 20, "swaps beside them"
