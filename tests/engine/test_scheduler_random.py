"""Long random runs: full caches, slots and blocks that are used many times.

Beyond `test_scheduler_machine`, they have stop tokens, minimum tokens and dry runs.
"""

import pytest
from scheduler_world import STATES, Driver

RARE = ("shrink superseding", "shrink moves", "shrink swaps", "shrink recomputes", "lose a stage")


@pytest.mark.parametrize(
    ("stages", "preemption", "ahead"),
    [(1, "swap", False), (2, "recompute", True), (3, "swap", True), (4, "recompute", False)],
)
def test_ten_thousand_operations_of_one_life(stages, preemption, ahead):
    driver = Driver(stages, stages=stages, schedule_ahead=ahead, preemption=preemption)
    for number in range(30_000):
        if number >= 10_000 and all(driver.counts[what] for what in RARE):
            break  # Sets have no order: one run in some hundred needs more steps for the rarest.
        driver.step()
    driver.finish()
    world = driver.world
    assert set(world.left) == set(STATES)
    assert world.max_in_flight == world.scheduler.depth
    assert (world.two_unretired > 0) == ahead
    for what in RARE:
        assert driver.counts[what], f"{what} never happened"
