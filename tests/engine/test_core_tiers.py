"""The host cache in a core: figures of reports and requests, a core that follows, and profiles that cannot be."""

from __future__ import annotations

import msgspec
import pytest
from core_world import CoreWorld
from ppengine.common.config import Profile
from ppengine.common.profile_sections import MemoryConfig, ModelConfig, SchedulerConfig
from ppengine.common.tier_config import TierConfig
from ppengine.core.scheduler.retirement import Retirement
from ppengine.protocol.control import Inspect, Inspected
from ppengine.protocol.inspection import RequestDetail
from ppengine.protocol.metrics import MetricsQuery
from ppengine.protocol.tiers import PromptSources
from ppengine.protocol.verbs import Abort, Many, Preempt, Priority
from test_core_successor import follow

TIERS = TierConfig(host=True, least_tokens=8)
PROMPT = [7] * 33
"""Four blocks and one token."""


def again() -> CoreWorld:
    """Return a world where a prompt whose prefix had left the device runs once more."""
    world = CoreWorld(tiers=TIERS)
    world.submit(PROMPT, max_tokens=1)
    world.run()
    world.scheduler.blocks.device.drop_cache()
    world.submit(PROMPT, name="again", max_tokens=8)
    world.run(2)
    return world


def detail(world: CoreWorld, name: str) -> RequestDetail:
    answer = world.engine.details.answer(Inspect(nonce=1, what="request", request=name))
    assert isinstance(answer, Inspected)
    return msgspec.msgpack.decode(answer.data, type=RequestDetail)


def test_a_report_has_the_figures_of_the_host_cache() -> None:
    world = again()
    report = world.engine.reporter.build()
    tiers, block_bytes = report.tiers, world.memory.capacity.block_bytes
    assert tiers is not None
    assert (tiers.slots, tiers.slots_cached, tiers.slots_swapped, tiers.slots_moving) == (50, 4, 0, 0)
    assert (tiers.slot_bytes, tiers.out_bytes_total, tiers.in_bytes_total) == (
        block_bytes, 4 * block_bytes, 4 * block_bytes,
    )  # fmt: skip
    assert (tiers.prompt_tokens_total, tiers.host_hit_tokens_total, tiers.computed_tokens_total) == (66, 32, 34)
    assert report.prefix_hit_tokens_total == 32
    (request,) = report.requests
    assert request.sources == PromptSources(host=32, computed=1)
    assert detail(world, "again").sources == request.sources
    world.run()
    assert detail(world, "again").sources == PromptSources(host=32, computed=1), "after its end, too"


def test_metrics_count_the_copies_of_the_host_cache_with_those_of_swaps() -> None:
    world = again()
    world.now += 0.5
    answer, block_bytes = world.engine.metrics.answer(MetricsQuery(nonce=1)), world.memory.capacity.block_bytes
    for copies in (answer.swap_out, answer.swap_in):
        assert copies is not None
        assert copies.bytes == 4 * block_bytes and copies.requests >= 1 and copies.seconds >= 0
    record = Retirement(9, copied_in=3)
    world.engine.metrics.copied(record, world.now - 0.25)
    later = world.engine.metrics.answer(MetricsQuery(nonce=2))
    assert later.swap_out == answer.swap_out and later.swap_in is not None and answer.swap_in is not None
    assert later.swap_in.bytes == 7 * block_bytes and later.swap_in.requests == answer.swap_in.requests + 1
    assert later.swap_in.seconds == pytest.approx(answer.swap_in.seconds + 0.25)


def test_without_a_host_cache_a_report_has_no_tiers() -> None:
    world = CoreWorld()
    world.submit(PROMPT, name="r", max_tokens=8)
    world.run(2)
    report = world.engine.reporter.build()
    assert report.tiers is None
    assert report.requests[0].sources is None


def aside() -> CoreWorld:
    """Return a world with two requests that are set aside, and one that waits."""
    world = CoreWorld(tiers=TIERS)
    for name in ("a", "b", "c"):
        world.scheduler.pause("eve", finish=False)
        world.submit(PROMPT, name=name, max_tokens=4)
    queues = world.scheduler.queues
    queues.set_aside(queues.requests["a"], "finding")
    queues.set_aside(queues.requests["b"], "fetching")
    return world


def test_requests_set_aside_are_in_reports_and_verbs_reach_them() -> None:
    world = aside()
    report = world.engine.reporter.build()
    assert [(each.id, each.state) for each in report.requests] == [
        ("a", "finding"), ("b", "fetching"), ("c", "waiting")
    ]  # fmt: skip
    assert (report.queues.waiting, report.queues.finding, report.queues.fetching) == (1, 1, 1)
    world.say(Many(verbs=[Priority(request=name, priority=3) for name in "abc"]))
    world.say(Preempt(request="a", hold=True))
    world.say(Abort(request="b"))
    states = {name: (each.state, each.priority) for name, each in world.scheduler.queues.requests.items()}
    assert states == {"a": ("held", 3), "c": ("waiting", 3)}
    world.check()


def test_a_core_that_follows_lets_requests_wait_that_were_set_aside_or_loading() -> None:
    world = aside()
    after = follow(world, tiers=TIERS)
    assert {each.state for each in after.scheduler.queues.requests.values()} == {"waiting"}
    world = CoreWorld(tiers=TierConfig(host=True, least_tokens=8, in_mib=1e-4))
    world.submit(PROMPT, max_tokens=1)
    world.run()
    world.scheduler.blocks.device.drop_cache()
    world.submit(PROMPT, name="again", max_tokens=8)
    assert world.scheduler.queues.requests["again"].state == "waiting"
    world.engine.advance()
    assert world.scheduler.queues.requests["again"].state == "loading"
    after = follow(world, tiers=TIERS)
    after.run()
    assert len(after.tokens("again")) == 8
    after.check()


def test_a_core_that_follows_goes_on_with_the_sources_of_prompts() -> None:
    """Device hits are the rest of all hits: counts of the others that begin at 0 would add theirs to it."""
    world = again()
    world.scheduler.blocks.copies.totals.backends["shared"] += 5

    def counts(of: CoreWorld) -> tuple[int, ...]:
        answer = of.engine.metrics.answer(MetricsQuery(nonce=1))
        return answer.prefix_hit_tokens, answer.host_hit_tokens, answer.backend_hit_tokens

    before, report = counts(world), world.engine.reporter.build()
    assert before == (32, 32, 5)
    after = follow(follow(world, tiers=TIERS, meet=False), tiers=TIERS)
    assert counts(after) == before
    tiers, known = after.engine.reporter.build().tiers, report.tiers
    assert tiers is not None and known is not None and tiers.prompt_tokens_total == known.prompt_tokens_total == 66


def test_a_core_that_follows_goes_on_with_the_counts_of_the_host_cache() -> None:
    world = again()
    copies = world.scheduler.blocks.copies
    copies.cache.evicted_total, copies.dropped_total = 3, 4

    def counts(of: CoreWorld) -> tuple[int, ...]:
        tiers = of.engine.reporter.build().tiers
        assert tiers is not None
        return tiers.out_bytes_total, tiers.in_bytes_total, tiers.evicted_total, tiers.dropped_total

    before = counts(world)
    assert before[0] > 0 and before[1] > 0 and before[2:] == (3, 4)
    assert counts(follow(follow(world, tiers=TIERS, meet=False), tiers=TIERS)) == before


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"scheduler": SchedulerConfig(prefix_caching=False)}, "scheduler.prefix_caching is false"),
        ({"memory": MemoryConfig(swap_space_gib=0)}, "memory.swap_space_gib is 0"),
    ],
)
def test_a_host_cache_needs_host_memory_and_digests(section: dict[str, msgspec.Struct], text: str) -> None:
    with pytest.raises(ValueError, match=f"{text}; tiers.host needs it"):
        Profile(name="t", model=ModelConfig(path="m"), tiers=TIERS, **section)  # type: ignore[arg-type]
