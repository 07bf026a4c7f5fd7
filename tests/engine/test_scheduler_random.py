"""Random operations against stages whose blocks remember their content; see `stage_model`."""

from collections import Counter

import pytest
from scheduler_world import Driver


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_ten_thousand_operations(stages, ahead, preemption):
    driver = Driver(stages, stages=stages, schedule_ahead=ahead, preemption=preemption)
    for _ in range(10_000):
        driver.step()
    driver.finish()
    world = driver.world
    assert set(world.seen_states) >= {"waiting", "running", "swapped", "held", "loading"}
    assert world.max_in_flight == world.scheduler.depth
    assert (world.two_unretired > 0) == ahead
    print(sorted(driver.counts.items()), world.model.reads, Counter(e.state for e in world.effects))
