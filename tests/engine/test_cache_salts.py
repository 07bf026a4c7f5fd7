"""Salts of prompts: only requests with the same one share cached blocks, and tokens do not depend on them."""

from __future__ import annotations

import asyncio

import pytest
from core_world import CoreWorld
from http_world import world as http_world
from ppengine.core.journal_records import Entered
from ppengine.core.scheduler.cache_copies import HostLimits
from ppengine.gateway.audit import entry_of
from ppengine.offline.prompts import submissions_of
from ppengine.protocol.control import Command
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.store_messages import Fetch, Find
from ppengine.protocol.verbs import SALT_MOST, Submit
from scheduler_world import Driver, World
from test_core_successor import follow
from test_store_desk import PROMPT, filled
from tier_world import CHUNK, TierWorld

SALTS = ("", "a", "b")


class SaltedWorld(World):
    """A world that checks at each moment that no block is of two salts, as the cache or as a table has it."""

    def verify(self):
        super().verify()
        of_block: dict[int, str] = {}
        for request in self.scheduler.queues.requests.values():
            for block in request.blocks:
                assert of_block.setdefault(block, request.cache_salt) == request.cache_salt

    def verify_digests(self):
        """Check that no digest is of two salts: all caches find blocks by digests alone."""
        owner: dict[bytes, str] = {}
        for request in self.all.values():
            for digest in request.digests:
                assert owner.setdefault(digest, request.cache_salt) == request.cache_salt
        return owner


@pytest.mark.parametrize("seed", range(4))
def test_no_block_is_of_two_salts_whatever_happens_to_requests(seed: int) -> None:
    """Shared prefixes, forks, preemptions, swaps, lost stages, host cache and backends, in random order."""
    host_cache = HostLimits(2, 2, 8) if seed % 2 else None
    driver = Driver(seed, salts=SALTS, stages=2, preemption="swap" if seed < 2 else "recompute", host_cache=host_cache)
    driver.world.__class__ = SaltedWorld
    for _ in range(2500):
        driver.step()
    world = driver.world
    assert isinstance(world, SaltedWorld)
    driver.finish()  # compares all tokens with those that the prompts alone give
    assert set(world.verify_digests().values()) == set(SALTS)
    assert world.scheduler.blocks.hit_tokens_total > 0


def test_a_prefix_is_found_with_the_same_salt_alone() -> None:
    world = World()
    prompt = list(range(4, 20))
    cached = []
    for salt in ("", "a", "b", "a", "", "b", "c"):
        (request,) = world.add(prompt, salt=salt, seed=1)
        world.run()
        cached.append(request.num_cached)
    assert cached == [0, 0, 0, 15, 15, 15, 0], "the last token is computed for its logits"
    assert len({tuple(each.output_ids) for each in world.all.values()}) == 1


def test_requests_that_come_together_share_within_a_salt() -> None:
    world = World(max_num_batched_tokens=100, num_blocks=60)
    prompt = list(range(4, 20))
    requests = [world.add(prompt, salt=salt)[0] for salt in ("a", "b", "a")]
    world.run()
    assert [request.num_cached > 0 for request in requests] == [False, False, True]


def test_backends_have_chunks_of_a_salt_for_it_alone() -> None:
    disk = filled()
    for salt, finds in (("x", False), (None, True)):
        world = TierWorld(disk=disk)
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        world.say(Submit(prompt_token_ids=PROMPT, sampling=sampling, request="r", cache_salt=salt))
        world.answer_all(Find)
        world.answer_all(Fetch)
        assert world.scheduler.blocks.copies.totals.backends["nvme0"] == (3 * CHUNK if finds else 0)


@pytest.mark.parametrize(
    ("size", "first", "digests"),
    [
        (4, 1, ["087a24230771ee662be37e5493b333d7", "8222aab65152a8711ac413a3333a672c"]),
        (16, 70_000, ["c97ef9015cafa94496270a170988644c", "8dcb6bbece3ea1a7e376da466c20e75e"]),
    ],
)
def test_digests_without_a_salt_are_those_of_older_engines(size: int, first: int, digests: list[str]) -> None:
    """Chunks of a backend outlive engines."""
    prompt, world = [first + place for place in range(2 * size + 1)], World(block_size=size)
    found = {salt: world.add(prompt, salt=salt)[0].full_digests(2, size) for salt in ("", "a")}
    assert [digest.hex() for digest in found[""]] == digests
    assert set(found[""]).isdisjoint(found["a"])


def test_a_replaced_core_keeps_the_salt() -> None:
    world = CoreWorld()
    prompt = [3 + place for place in range(20)]
    sampling = SamplingParams(n=2, max_tokens=3, temperature=0.5, ignore_eos=True)
    for name, salt in (("a", "one"), ("b", None)):
        world.say(Submit(prompt_token_ids=prompt, sampling=sampling, request=name, cache_salt=salt))
    for _ in range(3):  # as admitted; then of a core after that; then of one after the full state of a core
        salts = {request.id: request.cache_salt for request in world.engine.requests.live()}
        assert salts == {"a": "one", "a.1": "one", "b": "", "b.1": ""}, "all samples put blocks into the cache"
        world = follow(world)
        world.journal.begin(world.journal.state)


def test_a_journal_without_prompts_has_no_salt() -> None:
    world = CoreWorld(journal=False)
    world.say(Submit(prompt_token_ids=[3, 4, 5], request="a", cache_salt="secret"))
    world.engine.commit()
    for _ in range(2):  # its admission, and the full state
        (entered,) = (one for one in world.journal.records if isinstance(one, Entered))
        assert entered.name == "a" and entered.cache_salt == ""
        world.journal.begin(world.journal.state)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_the_salt_of_a_call_reaches_the_core(path: str) -> None:
    async def call() -> None:
        async with http_world("hi") as world:
            asked = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
            body = {"input": "x"} if path == "/v1/responses" else {**asked, "max_tokens": 5}
            status, answer = await world.post(path, {**body, "cache_salt": "secret"})
            assert status == 200, answer
            await world.post(path, {**body, "cache_salt": None})
            assert [one.cache_salt for one in world.model.submitted] == ["secret", None]
            for wrong in ("", "s" * (SALT_MOST + 1), 7):
                status, answer = await world.post(path, {**body, "cache_salt": wrong})
                assert status == 400 and "cache_salt" in answer["error"]["message"], answer
                assert "sss" not in answer["error"]["message"], "it is a secret"

    asyncio.run(call())


def test_a_prompt_of_a_program_may_have_a_salt() -> None:
    salts = [{"prompt": "a", "cache_salt": "x"}, {"prompt_token_ids": [1], "cache_salt": "y"}, {"prompt": "a"}, "a"]
    made = submissions_of(salts, [SamplingParams()] * 4, [], None)  # type: ignore[arg-type]
    assert [one.verb.cache_salt for one in made] == ["x", "y", None, None]
    for wrong in ("", 7, "\ud800", "s" * (SALT_MOST + 1)):
        with pytest.raises(ValueError, match=r"^prompt 1: cache_salt "):
            submissions_of(["a", {"prompt": "a", "cache_salt": wrong}], [SamplingParams()] * 2, [], None)  # type: ignore[arg-type, list-item]


def test_the_audit_log_has_the_length_of_a_salt() -> None:
    verb = Submit(prompt_token_ids=[1, 2], cache_salt="secret")
    entry = entry_of(Command(id="c", epoch="e", verb=verb, by="eve"), "t", "owner")
    assert entry.args["cache_salt_length"] == 6 and "secret" not in repr(entry)
