"""The store desk in a core whose stores the test answers for."""

import msgspec
import pytest
from ppengine.common.tier_config import BackendConfig
from ppengine.protocol.control import Inspect
from ppengine.protocol.inspection import FinishedDetail
from ppengine.protocol.offline import AddMany
from ppengine.protocol.place import Place
from ppengine.protocol.reports import NODE_LOST, ProcessInfo, ProcessReport
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.store_messages import Fetch, Find, FoundChunk, Mark, Put, Stored, StoreReady, Weights
from ppengine.protocol.tiers import PromptSources
from ppengine.protocol.verbs import Abort, Submit
from tier_world import CHUNK, Disk, TierWorld

PROMPT = [3 + number % 90 for number in range(3 * CHUNK + 10)]
A, B = Place(0, 0), Place(1, 0)


def filled(**fields):
    """Return a disk with the three chunks of PROMPT."""
    world = TierWorld(**fields)
    world.fill(PROMPT)
    world.check_tiers()
    assert len(world.disk.markers) == 3
    return world.disk


def test_chunks_of_a_prompt_come_back_from_a_backend():
    world = TierWorld(disk=filled())
    world.submit(PROMPT, name="r", max_tokens=1)
    assert world.state("r") == "finding"
    world.answer_all(Find)
    assert world.state("r") == "fetching"
    world.answer_all(Fetch)
    detail = world.engine.outputs.get("r").samples[0].ending
    assert detail is not None
    assert world.scheduler.blocks.copies.totals.backends["nvme0"] == 3 * CHUNK
    assert world.scheduler.blocks.copies.totals.computed == 10
    world.check_tiers()
    assert not world.cache.moving


def test_a_prompt_whose_chunks_are_known_needs_no_question():
    world = TierWorld(disk=filled())
    world.submit(PROMPT, name="r", max_tokens=1)
    world.answer_all()
    world.lose_stage()
    assert not world.cache.cached
    world.submit(PROMPT, name="s", max_tokens=1)
    assert world.state("s") == "fetching"
    assert not world.jobs(Find)
    world.answer_all()
    assert world.scheduler.blocks.copies.totals.backends["nvme0"] == 6 * CHUNK
    world.check_tiers()


def test_requests_that_a_lost_stage_has_set_back_are_looked_for_again():
    world = TierWorld(disk=filled())
    world.submit(PROMPT, name="r", max_tokens=4)
    world.answer_all()
    assert world.scheduler.blocks.copies.totals.backends["nvme0"] == 3 * CHUNK
    world.submit(PROMPT[:600], name="s", max_tokens=400)
    for _ in range(3):
        world.engine.advance()
    assert world.state("s") == "running"
    world.lose_stage()
    assert world.state("s") == "fetching", "the slots of the host are empty"
    world.answer_all()
    assert len(world.tokens("s")) == 400
    assert world.scheduler.blocks.copies.totals.backends["nvme0"] == 5 * CHUNK
    world.check_tiers()


def test_each_lookup_is_counted_with_its_duration():
    world = TierWorld(disk=filled())
    lookups, began = world.engine.requests.metrics.histograms["lookup"], world.now
    for name in ("r", "s"):
        world.submit(PROMPT if name == "r" else [5] * len(PROMPT), name=name, max_tokens=1)
        assert world.state(name) == "finding"
        world.now += 0.03
        world.answer_all(Find)
    counts = lookups.wire()
    assert sum(counts.counts) == 2 and 0.06 <= counts.sum <= world.now - began


def test_a_prompt_of_which_no_chunk_is_there_waits_for_one_question():
    world = TierWorld()
    world.submit(PROMPT[:400], name="r", max_tokens=1)
    assert [len(job.keys) for store, _ in world.jobs(Find) for job in store.jobs.values()] == [1]
    world.answer_all(Find)
    assert world.engine.outputs.get("r").samples[0].finish_reason == "length"
    world.submit(PROMPT[:300], name="s", max_tokens=1)
    assert not world.jobs(Find), "its chunk is on the device"


def test_short_prompts_and_engines_without_backends_ask_nothing():
    world = TierWorld()
    world.submit(PROMPT[:256], name="r", max_tokens=1)
    assert not world.jobs(), "the last token is computed, so this has no whole chunk"
    world = TierWorld(backends={}, stores=False, slot_bytes=0)
    world.submit(PROMPT, name="r", max_tokens=1)
    world.run()
    assert world.engine.outputs.get("r").samples[0].finish_reason == "length"
    assert world.engine.tiers.state() is None
    assert world.engine.tiers.next_deadline is None


def test_a_question_without_an_answer_ends_at_its_deadline():
    world = TierWorld(disk=filled())
    world.submit(PROMPT, name="r", max_tokens=1)
    world.run()
    world.submit([5] * 20, name="short", max_tokens=1)
    world.run()
    assert world.engine.outputs.get("short").samples[0].finish_reason == "length", "others go on meanwhile"
    world.now += 0.1
    world.run()
    assert world.engine.outputs.get("r").samples[0].finish_reason == "length"
    ((store, number),) = world.jobs(Find)
    assert store.cancelled == [number]
    store.answer(number)
    assert world.engine.tiers.known.lookup([], {"nvme0"}).ends
    assert len(world.engine.tiers.known) == 3, "a late answer is good for later requests"


def test_stores_that_never_answer_are_asked_seldom():
    world = TierWorld(write="evicted")
    for number in range(10):
        world.submit([number] * 300, max_tokens=1)
        world.now += 0.1
        world.run()
    assert len(world.jobs(Find)) == 3
    world.now += 2.0
    for store in world.stores.values():
        store.figures()
    world.submit([50] * 300, max_tokens=1)
    assert len(world.jobs(Find)) == 4


def fetching(**fields):
    """Return a world in which `r` is fetching three chunks, and its stores' jobs."""
    world = TierWorld(disk=filled())
    world.submit(PROMPT, name="r", max_tokens=1)
    for store, number in world.jobs(Find):
        store.answer(number)
    world.run()
    assert world.state("r") == "fetching"
    return world, {store.place: (store, number) for store, number in world.jobs(Fetch)}


def test_a_late_fetch_keeps_its_slots_until_the_store_has_answered():
    world, jobs = fetching()
    first, number = jobs[A]
    first.answer(number)
    world.now += 2.0
    world.run()
    assert world.engine.outputs.get("r").samples[0].finish_reason == "length"
    assert world.cache.quarantined == 3 * CHUNK // 8
    assert world.engine.reporter.build().tiers.slots_quarantined == 3 * CHUNK // 8
    second, number = jobs[B]
    assert second.cancelled == [number]
    second.answer(number)
    assert not world.cache.moving
    assert world.engine.tiers.fetcher.failed_total == 1
    world.check_tiers()


def test_a_dead_store_ends_the_fetch_at_once():
    world, jobs = fetching()
    world.kill(B)
    world.run()
    assert world.engine.outputs.get("r").samples[0].finish_reason == "length"
    assert world.cache.quarantined, "the other store may still write"
    store, number = jobs[A]
    store.answer(number)
    assert not world.cache.moving
    assert not [event for event in world.events if event.kind.startswith("store")], "the gateway says it"
    assert world.engine.tiers.links.why_not_ready == "the store of stage 1 has not come"
    world.start(B)
    assert world.engine.tiers.ready
    world.check_tiers()


def test_a_store_that_was_restarted_owes_nothing():
    world, jobs = fetching()
    world.kill(B, reported=False)
    world.start(B)
    jobs[A][0].answer(jobs[A][1])
    world.run()
    assert not world.cache.moving
    assert world.engine.outputs.get("r").samples[0].finish_reason == "length"
    world.submit(PROMPT + [9] * CHUNK, name="s", max_tokens=1)
    world.answer_all()
    world.check_tiers()


def test_the_figures_of_an_end_have_the_sources_of_the_prompt():
    world, jobs = fetching()
    for store, number in jobs.values():
        store.answer(number)
    world.run()
    answer = world.engine.details.answer(Inspect(nonce=1, what="finished"))
    (info,) = msgspec.msgpack.decode(answer.data, type=FinishedDetail).requests
    assert info.sources == PromptSources(backends={"nvme0": 3 * CHUNK}, computed=10)
    (event,) = (event for event in world.events if event.kind == "request.finished")
    assert event.finished.sources == info.sources, "the record of the last hour has it from there"


def test_the_prefix_that_all_places_have_is_kept():
    world, jobs = fetching()
    jobs[A][0].answer(jobs[A][1])
    jobs[B][0].answer(jobs[B][1], good=2, error="disk is gone")
    world.run()
    totals = world.scheduler.blocks.copies.totals
    assert (totals.backends["nvme0"], totals.computed) == (2 * CHUNK, CHUNK + 10)
    assert world.engine.tiers.fetcher.failed_total == 1
    history = world.engine.outputs.get("r").samples[0].ending.detail.history
    assert any("2 of 3 chunks from nvme0" in line and "stage 1: disk is gone" in line for line in history)
    world.check_tiers()


def test_a_corrupt_chunk_is_deleted_everywhere_and_written_again():
    world, jobs = fetching()
    key = jobs[B][0].jobs[jobs[B][1]].keys[1]
    jobs[A][0].answer(jobs[A][1])
    jobs[B][0].answer(jobs[B][1], good=1, error="the checksum of the shard is another one", corrupt=True)
    assert not [name for name in [*world.disk.markers, *world.disk.shards] if name[2] == key]
    (event,) = (event for event in world.events if event.kind == "store.corrupt")
    assert event.stage == 1 and key.hex()[:12] in event.text and "checksum" in event.text
    world.answer_all()
    assert world.scheduler.blocks.copies.totals.backends["nvme0"] == CHUNK
    world.now += 0.1
    world.run()
    world.answer_all()
    assert len(world.disk.markers) == 3
    world.check_tiers()


def test_a_chunk_that_this_engine_wrote_and_that_was_lost_is_written_again():
    world = TierWorld()
    world.submit(PROMPT, name="r", max_tokens=1)
    world.answer_all()
    world.now += 0.1
    world.run()
    world.answer_all()
    ((_, namespace, key), *_) = sorted(world.disk.markers)
    assert len(world.disk.markers) == 3
    del world.disk.markers["nvme0", namespace, key]
    world.engine.tiers.known.missed(key, "nvme0")
    world.submit(PROMPT, name="s", max_tokens=1)
    world.answer_all()
    world.now += 0.1
    world.run()
    world.answer_all()
    assert len(world.disk.markers) == 3
    world.check_tiers()


def test_a_marker_without_its_shard_is_deleted():
    disk = filled()
    gone = [name for name in disk.shards if name[3] == B][-1]
    del disk.shards[gone]
    world = TierWorld(disk=disk, write="evicted")
    world.submit(PROMPT, name="r", max_tokens=1)
    world.answer_all()
    assert len(disk.markers) == 2


def test_a_slow_backend_is_declined():
    world = TierWorld(disk=filled())
    world.engine.tiers.costs.token_s = 1e-4
    world.engine.tiers.costs.ended("nvme0", 32 * 10, 5.0)
    world.engine.tiers.costs.begun("nvme0", 0)
    world.submit(PROMPT, name="r", max_tokens=1)
    world.answer_all()
    info = world.engine.reporter.build().tiers.backends[0]
    assert (info.declined_total, info.hit_tokens_total) == (1, 0)
    history = world.engine.outputs.get("r").samples[0].ending.detail.history
    assert any("3 chunks in nvme0 are computed: 77 ms predicted" in line for line in history), history


def slow_backend():
    """Return a world whose backend is known to be too slow, and may be tried."""
    world = TierWorld(disk=filled())
    costs = world.engine.tiers.costs
    costs.token_s = 1e-4
    for size in (10, 40, 10, 40):
        costs.ended("nvme0", 32 * size, 5.0)
    return world


def test_chunks_of_a_slow_backend_are_read_beside_the_request():
    world = slow_backend()
    world.submit(PROMPT, name="r", max_tokens=1)
    world.answer_all(Find)
    assert world.engine.outputs.get("r").samples[0].ending is not None, "it has waited for no fetch"
    asked = world.jobs(Fetch)
    assert len(asked) == 2 and all(len(store.jobs[number].keys) == 2 for store, number in asked), "half of four threads"
    before = world.engine.tiers.costs.fetch_s({"nvme0": 32 * 8})
    moving = world.cache.moving
    assert moving >= 2 * CHUNK // 8
    world.answer_all(Fetch)
    assert world.cache.moving == moving - 2 * CHUNK // 8, "its slots are free again"
    assert world.engine.tiers.costs.fetch_s({"nvme0": 32 * 8}) < before
    world.lose_stage()
    world.submit(PROMPT, name="s", max_tokens=1)
    world.run()
    assert not world.jobs(Fetch), "no further trial for now"
    world.check_tiers()


def test_a_backend_is_measured_before_a_request_waits_for_it():
    world = TierWorld(disk=filled(), measured=False)
    world.submit(PROMPT, name="r", max_tokens=1)
    world.answer_all(Find)
    detail = world.engine.outputs.get("r").samples[0].ending.detail
    assert any("in nvme0 are computed" in line and "unknown for a fetch" in line for line in detail.history)
    assert {len(store.jobs[number].keys) for store, number in world.jobs(Fetch)} == {2}, "chunks are read beside it"
    world.submit(PROMPT, name="s", max_tokens=1)
    world.run()
    assert len(world.jobs(Fetch)) == 2, "one trial alone"
    world.answer_all()
    world.lose_stage()
    world.submit(PROMPT, name="t", max_tokens=1)
    world.answer_all()
    assert world.engine.reporter.build().tiers.backends[0].hit_tokens_total == 3 * CHUNK
    world.check_tiers()


def test_nothing_waits_before_the_time_of_computing_is_known():
    world = TierWorld(disk=filled())
    world.engine.tiers.costs.token_s = None
    world.submit(PROMPT, name="r", max_tokens=1)
    world.answer_all(Find)
    assert world.engine.outputs.get("r").samples[0].ending is not None and not world.jobs(Fetch)


def test_a_measured_backend_serves_while_another_one_is_measured():
    disk = filled()
    for copies in (disk.shards, disk.markers):
        copies.update({("new", *name[1:]): value for name, value in list(copies.items())})
    backends = {name: BackendConfig(kind="files", url=f"/{name}") for name in ("new", "nvme0")}
    world = TierWorld(disk=disk, backends=backends, measured=False)
    world.engine.tiers.costs.ended("nvme0", 1, 1e-6)
    for (backend, _, key), marker in disk.markers.items():
        world.engine.tiers.known.put(key, FoundChunk(backend, marker))
    world.submit(PROMPT, name="r", max_tokens=1)
    world.run()
    asked = {store.jobs[number].backend for store, number in world.jobs(Fetch)}
    assert asked == {"nvme0", "new"} and world.state("r") == "fetching"
    world.answer_all(Fetch)
    world.run()
    tiers = {one.name: one.hit_tokens_total for one in world.engine.reporter.build().tiers.backends}
    assert tiers == {"nvme0": 3 * CHUNK, "new": 0}
    world.check_tiers()


def test_a_trial_ends_with_its_generation():
    world = slow_backend()
    world.submit(PROMPT, name="r", max_tokens=1)
    world.answer_all(Find)
    asked = world.jobs(Fetch)
    world.lose_stage()
    assert world.cache.quarantined == 2 * CHUNK // 8
    for store, number in asked:
        store.answer(number)
    assert not world.cache.quarantined
    world.check_tiers()


def test_an_abort_ends_a_fetch():
    world, jobs = fetching()
    world.say(Abort(request="r"))
    world.run()
    assert not world.scheduler.queues.aside
    assert jobs[A][0].cancelled and jobs[B][0].cancelled
    assert world.cache.quarantined == 3 * CHUNK // 8
    for store, number in jobs.values():
        store.answer(number)
    assert not world.cache.moving


def test_a_new_generation_keeps_the_slots_of_older_fetches():
    world, jobs = fetching()
    world.lose_stage()
    assert world.engine.outputs.get("r").samples[0].finish_reason == "length"
    assert world.cache.quarantined == 3 * CHUNK // 8
    assert all(store.pool == world.generation for store, _ in jobs.values())
    for store, number in jobs.values():
        store.answer(number)
    assert not world.cache.moving
    world.check_tiers()


def test_two_requests_with_one_prefix_fetch_it_once():
    world, _ = fetching()
    world.submit(PROMPT[: 2 * CHUNK] + [7] * CHUNK + [8], name="s", max_tokens=1)
    world.answer_all(Find)
    assert world.scheduler.queues.aside[world.scheduler.queues.requests["s"]] == "behind the fetch of r"
    assert len(world.jobs(Fetch)) == 2
    world.answer_all()
    assert world.scheduler.blocks.copies.totals.computed == 10 + CHUNK + 1
    world.check_tiers()


def test_fetches_are_bounded_and_in_order_of_admission():
    disk, prompts = Disk(), [[number] * 300 for number in range(3, 7)]
    world = TierWorld(disk=disk)
    for prompt in prompts:
        world.fill(prompt)
    world = TierWorld(disk=disk, fetches=1)
    for number, prompt in enumerate(prompts):
        world.submit(prompt, name=f"r{number}", max_tokens=1)
    world.answer_all(Find)
    order = []
    while jobs := world.jobs(Fetch):
        assert len(jobs) == 2
        order += [name for name, why in ((one.id, why) for one, why in world.scheduler.queues.aside.items())
                  if not why.startswith("waits")]  # fmt: skip
        for store, number in jobs:
            store.answer(number)
        world.engine.advance()
    world.run()
    assert order == ["r0", "r1", "r2", "r3"]
    assert world.scheduler.blocks.copies.totals.backends["nvme0"] == 4 * CHUNK


def test_a_fetch_waits_for_slots_of_those_before_it():
    disk, prompts = Disk(), [[number] * (3 * CHUNK + 10) for number in (3, 4)]
    world = TierWorld(disk=disk)
    for prompt in prompts:
        world.fill(prompt)
    world = TierWorld(disk=disk, swap_blocks=200)
    for number, prompt in enumerate(prompts):
        world.submit(prompt, name=f"r{number}", max_tokens=1)
    for store, number in world.jobs(Find):
        store.answer(number)
    world.engine.advance()
    aside = {request.id: why for request, why in world.scheduler.queues.aside.items()}
    assert aside["r1"] == "waits for host slots of the fetches before it"
    assert len(world.jobs(Fetch)) == 2, "r0, on both places"
    world.answer_all()
    assert world.scheduler.blocks.copies.totals.backends["nvme0"] == 6 * CHUNK
    world.check_tiers()


def test_a_request_that_asks_says_about_what_and_for_how_long():
    world = TierWorld(disk=filled())
    world.submit(PROMPT, name="r", max_tokens=1)
    world.now += 0.04
    (request,) = world.engine.reporter.build().requests
    assert (request.state, request.why.text) == ("finding", "asks the store of stage 0 about 3 chunks, 40 of 100 ms")


def test_a_request_that_waits_says_for_what():
    world, jobs = fetching()
    jobs[A][0].answer(jobs[A][1])
    world.now += 0.084
    info = world.engine.reporter.build()
    (request,) = info.requests
    assert request.state == "fetching"
    assert request.why.text == "nvme0: 3 of 3 chunks, stage 1 last, 84 of 2000 ms"
    assert (info.tiers.finding, info.tiers.fetching) == (0, 1)
    assert [store.jobs for store in info.tiers.stores] == [0, 1]
    assert info.tiers.stores[1].lag_ms == pytest.approx(84.0)


def test_reused_chunks_are_written_at_their_second_use():
    world = TierWorld(write="reused")
    world.fill(PROMPT)
    assert not world.disk.markers
    world.fill(PROMPT[: 2 * CHUNK] + [1] * CHUNK)
    assert len(world.disk.markers) == 2


def test_evicted_chunks_are_written_before_their_slots_are_reused():
    world = TierWorld(write="evicted", swap_blocks=96)
    for number in range(3, 9):
        world.fill([number] * 300)
    assert world.cache.evicted_total
    assert len(world.disk.markers) >= 2
    other = TierWorld(disk=world.disk)
    other.submit([3] * 300, name="r", max_tokens=1)
    other.answer_all()
    assert other.scheduler.blocks.copies.totals.backends["nvme0"] == CHUNK


def test_a_put_that_fails_leaves_no_marker():
    world = TierWorld()
    world.submit(PROMPT, max_tokens=1)
    world.answer_all(Find)
    world.now += 0.1
    world.run()
    world.answer_all(Find)
    for store, number in world.jobs(Put):
        store.answer(number, error="no space" if store.place == B else "")
    assert not world.jobs(Mark)
    assert not world.disk.markers and not world.disk.shards
    assert world.engine.reporter.build().tiers.dropped_total == 3
    assert not world.cache._pins


def test_a_put_whose_stages_have_left_the_generation_gets_no_marker():
    """Its slots may have been emptied before they were read."""
    world = TierWorld()
    world.submit(PROMPT, max_tokens=1)
    world.answer_all(Find)
    world.now += 0.1
    world.run()
    world.answer_all(Find)
    puts = [(store, number, store.jobs[number]) for store, number in world.jobs(Put)]
    assert puts
    world.lose_stage()
    for store, number, put in puts:
        store.jobs.pop(number, None)
        store.say(Stored(*store.place, put.job, 99, b"sum", 1.0))
    world.run()
    assert not world.jobs(Mark) and not world.disk.markers
    assert not world.cache._pins


def test_weights_that_change_while_the_engine_runs_stop_the_backends():
    world = TierWorld()
    world.stores[A].say(Weights(b"other"))
    world.fill(PROMPT)
    assert not world.disk.markers
    assert "the weight files were changed" in world.engine.reporter.build().tiers.why_not_ready
    world.stores[A].say(Weights(b"", "weights cannot be read"))
    assert "the weight files were changed" in world.engine.reporter.build().tiers.why_not_ready
    world.stores[A].say(Weights(b"w"))
    assert not world.engine.reporter.build().tiers.why_not_ready
    world.fill(PROMPT)
    assert len(world.disk.markers) == 3


def test_a_prompt_whose_positions_are_scored_is_not_looked_for():
    world = TierWorld(disk=filled())
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=1)
    message = AddMany(nonce=1, session="s", submissions=[Submit(prompt_token_ids=PROMPT, sampling=sampling)])
    world.engine.offline.add_many(b"o", message)
    world.run()
    assert not world.jobs(Fetch) and world.scheduler.blocks.copies.totals.computed == len(PROMPT)


def test_nothing_is_asked_before_the_weights_are_known():
    world = TierWorld(weights=b"")
    world.submit(PROMPT, name="r", max_tokens=1)
    world.run()
    assert not world.jobs()
    assert world.engine.reporter.build().tiers.why_not_ready == "the weight files are being hashed"


def test_chunks_of_other_weights_are_never_found():
    disk = filled()
    world = TierWorld(disk=disk, weights=b"other")
    world.submit(PROMPT, name="r", max_tokens=1)
    world.answer_all(Find)
    assert not world.jobs(Fetch)


def test_silent_stores_are_left_alone():
    world = TierWorld(disk=filled())
    world.now += 6.0
    world.submit(PROMPT, name="r", max_tokens=1)
    world.run()
    assert not world.jobs()
    assert "has not answered for 6 s" in world.engine.reporter.build().tiers.why_not_ready


def test_a_backend_that_is_too_slow_for_days_rests_a_minute_at_most():
    """The back-off doubled a float a thousand times, and its overflow ended the core."""
    world = TierWorld(disk=filled())
    world.engine.tiers.finder._failures = 2000

    def asked(first, later):
        world.now += later
        for store in world.stores.values():
            store.figures()
        world.submit([first, *PROMPT], max_tokens=1)
        return world.jobs(Find)

    ((store, number),) = asked(7, 0.0)
    world.now += 0.2
    world.run()
    assert not world.engine.requests.live(), "it goes on without an answer"
    store.answer(number)
    assert not asked(8, 59.9) and asked(9, 0.2)


def test_a_core_that_follows_goes_on_with_backends_and_waits_for_the_stores():
    world, _ = fetching()
    world.engine.tiers.writer.dropped_total = 3
    world.engine.commit()
    older = world.stores
    after = TierWorld(disk=world.disk, before=world, stores=False, serve=False)
    assert after.engine.tiers.writer.dropped_total == 3
    after.drained(0, 1)
    after.ready()
    after.run()
    assert after.engine.tiers.links.weights == b"w"
    assert after.cache.moving == 640, "the stores may still write for the core before this one"
    assert after.engine.outputs.get("r").samples[0].finish_reason == "length"
    for place, store in older.items():
        after.content[place] = {}
        store.world, store.jobs, store.namespace, store.pool = after, {}, b"", 0
        after.stores[place] = store
        store.say(StoreReady(*place, store.pid))
    after.run()
    assert not after.cache.moving
    assert after.engine.tiers.ready


def test_cores_that_follow_count_the_tokens_of_a_backend_once():
    world = TierWorld(disk=filled())
    world.submit(PROMPT, name="r", max_tokens=1)
    world.answer_all()
    world.run()
    for _ in range(3):
        tiers = world.engine.reporter.build().tiers
        hits = tiers.backends[0].hit_tokens_total
        assert (hits, hits + tiers.computed_tokens_total) == (3 * CHUNK, tiers.prompt_tokens_total)
        world.engine.commit()
        world = TierWorld(disk=world.disk, before=world, stores=False, serve=False)
        world.drained(0, 1)
        world.ready()
        world.run()


def test_a_core_that_follows_waits_for_stores_of_other_nodes_whatever_is_said_of_those_before_them():
    world, _ = fetching()
    world.engine.commit()
    after = TierWorld(disk=world.disk, before=world, stores=False, serve=False)
    after.drained(0, 1)
    after.ready()
    after.run()
    places = after.engine.stages.places
    ends = [ProcessInfo(role=place.store_role, stage=None, rank=None, pid=9, exit_code=-9) for place in places]
    for end in ends:
        end.node = "b"
    after.engine.on_processes(ProcessReport(mono_ns=0, processes=ends))
    after.run()
    assert after.cache.moving == 640, "each may have a successor that writes for the core before this one"
    for end in ends:
        end.exit_code = NODE_LOST
    after.engine.on_processes(ProcessReport(mono_ns=0, processes=ends))
    after.run()
    assert not after.cache.moving


def test_a_pid_of_another_node_is_another_store():
    world, jobs = fetching()
    store, number = jobs[A]
    end = ProcessInfo(role=store.place.store_role, stage=None, rank=None, pid=store.pid, exit_code=-9, node="b")
    world.engine.on_processes(ProcessReport(mono_ns=0, processes=[end]))
    assert world.engine.tiers.links.records[A].pid == store.pid
    assert len(world.engine.tiers.jobs) and number in store.jobs


def test_a_chunk_that_is_there_is_not_written_again():
    """Stores that did not answer in time have it nevertheless."""
    world = TierWorld(disk=filled())
    before = dict(world.disk.markers)
    world.submit(PROMPT, name="r", max_tokens=1)
    world.now += 0.2
    world.run()
    assert world.engine.outputs.get("r").samples[0].finish_reason == "length"
    world.now += 0.1
    world.run()
    while finds := world.jobs(Find):
        for store, number in finds:
            store.answer(number)
        world.engine.advance()
    assert not world.jobs(Put)
    assert world.disk.markers == before
