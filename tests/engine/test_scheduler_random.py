"""Long random runs: full caches, slots and blocks that are used many times.

Beyond `test_scheduler_machine`, they have stop tokens, minimum tokens, dry runs, and tokens that grammars force.
"""

import pytest
from ppengine.core.scheduler.cache_copies import HostLimits
from scheduler_world import STATES, Driver

RARE = ("shrink superseding", "shrink moves", "shrink swaps", "shrink recomputes", "lose a stage")


def rarest(driver):
    """Return the numbers of operations and of figures of the host cache that a life must reach."""
    numbers, world = [driver.counts[what] for what in RARE], driver.world
    if (copies := world.scheduler.blocks.copies) is not None:
        numbers += [copies.out_total, copies.in_total, copies.dropped_total, copies.cache.evicted_total]
        numbers += [copies.totals.backends["nvme0"], world.desk.late]
    return numbers


@pytest.mark.parametrize(
    ("stages", "preemption", "ahead", "host_cache", "constrained"),
    [
        (1, "swap", False, None, True), (2, "recompute", True, HostLimits(2, 1, 4), False),
        (3, "swap", True, HostLimits(1, 2, 8), True), (4, "recompute", False, None, False),
    ],
)  # fmt: skip
def test_ten_thousand_operations_of_one_life(stages, preemption, ahead, host_cache, constrained):
    driver = Driver(
        stages, stages=stages, schedule_ahead=ahead, preemption=preemption, host_cache=host_cache,
        constrained=constrained, max_num_batched_tokens=9 if constrained else 24,
    )  # fmt: skip
    for number in range(30_000):
        if number >= 10_000 and all(rarest(driver)):
            break  # Sets have no order: one run in some hundred needs more steps for the rarest.
        driver.step()
    driver.finish()
    world = driver.world
    assert set(world.left) == {*STATES, *(("finding", "fetching") if host_cache else ())}
    assert min(rarest(driver)) > 0
    assert world.max_in_flight == world.scheduler.depth
    assert (world.two_unretired > 0) == ahead
    assert (world.forced > 100) == constrained
