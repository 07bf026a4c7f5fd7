"""Verbs on backends in a running core."""

import pytest
from ppengine.common.tier_config import BackendConfig
from ppengine.protocol.control import Accepted, Deferred, Outcome, Refused
from ppengine.protocol.place import Place
from ppengine.protocol.store_messages import Clear, Fetch, Find, Put, StoreReady
from ppengine.protocol.store_messages import Test as Probe
from ppengine.protocol.store_verbs import (
    StoreAdd,
    StoreClear,
    StoreDrain,
    StorePause,
    StoreRemove,
    StoreResume,
    StoreTest,
)
from tier_world import CHUNK, TierWorld

PROMPT = [3 + number % 90 for number in range(2 * CHUNK + 10)]


def plan(world, verb):
    """Return the lines of a plan."""
    return world.say(verb, dry_run=True)[-1].plan


def outcome(world, answers):
    """Return the outcome of a command, after a turn."""
    world.engine.advance()
    return world.last(answers[0].id)


def test_a_backend_is_added_live():
    world = TierWorld(backends={}, stores=True)
    assert world.engine.reporter.build().tiers.backends == []
    verb = StoreAdd(backend="nvme1", kind="valkey", url="redis://me:secret@h:1/0", quota_gib=2.0, write="always")
    planned = world.say(verb, dry_run=True)[-1]
    assert planned.plan == ["add nvme1: valkey at redis://me@h:1/0, 2 GiB, write always"]
    answers = world.say(verb)
    assert isinstance(answers[0], Accepted)
    world.engine.advance()
    (spec,) = world.stores[0, 0].specs.values()
    assert (spec.url, spec.quota_bytes) == ("redis://me:secret@h:1/0", 2**30), "each of two places gets half"
    for store in world.stores.values():
        store.figures()
    done = outcome(world, answers)
    assert (done.state, done.text) == ("applied", "nvme1 is open")
    world.fill(PROMPT)
    (info,) = world.engine.reporter.build().tiers.backends
    assert (info.name, info.url, info.state, info.quota_bytes) == ("nvme1", "redis://me@h:1/0", "open", 2 * 2**30)
    assert len(world.disk.markers) == 2
    assert isinstance(world.say(verb)[-1], Refused)


def test_a_backend_that_cannot_be_opened_is_kept_and_says_why():
    world = TierWorld(backends={})
    answers = world.say(StoreAdd(backend="x", kind="files", url="/no"))
    world.engine.advance()
    for store in world.stores.values():
        store.figures(state="broken", error="no such folder")
    done = outcome(world, answers)
    why, kept, *todo = done.text.split("; ")
    assert (done.state, why) == ("failed", "x cannot be opened: no such folder") and kept.startswith("it is kept")
    assert todo == ["when that is mended, store test x opens it", "store remove x forgets it"]
    world.submit(PROMPT, name="r", max_tokens=1)
    assert world.state("r") == "waiting"


def test_figures_of_a_removed_backend_say_nothing_of_one_that_gets_its_name():
    world = TierWorld()
    for store in world.stores.values():
        store.figures(errors=3)
    before = {store: store.changes for store in world.stores.values()}
    world.say(StoreRemove(backend="nvme0"))
    answers = world.say(StoreAdd(backend="nvme0", kind="files", url="/no"))
    for store, older in before.items():
        newer, store.changes = store.changes, older
        store.figures(errors=3)
        store.changes = newer
    assert isinstance(outcome(world, answers), Deferred), "those were of the older one"
    for store in world.stores.values():
        store.figures(state="broken", error="no such folder")
    done = outcome(world, answers)
    assert (done.state, done.text.split("; ")[0]) == ("failed", "nvme0 cannot be opened: no such folder")
    (info,) = world.engine.reporter.build().tiers.backends
    assert info.errors_total == 0


def test_a_backend_that_gets_the_name_of_a_removed_one_begins_at_zero():
    world = TierWorld()
    world.fill(PROMPT)
    world.lose_stage()
    world.submit(PROMPT, name="r", max_tokens=1)
    world.answer_all()
    world.run()
    tiers = world.engine.reporter.build().tiers
    assert tiers.backends[0].hit_tokens_total == 2 * CHUNK
    world.say(StoreRemove(backend="nvme0"))
    world.say(StoreAdd(backend="nvme0", kind="files", url="/other"))
    again = world.engine.reporter.build().tiers
    assert again.backends[0].hit_tokens_total == 0
    assert again.prompt_tokens_total == tiers.prompt_tokens_total, "those of the older one are `removed`"
    assert world.scheduler.blocks.copies.totals.backends.total() == 2 * CHUNK, "a counter never falls"


def test_the_plan_refuses_a_kind_that_a_store_cannot_open():
    world = TierWorld(backends={})
    refused = world.say(StoreAdd(backend="x", kind="tape"), dry_run=True)[-1]
    text = "the store of stage 0 has no backend of kind tape; it has memory, files, valkey, s3"
    todo = "If it was installed since: {}; new stores start and find it"
    pids = {place.stage: store.pid for place, store in world.stores.items()}
    kills = f"kill {pids[0]} {pids[1]}"
    assert (refused.code, refused.text) == ("UNSUPPORTED", f"{text}. {todo.format(kills)}")
    lacking = {"s3": "needs a package: pip install 'ppconsole[s3]'"}
    store = world.stores[1, 0]
    store.say(StoreReady(1, 0, store.pid, "n2", kinds=lacking))
    refused = world.say(StoreAdd(backend="x", kind="tape"), dry_run=True)[-1]
    assert f"kill {pids[0]}, kill {pids[1]} on n2; new" in refused.text
    store.say(StoreReady(1, 0, store.pid, kinds=lacking))
    refused = world.say(StoreAdd(backend="x", kind="s3"), dry_run=True)[-1]
    assert (refused.code, refused.text) == (
        "UNSUPPORTED", f"s3 needs a package: pip install 'ppconsole[s3]'. {todo.format(f'kill {pids[1]}')}",
    )  # fmt: skip
    world.kill(Place(0, 0))
    refused = world.say(StoreAdd(backend="x", kind="tape"), dry_run=True)[-1]
    text = "the store of stage 1 has no backend of kind tape; it has s3"
    assert refused.text == f"{text}. {todo.format(f'kill {pids[1]}')}"
    world.kill(Place(1, 0))
    assert world.say(StoreAdd(backend="x", kind="tape"), dry_run=True)[-1].plan, "no store is there to ask"


def test_a_second_backend_at_one_place_is_refused():
    world = TierWorld(backends={})
    places = ("a", "files", "/kv"), ("m", "memory", ""), ("n", "memory", ""), ("v", "valkey", "redis://h:1/0")
    for name, kind, url in (*places, ("o", "valkey", "redis://h:1/1")):
        assert isinstance(world.say(StoreAdd(backend=name, kind=kind, url=url))[0], Accepted)
    for same, kind, url in (("a", "files", "/kv/"), ("a", "files", "/x/../kv/."), ("v", "valkey", "redis://h:1")):
        refused = world.say(StoreAdd(backend="b", kind=kind, url=url), dry_run=True)[-1]
        assert (refused.code, refused.text.partition(";")[0]) == ("CONFLICT", f"{same} is there already")


def test_a_quota_that_keeps_no_chunk_is_refused_with_the_least_one():
    world = TierWorld()
    world.engine.advance()
    pools = world.engine.tiers.links.pools
    least = sum(size * pools.chunk_blocks + 4096 for size in pools.slot_bytes.values())
    refused = world.say(StoreAdd(backend="a", kind="memory", quota_gib=(least - 1) / 2**30), dry_run=True)[-1]
    assert refused.code == "DOES_NOT_FIT" and "keeps none; quota_gib must be at least " in refused.text
    assert isinstance(world.say(StoreAdd(backend="a", kind="memory", quota_gib=least / 2**30))[0], Accepted)


def test_verbs_without_a_backend_are_refused():
    world = TierWorld(backends={}, slot_bytes=0, stores=False)
    refused = world.say(StoreAdd(backend="x", kind="memory"))[-1]
    assert (refused.code, refused.text.partition(";")[0]) == ("UNSUPPORTED", "the host slots of stage 0 are private")
    refused = world.say(StorePause(backend="x"))[-1]
    assert (refused.code, refused.text) == ("NOT_FOUND", "there is no backend x")


def test_pause_and_resume():
    world = TierWorld()
    world.fill(PROMPT)
    world.lose_stage()
    assert world.say(StorePause(backend="nvme0"))[-1].text == "neither read nor write nvme0"
    assert all(store.specs["nvme0"].paused for store in world.stores.values())
    world.submit(PROMPT, name="r", max_tokens=1)
    world.run()
    assert not world.jobs()
    assert world.engine.reporter.build().tiers.backends[0].state == "paused"
    assert "already" in world.say(StorePause(backend="nvme0"))[-1].text
    world.lose_stage()
    world.say(StoreResume(backend="nvme0"))
    world.submit(PROMPT, name="s", max_tokens=1)
    assert world.jobs(Fetch)


def test_resume_opens_a_broken_backend_again():
    world = TierWorld()
    for store in world.stores.values():
        store.figures(breaker="open", error="timed out")
    world.engine.tiers.backends.note_read("nvme0")
    seen = []
    store = world.stores[0, 0]
    take = store.take
    store.take = lambda message: (seen.append(message), take(message))
    world.say(StoreResume(backend="nvme0"))
    assert [[spec.name for spec in message.backends] for message in seen] == [[], ["nvme0"]]
    world.submit(PROMPT, name="r", max_tokens=1)
    assert world.jobs(Find)


@pytest.mark.parametrize(
    ("figures", "end"),
    [({}, ("applied", "nvme0 is open")),
     ({"state": "broken", "error": "no server"}, ("failed", "nvme0 cannot be opened: no server"))],
)  # fmt: skip
def test_resume_of_a_broken_backend_ends_when_it_is_open_or_is_not(figures, end):
    world = TierWorld()
    for store in world.stores.values():
        store.figures(breaker="open")
    answers = world.say(StoreResume(backend="nvme0"))
    assert isinstance(outcome(world, answers), Deferred)
    for store in world.stores.values():
        store.figures(**figures)
    done = outcome(world, answers)
    assert (done.state, done.text.partition(";")[0]) == end


def test_a_paused_backend_that_no_store_has_opened_is_paused_until_it_is_resumed():
    world = TierWorld(backends={})
    added = world.say(StoreAdd(backend="x", kind="files", url="/kv"))
    world.say(StorePause(backend="x"))
    assert outcome(world, added).text.startswith("paused by ")
    for store in world.stores.values():
        store.figures(state="opening")
    assert world.engine.reporter.build().tiers.backends[0].state == "paused"
    resumed = world.say(StoreResume(backend="x"))
    assert isinstance(outcome(world, resumed), Deferred)
    for store in world.stores.values():
        store.figures()
    assert outcome(world, resumed).text == "x is open"


def test_a_resume_or_a_removal_ends_an_add_that_waits():
    world = TierWorld(backends={})
    added = world.say(StoreAdd(backend="x", kind="files", url="/kv"))
    resumed = world.say(StoreResume(backend="x"))
    done = outcome(world, added)
    assert (done.state, done.text.partition(" by ")[0]) == ("superseded", "opened again")
    world.say(StoreRemove(backend="x"))
    done = outcome(world, resumed)
    assert (done.state, done.text) == ("superseded", "it was removed before it was open")


def test_a_backend_that_is_opened_again_keeps_its_counts():
    world = TierWorld()
    for store in world.stores.values():
        store.figures(breaker="open", write_breaker="half-open", errors=5)
    (info,) = world.engine.reporter.build().tiers.backends
    assert (info.breaker, info.write_breaker) == ("open", "half-open")
    world.say(StoreResume(backend="nvme0"))
    for store in world.stores.values():
        store.figures(errors=1)
    (info,) = world.engine.reporter.build().tiers.backends
    assert (info.errors_total, info.breaker, info.write_breaker) == (12, "closed", "closed")


def test_a_drain_ends_with_the_puts_under_way():
    world = TierWorld()
    world.submit(PROMPT, max_tokens=1)
    world.answer_all(Find)
    world.now += 0.1
    world.run()
    world.answer_all(Find)
    assert len(world.jobs(Put)) == 4
    answers = world.say(StoreDrain(backend="nvme0"))
    assert "waits for 2 chunks" in answers[-1].text
    world.answer_all()
    done = outcome(world, answers)
    assert (done.state, done.text) == ("applied", "nvme0 is read, and gets nothing new")
    assert len(world.disk.markers) == 2
    assert all(store.specs["nvme0"].draining for store in world.stores.values())
    world.fill([7] * 300)
    assert len(world.disk.markers) == 2
    world.lose_stage()
    world.submit(PROMPT, name="s", max_tokens=1)
    assert world.jobs(Fetch)


def test_plans_name_the_pause_or_drain_that_ends():
    world, drain, pause = TierWorld(), StoreDrain(backend="nvme0"), StorePause(backend="nvme0")
    world.say(pause)
    assert plan(world, drain) == ["write nothing new to nvme0, and read it on; its pause ends"]
    outcome(world, world.say(drain))
    assert plan(world, drain) == ["nothing changes: nvme0 is draining already"]
    assert world.say(drain)[-1].text == "nothing changes: nvme0 is draining already"
    assert plan(world, pause) == ["neither read nor write nvme0; its drain ends"]


def test_a_second_drain_waits_for_the_puts_of_the_first():
    world, drain = TierWorld(), StoreDrain(backend="nvme0")
    world.submit(PROMPT, max_tokens=1)
    world.answer_all(Find)
    world.now += 0.1
    world.run()
    world.answer_all(Find)
    under_way = ["write nothing new to nvme0, and read it on; 2 chunks under way to it are written first"]
    assert plan(world, drain) == under_way
    first = world.say(drain)
    assert plan(world, drain) == under_way
    second = world.say(drain)
    assert (world.last(first[0].id).state, second[-1].text) == ("superseded", "waits for 2 chunks under way to nvme0")
    world.answer_all()
    assert outcome(world, second).text == "nvme0 is read, and gets nothing new"


def test_a_removed_backend_is_forgotten_after_its_calls():
    world = TierWorld()
    world.fill(PROMPT)
    world.lose_stage()
    world.submit(PROMPT, name="r", max_tokens=1)
    answers = world.say(StoreRemove(backend="nvme0"))
    assert "waits for 1 call of " in answers[-1].text
    assert world.engine.reporter.build().tiers.backends == []
    assert isinstance(world.say(StoreAdd(backend="nvme0", kind="memory"))[-1], Refused)
    world.answer_all()
    assert outcome(world, answers).state == "applied"
    assert world.scheduler.blocks.copies.totals.backends["nvme0"] == 2 * CHUNK, "the fetch went on"
    world.lose_stage()
    world.submit(PROMPT, name="s", max_tokens=1)
    world.run()
    assert not world.jobs()
    assert len(world.disk.markers) == 2


@pytest.mark.parametrize(
    ("kind", "fate"), [("memory", "its chunks end with it"), ("files", "its chunks stay where they are")]
)
def test_a_removal_says_what_becomes_of_the_chunks(kind, fate):
    world = TierWorld(backends={"b": BackendConfig(kind=kind, url="" if kind == "memory" else "/d")})
    verb = StoreRemove(backend="b")
    assert world.say(verb, dry_run=True)[-1].plan[-1] == fate
    assert outcome(world, world.say(verb)).text == f"b is removed; {fate}"


def test_a_test_has_the_answers_of_all_places():
    world = TierWorld()
    answers = world.say(StoreTest(backend="nvme0"))
    (first, number), (second, _) = world.jobs(Probe)
    first.answer(number)
    assert not isinstance(world.last(answers[0].id), Outcome)
    second.answer(number, error="read-only")
    done = outcome(world, answers)
    assert (done.state, done.text) == ("failed", "stage 0: done; stage 1: read-only")
    answers = world.say(StoreTest(backend="nvme0"))
    for store, number in list(world.jobs(Probe)):
        store.answer(number, error="mode 755")
    assert outcome(world, answers).text == "stages 0 and 1: mode 755", "each error once"
    world.kill(Place(1, 0))
    refused = world.say(StoreTest(backend="nvme0"))[-1]
    assert (refused.code, refused.text) == ("BUSY", "the store of stage 1 does not answer; try again when it does")


@pytest.mark.parametrize(("kind", "url", "shared"), [("memory", "", False), ("files", "/d", True)])
def test_the_plan_of_a_clear_has_the_bytes_and_who_else_loses_them(kind, url, shared):
    world = TierWorld(backends={"b": BackendConfig(kind=kind, url=url)})
    for store in world.stores.values():
        store.figures(used_bytes=3 * 2**20)
    first, *others = plan(world, StoreClear(backend="b"))
    assert first == "delete all chunks of this model from b; it holds 6.0 MiB"
    assert any("other engines" in line for line in others) is shared


def test_clear_deletes_markers_first():
    world = TierWorld()
    world.fill(PROMPT)
    answers = world.say(StoreClear(backend="nvme0"))
    world.now += 5.0
    for store in world.stores.values():
        store.figures()
    (first, *_) = world.engine.reporter.build().tiers.stores
    assert (first.jobs, first.lag_ms) == (1, None), "an operator waits for it, and no request"
    ((store, number),) = world.jobs(Clear)
    assert store.place == (0, 0)
    store.answer(number)
    ((store, number),) = world.jobs(Clear)
    assert store.place == (1, 0)
    store.answer(number)
    assert outcome(world, answers).text == "stage 0: done; stage 1: done"
    assert not world.disk.markers and not world.disk.shards
    world.lose_stage()
    world.submit(PROMPT, name="r", max_tokens=1)
    assert world.jobs(Find), "nothing is remembered"


def test_backends_outlive_the_core():
    world = TierWorld()
    world.say(StoreAdd(backend="s3", kind="s3", url="s3://b/p"))
    world.say(StorePause(backend="nvme0"))
    world.engine.commit()
    after = TierWorld(before=world, stores=False, serve=False)
    assert [(one.name, one.paused) for one in after.engine.tiers.backends] == [("nvme0", True), ("s3", False)]
