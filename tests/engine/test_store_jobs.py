"""Jobs of a store: each one answer, deadlines, cancels, pools, breakers, corrupt bytes."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ppengine.protocol.place import Place
from ppengine.protocol.store_messages import (
    Cancel,
    Clear,
    Delete,
    Done,
    Fetch,
    Fetched,
    Find,
    Found,
    Mark,
    Put,
    Stored,
    StoreFigures,
    UseBackends,
)
from ppengine.protocol.store_messages import (
    Test as Trial,
)
from store_world import SLOT_BYTES, FakeBackend, Pool, World, marker, spec

KEY, OTHER = b"k" * 16, b"o" * 16


@pytest.fixture
def world() -> Iterator[World]:
    world = World().ready()
    yield world
    world.close()


def put(world: World, key: bytes = KEY, slots: tuple[int, ...] = (0, 1), job: int = 1) -> Stored:
    """Write random slots as a chunk."""
    for slot in slots:
        world.pool.write(slot, os.urandom(SLOT_BYTES))
    answer = world.ask(Put(job, 1, "m", key, list(slots), 1000))
    assert isinstance(answer, Stored)
    return answer


def fetch(job: int, keys: list[bytes], slots: list[list[int]], sums: list[bytes], generation: int = 1) -> Fetch:
    return Fetch(job, generation, "m", keys, slots, sums, 1000)


def test_a_chunk_comes_back_into_other_slots(world: World) -> None:
    stored = [put(world, KEY, (3, 1)), put(world, OTHER, (6, 7), 2)]
    assert [(each.error, each.length) for each in stored] == [("", 20480)] * 2
    order = fetch(3, [KEY, OTHER], [[10, 4], [12, 11]], [each.sum for each in stored])
    answer = world.ask(order)
    assert isinstance(answer, Fetched) and (answer.good, answer.error, answer.corrupt) == (2, "", False)
    for source, target in ((3, 10), (1, 4), (6, 12), (7, 11)):
        assert world.pool.read(source) == world.pool.read(target)
    figures = world.store.figures().backends[0]
    assert (figures.reads, figures.read_bytes, figures.writes, figures.state) == (2, 40960, 2, "open")


def test_a_fetch_ends_at_the_first_chunk_that_is_missing(world: World) -> None:
    stored = put(world)
    answer = world.ask(fetch(2, [KEY, OTHER, KEY], [[4, 5], [6, 7], [8, 9]], [stored.sum, b"x" * 16, stored.sum]))
    assert isinstance(answer, Fetched)
    assert (answer.good, answer.corrupt) == (1, False) and "is not there" in answer.error
    assert world.store.figures().backends[0].errors == 0, "a missing object is no failure of the backend"


def test_a_chunk_is_found_after_its_marker(world: World) -> None:
    assert world.ask(Find(1, [KEY], 100)) == Found(1, [])
    assert world.ask(Mark(2, "m", KEY, marker(), 100)) == Done(0, 0, 2, "")
    assert world.ask(Mark(3, "m", b"z" * 16, marker(), 100)) == Done(0, 0, 3, "")
    answer = world.ask(Find(4, [KEY, OTHER, b"z" * 16], 100))
    assert isinstance(answer, Found) and [chunk.marker for chunk in answer.chunks] == [marker()], "a prefix of the keys"
    world.store.take(Delete("m", [KEY]))
    world.work()
    assert world.ask(Find(5, [KEY], 100)) == Found(5, [])


def test_a_find_takes_the_first_backend_that_has_a_chunk() -> None:
    world = World().ready(spec("a"), spec("b"))
    world.ask(Mark(1, "b", KEY, marker(), 100))
    world.ask(Mark(2, "a", OTHER, marker(), 100))
    world.ask(Mark(3, "b", OTHER, marker(), 100))
    answer = world.ask(Find(4, [KEY, OTHER], 100))
    assert isinstance(answer, Found) and [chunk.backend for chunk in answer.chunks] == ["b", "a"]
    world.close()


def test_a_marker_of_another_shape_is_deleted(world: World) -> None:
    world.ask(Mark(1, "m", KEY, marker([b"a" * 16]), 100))
    answer = world.ask(Find(2, [KEY], 100))
    assert isinstance(answer, Found) and answer.chunks == [] and "1 places" in answer.error
    assert world.store.figures().backends[0].corrupt == 1
    assert world.ask(Find(3, [KEY], 100)) == Found(3, [])


def test_jobs_that_cannot_begin_are_answered() -> None:
    world = World(place=Place(1, 0))
    world.store.take(UseBackends([spec()]))
    stored = world.ask(Put(1, 1, "m", KEY, [0], 100))
    assert isinstance(stored, Stored) and stored.error == "there is no pool yet"
    world.ready()
    cases = {
        "of generation 1, the job of 2": Put(2, 2, "m", KEY, [0], 100),
        "outside of the pool of 16": Put(3, 1, "m", KEY, [16], 100),
        "outside of the pool": fetch(4, [KEY], [[-1]], [b""]),
        "differ in number": fetch(5, [KEY, OTHER], [[1]], [b""]),
        "there is no backend x": Put(6, 1, "x", KEY, [0], 100),
        "store of place (0, 0)": Find(7, [KEY], 100),
        "markers belong": Mark(8, "m", KEY, marker(), 100),
    }
    for words, message in cases.items():
        answer = world.ask(message)
        assert words in answer.error, words  # type: ignore[attr-defined]
    world.close()


def test_paused_and_draining_backends(world: World) -> None:
    stored = put(world)
    order = fetch(2, [KEY], [[4, 5]], [stored.sum])
    world.store.take(UseBackends([spec(draining=True)]))
    assert world.ask(order).good == 1  # type: ignore[attr-defined]
    refused = world.ask(Put(3, 1, "m", KEY, [0], 100))
    assert isinstance(refused, Stored) and refused.error == "m is draining"
    world.store.take(UseBackends([spec(paused=True)]))
    assert world.ask(msgspec.structs.replace(order, job=4)).error == "m is paused"  # type: ignore[attr-defined]
    tested = world.ask(Trial(5, "m"))
    assert isinstance(tested, Done) and tested.text.startswith("4 MiB written in ")
    cleared = world.ask(Clear(6, "m"))
    assert isinstance(cleared, Done) and cleared.text == "0.0 MiB deleted"
    world.store.take(UseBackends([spec()]))
    assert world.ask(msgspec.structs.replace(order, job=7)).good == 0  # type: ignore[attr-defined]


def test_a_call_that_hangs_ends_at_the_deadline_and_writes_no_slot_later() -> None:
    backend = FakeBackend()
    world = World(lambda kind: backend).ready(spec(timeout_ms=60_000))
    stored = put(world)
    before = world.pool.read(4)

    def hang(call: str) -> None:
        world.pass_s(2.0)  # The deadline goes by while the backend reads.

    backend.fault = hang
    answer = world.ask(fetch(2, [KEY], [[4, 5]], [stored.sum]))
    assert isinstance(answer, Fetched) and (answer.good, answer.error) == (0, "its deadline of 1000 ms is over")
    assert world.pool.read(4) == before
    world.close()


def test_a_call_over_its_time_fails_the_job_and_at_last_the_backend() -> None:
    backend = FakeBackend()
    world = World(lambda kind: backend).ready(spec(timeout_ms=100))
    stored = put(world)
    backend.fault = lambda call: world.pass_s(0.5)
    for job in range(2, 7):
        answer = world.ask(fetch(job, [KEY], [[4, 5]], [stored.sum]))
        assert isinstance(answer, Fetched) and answer.error == "m did not answer in 100 ms"
    refused = world.ask(fetch(7, [KEY], [[4, 5]], [stored.sum]))
    assert isinstance(refused, Fetched) and "left alone after failures" in refused.error
    figures = world.store.figures().backends[0]
    assert (figures.breaker, figures.errors, figures.reads) == ("open", 5, 0)
    backend.fault = lambda call: None
    world.pass_s(3.0)
    assert world.ask(fetch(8, [KEY], [[4, 5]], [stored.sum])).good == 1  # type: ignore[attr-defined]
    assert world.store.figures().backends[0].breaker == "closed"
    world.close()


def test_a_half_open_breaker_lets_one_job_through() -> None:
    def fail(call: str) -> None:
        raise OSError("no route")

    backend = FakeBackend()
    world = World(lambda kind: backend).ready()
    backend.fault = fail
    for job in range(5):
        assert world.ask(Mark(job, "m", KEY, marker(), 100)).error == "no route"  # type: ignore[attr-defined]
    world.pass_s(2.5)
    world.store.take(Mark(10, "m", KEY, marker(), 100))
    world.store.take(Mark(11, "m", KEY, marker(), 100))
    world.work()
    refused, tried = world.sent[-2:]
    assert isinstance(refused, Done) and refused.job == 11 and "left alone" in refused.error
    assert isinstance(tried, Done) and (tried.job, tried.error) == (10, "no route")
    figures = world.store.figures().backends[0]
    assert (figures.breaker, figures.errors, figures.error) == ("open", 6, "no route"), "the try has failed, too"
    world.close()


def test_a_cancelled_job_is_answered_once(world: World) -> None:
    stored = put(world)
    world.store.take(fetch(2, [KEY], [[4, 5]], [stored.sum]))
    world.store.take(Cancel(2))
    world.store.take(Cancel(2))
    world.work()
    answers = [each for each in world.sent if isinstance(each, Fetched)]
    assert [(each.job, each.good, each.error) for each in answers] == [(2, 0, "it was cancelled")]


def test_a_new_pool_waits_for_the_copies_of_the_older_one() -> None:
    backend = FakeBackend()
    world = World(lambda kind: backend).ready()
    stored = put(world)
    other = Pool()

    def replace(call: str) -> None:
        world.store.take(other.message(2))

    backend.fault = replace
    answer = world.ask(fetch(2, [KEY], [[4, 5]], [stored.sum]))
    backend.fault = lambda call: None
    assert isinstance(answer, Fetched) and answer.error == "the pool is being replaced"
    old = world.ask(fetch(3, [KEY], [[4, 5]], [stored.sum]))
    assert "of generation 2, the job of 1" in old.error  # type: ignore[attr-defined]
    assert world.ask(fetch(4, [KEY], [[4, 5]], [stored.sum], generation=2)).good == 1  # type: ignore[attr-defined]
    assert other.read(4) == world.pool.read(0) and world.pool.read(4) == bytes(SLOT_BYTES)
    world.close()
    other.close()


def test_a_pool_that_cannot_be_mapped_is_an_error_of_its_jobs(world: World) -> None:
    read_end, write_end = os.pipe()
    for changes in ({"fd": 9999}, {"slots": 17}, {"fd": read_end}, {"slots": 0}):
        world.store.take(msgspec.structs.replace(world.pool.message(), **changes))
        answer = world.ask(Put(1, 1, "m", KEY, [0], 100))
        assert isinstance(answer, Stored) and "cannot be mapped" in answer.error, changes
    os.close(read_end)
    os.close(write_end)


def test_backends_are_kept_replaced_and_closed() -> None:
    made: list[FakeBackend] = []

    def make(kind: str) -> FakeBackend:
        made.append(FakeBackend())
        return made[-1]

    world = World(make).ready(spec("a"), spec("b"))
    world.store.take(UseBackends([spec("a", paused=True), spec("b", url="elsewhere")]))
    assert [(each.opened, each.closed) for each in made] == [(1, 0), (1, 1), (1, 0)]
    world.store.take(UseBackends([]))
    assert [each.closed for each in made] == [1, 1, 1] and world.store.figures().backends == []
    world.close()


def test_a_backend_that_does_not_open_says_why() -> None:
    def fail(call: str) -> None:
        raise OSError("no such host")

    world = World(lambda kind: FakeBackend(fail)).ready()
    figures = world.store.figures().backends[0]
    assert (figures.state, figures.error) == ("broken", "no such host")
    answer = world.ask(Find(1, [KEY], 100))
    assert isinstance(answer, Found) and answer.error == "m cannot be opened: no such host"
    world.close()


def test_a_core_that_is_gone_gets_no_answers(world: World) -> None:
    stored = put(world)
    world.sent.clear()
    world.store.take(fetch(2, [KEY], [[4, 5]], [stored.sum]))
    world.store.reset()
    assert not world.store.busy
    world.store.resume()
    world.work()
    assert world.sent == []
    assert world.ask(Put(2, 1, "m", KEY, [0], 100)).error == "there is no pool yet"  # type: ignore[attr-defined]


def test_no_flipped_or_missing_byte_is_ever_good() -> None:
    """10,000 flips and 1,000 truncations on their way through a backend; each is counted, and no slot is touched."""
    backend, random_ = FakeBackend(), random.Random(5)
    world = World(lambda kind: backend).ready()
    stored = put(world)
    (name,) = backend.objects
    good, before = backend.objects[name], world.pool.read(4) + world.pool.read(5)
    for job in range(11_000):
        bad = bytearray(good)
        if job < 10_000:
            bad[random_.randrange(len(bad))] ^= 1 << random_.randrange(8)
        else:
            del bad[random_.randrange(len(bad)) :]
        backend.objects[name] = bytes(bad)
        world.sent.clear()
        answer = world.ask(fetch(job + 2, [KEY], [[4, 5]], [stored.sum]))
        assert isinstance(answer, Fetched) and (answer.good, answer.corrupt) == (0, True), job
    assert world.pool.read(4) + world.pool.read(5) == before
    figures = world.store.figures().backends[0]
    assert (figures.corrupt, figures.reads, figures.breaker) == (11_000, 0, "closed")
    backend.objects[name] = good
    assert world.ask(fetch(1, [KEY], [[4, 5]], [stored.sum])).good == 1  # type: ignore[attr-defined]
    world.close()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 15), max_size=60))
def test_each_job_is_answered_once_in_any_order(choices: list[int]) -> None:
    """Jobs, cancels, pools, backends, failures and time come in any order; at the end each job has one answer."""
    faults = iter(choices * 3)

    def fault(call: str) -> None:
        if next(faults, 0) in (3, 4):
            raise OSError("it fails")

    world, generation = World(lambda kind: FakeBackend(fault)), 1
    asked: dict[int, type] = {}
    orders = {
        0: lambda job: Put(job, generation, "m", KEY, [0, 1], 1000),
        1: lambda job: fetch(job, [KEY, OTHER], [[2, 3], [4, 5]], [b"s" * 16] * 2, generation),
        2: lambda job: Find(job, [KEY, OTHER], 50),
        3: lambda job: Mark(job, "m", KEY, marker(), 1000),
        4: lambda job: Clear(job, "m"),
        5: lambda job: Trial(job, "m"),
    }
    kinds = {0: Stored, 1: Fetched, 2: Found, 3: Done, 4: Done, 5: Done}
    for job, choice in enumerate(choices):
        if choice in orders:
            asked[job] = kinds[choice]
            world.store.take(orders[choice](job))
        elif choice == 6:
            world.store.take(Cancel(job // 2))
        elif choice == 7:
            generation += 1
            world.store.take(world.pool.message(generation))
        elif choice == 8:
            world.store.take(UseBackends([spec(url=str(job)), spec("other")]))
        elif choice == 9:
            world.store.take(UseBackends([spec(draining=True, paused=job % 2 == 0)]))
        elif choice == 10:
            world.ready()
        elif choice == 11:
            world.pass_s(0.06)
        elif choice == 12:
            world.pass_s(1.2)
        elif choice in (13, 14):
            world.step()
        else:
            world.run_posted()
    world.work()
    world.pass_s(1000.0)
    world.work()
    answers = [each for each in world.sent if not isinstance(each, StoreFigures)]
    assert {each.job: type(each) for each in answers} == asked  # type: ignore[attr-defined]
    assert len(answers) == len(asked) and not world.store.busy
    world.close()


def test_no_flipped_byte_of_a_marker_is_found() -> None:
    backend, random_ = FakeBackend(), random.Random(6)
    world = World(lambda kind: backend).ready()
    world.ask(Mark(1, "m", KEY, marker(), 100))
    (name,) = backend.objects
    good = backend.objects[name]
    for job in range(2, 1000):
        bad = bytearray(good)
        bad[random_.randrange(len(bad))] ^= 1 << random_.randrange(8)
        backend.objects[name] = bytes(bad[: random_.choice((len(bad), random_.randrange(len(bad))))])
        answer = world.ask(Find(job, [KEY], 100))
        assert isinstance(answer, Found) and answer.chunks == [], bytes(bad)
        assert name not in backend.objects, "it is deleted"
    assert world.store.figures().backends[0].corrupt == 998
    world.close()
