"""Jobs of a store: each one answer, chunks and markers, pools and backends."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
import pytest
from ppengine.protocol.place import Place
from ppengine.protocol.store_messages import (
    Cancel,
    Clear,
    Delete,
    Done,
    Fetched,
    Find,
    Found,
    FoundChunk,
    Mark,
    Marker,
    Put,
    Stored,
    StoreFigures,
    UseBackends,
    UseNamespace,
)
from ppengine.protocol.store_messages import (
    Test as Trial,
)
from ppengine.store import lookups
from ppengine.store.bounce import Bounce
from ppengine.store.lane_task import Outcome
from store_world import KEY, OTHER, SLOT_BYTES, FakeBackend, Pool, World, fetch, marker, put, spec


@pytest.fixture
def world() -> Iterator[World]:
    world = World().ready()
    yield world
    world.close()


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
    assert (answer.good, answer.corrupt, answer.missing) == (1, False, True)
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


def test_engines_that_differ_in_low_bits_keep_their_own_shards() -> None:
    """A marker that one has read stays good after the other has written, and a delete takes none of the other."""
    backend = FakeBackend()
    worlds = [World(lambda kind: backend).ready() for _ in range(2)]
    stored = [put(world) for world in worlds]
    assert stored[0].sum != stored[1].sum and len(backend.objects) == 2
    first = [world.ask(fetch(2, [KEY], [[4, 5]], [each.sum])) for world, each in zip(worlds, stored, strict=True)]
    assert [(each.good, each.corrupt) for each in first] == [(1, False)] * 2  # type: ignore[attr-defined]
    assert worlds[0].pool.read(4) == worlds[0].pool.read(0)
    for _ in range(2):
        worlds[0].store.take(Delete("m", [KEY]))
        worlds[0].work()
    assert worlds[0].ask(fetch(3, [KEY], [[4, 5]], [stored[0].sum])).good == 0  # type: ignore[attr-defined]
    assert worlds[1].ask(fetch(3, [KEY], [[4, 5]], [stored[1].sum])).good == 1  # type: ignore[attr-defined]
    worlds[1].store.take(UseNamespace(b"z" * 16))
    worlds[1].store.take(Delete("m", [KEY]))
    worlds[1].work()
    assert len(backend.objects) == 1, "it is of the older namespace"
    # One that has only read a chunk deletes it, too, as it may be corrupt.
    worlds[0].ask(fetch(4, [KEY], [[4, 5]], [stored[1].sum]))
    worlds[0].store.take(Delete("m", [KEY]))
    worlds[0].work()
    assert backend.objects == {}
    for world in worlds:
        world.close()


def test_the_names_of_a_backend_go_with_it(world: World) -> None:
    names = world.store._home.names
    put(world)
    world.store.take(UseBackends([spec(quota_bytes=2**20)]))
    assert len(names._names) == 1, "a backend of that name may have the chunk"
    world.store.take(UseBackends([spec("other")]))
    assert names.take("m", [KEY]) == []


def test_a_find_takes_the_first_backend_that_has_a_chunk() -> None:
    world = World().ready(spec("a"), spec("b"))
    world.ask(Mark(1, "b", KEY, marker(), 100))
    world.ask(Mark(2, "a", OTHER, marker(), 100))
    world.ask(Mark(3, "b", OTHER, marker(), 100))
    world.store.take(Find(4, [KEY, OTHER], 100))
    # The answer of the second comes first.
    for lane in reversed(world.lanes):
        assert lane.work_once(Bounce(), wait=False) and world.run_posted()
    answer = world.sent[-1]
    assert isinstance(answer, Found) and [chunk.backend for chunk in answer.chunks] == ["b", "a"]
    world.close()


def test_a_call_over_its_time_may_find_more_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread goes on while the loop counts what it has found so far."""
    world, made = World().ready(spec("a"), spec("b")), FoundChunk
    for number, (name, key) in enumerate([("a", KEY), ("a", OTHER), ("b", KEY)], 1):
        world.ask(Mark(number, name, key, marker(), 100))
    world.store.take(Find(4, [KEY, OTHER], 10_000))
    tasks = [lane._next() for lane in world.lanes]
    found: dict[int, Marker] = {0: marker()}

    def counted(backend: str, one: Marker) -> FoundChunk:
        found[1] = one
        return made(backend, one)

    monkeypatch.setattr(lookups, "FoundChunk", counted)
    job = world.store._jobs[4]
    assert isinstance(job, lookups.FindJob) and all(tasks)
    job._ended(0, found, Outcome(error="a did not answer in 1000 ms", failed=True))
    job._ended(1, {}, Outcome())
    answer = world.sent[-1]
    assert isinstance(answer, Found) and [chunk.backend for chunk in answer.chunks] == ["a"]
    world.close()


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


def test_clear_deletes_the_markers_with_the_first_place_alone() -> None:
    backend = FakeBackend()
    first, second = World(lambda kind: backend).ready(), World(lambda kind: backend, Place(1, 0)).ready()
    put(first)
    put(second)
    first.ask(Mark(2, "m", KEY, marker(), 100))
    cleared = second.ask(Clear(3, "m"))
    assert isinstance(cleared, Done) and cleared.error == ""
    assert sorted(name.partition("/")[0] for name in backend.objects) == ["0.0", "marker"]
    first.ask(Clear(4, "m"))
    assert backend.objects == {}
    first.close()
    second.close()


def test_the_bytes_of_a_clear_are_gone_when_it_is_done(world: World) -> None:
    put(world)
    world.pass_s(10.0)
    world.work()
    assert world.store.figures().backends[0].used_bytes > 0
    world.sent.clear()
    world.ask(Clear(2, "m"))
    figures, done = world.sent
    assert isinstance(figures, StoreFigures) and figures.backends[0].used_bytes == 0
    assert isinstance(done, Done) and "deleted" in done.text


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
