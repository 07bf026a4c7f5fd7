"""A scheduler whose host cache alone has the blocks of a prompt, and its load."""

from ppengine.core.scheduler.cache_copies import HostLimits
from scheduler_world import World

LIMITS = HostLimits(out_blocks=2, in_blocks=2, least_tokens=8)
PROMPT = list(range(10, 31))
"""Five full blocks and one token."""
VERBS = [("abort",), ("preempt", "recompute", False), ("preempt", "swap", True), ("swap_out", False)]


def world_of(limits=LIMITS, **fields):
    fields = {"stages": 1, "num_blocks": 14, "num_host_blocks": 24, **fields}
    return World(host_cache=limits, max_num_batched_tokens=64, **fields)


def evicted(**fields):
    """Return a world whose host cache alone has the blocks of `PROMPT`."""
    world = world_of(**fields)
    world.add(PROMPT, max_tokens=1, seed=1)
    world.run()
    world.scheduler.blocks.device.drop_cache()
    assert world.scheduler.blocks.copies.cache.cached == 5
    return world


def begin(world, **fields):
    """Add the prompt once more and send its first copies; return the requests."""
    group = world.add(PROMPT, seed=1, **fields)
    world.schedule()
    assert group[0].state == "loading"
    return group


def finish(world):
    world.run()
    world.verify_end()
