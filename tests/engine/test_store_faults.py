"""Faults of a store: hangs, late answers, breakers, corrupt bytes, and messages in any order."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ppengine.common.call_page import CallPage
from ppengine.protocol.store_messages import (
    BackendFigures,
    Cancel,
    Clear,
    Delete,
    Done,
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
from ppengine.store.backend import Layout
from ppengine.store.lane import Lane
from ppengine.store.slot_pool import SlotPool
from store_world import KEY, OTHER, FakeBackend, Pool, World, fetch, marker, put, spec


@pytest.fixture
def world() -> Iterator[World]:
    world = World().ready()
    yield world
    world.close()


def test_a_marker_of_another_shape_is_deleted(world: World) -> None:
    world.ask(Mark(1, "m", KEY, marker([b"a" * 16]), 100))
    answer = world.ask(Find(2, [KEY], 100))
    assert isinstance(answer, Found) and answer.chunks == [] and "1 places" in answer.error
    assert world.store.figures().backends[0].corrupt == 1
    assert world.ask(Find(3, [KEY], 100)) == Found(3, [])


def test_a_marker_whose_checksum_is_no_name_is_deleted(world: World) -> None:
    world.ask(Mark(1, "m", KEY, marker([b"a" * 16, b"b" * 300]), 100))
    answer = world.ask(Find(2, [KEY], 100))
    assert isinstance(answer, Found) and answer.chunks == [] and "another length" in answer.error
    assert world.ask(Find(3, [KEY], 100)) == Found(3, [])


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


@pytest.mark.parametrize("order", ["cancel", "pool"])
def test_an_answer_waits_for_a_copy_under_way(world: World, monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    """Slots are the core's again with the answer, and the mapping stays until then."""
    stored, fill, other = put(world), SlotPool.fill, Pool()
    world.sent.clear()

    def end_meanwhile(pool: SlotPool, slots: Sequence[int], source: memoryview) -> None:
        world.store.take(Cancel(2) if order == "cancel" else other.message(2))
        assert world.sent == [] and world.store.busy
        if order == "pool":
            world.store.take(Put(9, 2, "m", KEY, [0], 100))
            refused = world.sent.pop()
            assert isinstance(refused, Stored) and refused.error == "the pool is being replaced"
        fill(pool, slots, source)

    monkeypatch.setattr(SlotPool, "fill", end_meanwhile)
    answer = world.ask(fetch(2, [KEY], [[4, 5]], [stored.sum]))
    monkeypatch.setattr(SlotPool, "fill", fill)
    assert isinstance(answer, Fetched) and answer.good == 0
    assert answer.error == ("it was cancelled" if order == "cancel" else "the pool is being replaced")
    assert world.pool.read(4) == world.pool.read(0), "the copy went on"
    again = fetch(3, [KEY], [[4, 5]], [stored.sum], generation=1 if order == "cancel" else 2)
    assert world.ask(again).good == 1  # type: ignore[attr-defined]
    other.close()


def test_a_shard_of_another_chunk_is_corrupt() -> None:
    """Its checksum may be right, as a marker could have been made for it."""
    backend = FakeBackend()
    world = World(lambda kind: backend).ready()
    stored = put(world)
    (name,) = backend.objects
    backend.objects[name.replace(KEY.hex(), OTHER.hex())] = backend.objects[name]
    answer = world.ask(fetch(2, [OTHER], [[4, 5]], [stored.sum]))
    assert isinstance(answer, Fetched) and answer.corrupt and "header" in answer.error
    world.close()


def test_a_call_that_returns_late_counts_as_one_failure() -> None:
    backend = FakeBackend()
    world = World(lambda kind: backend).ready(spec(timeout_ms=100))
    backend.fault = lambda call: world.pass_s(0.5)
    answer = put(world)
    assert answer.error == "m did not answer in 100 ms" and len(backend.objects) == 1
    figures = world.store.figures().backends[0]
    assert (figures.errors, figures.writes, figures.error) == (1, 0, answer.error)
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


def test_a_backend_whose_threads_all_hang_is_refused_until_one_returns() -> None:
    backend = FakeBackend()
    world = World(lambda kind: backend).ready(spec(timeout_ms=100))
    stored = put(world)
    world.sent.clear()
    seen: list[BackendFigures] = []

    def hang(call: str) -> None:
        """Stay in the call while its time goes by, and let the next thread begin one."""
        world.pass_s(0.5)
        if len(world.sent) < backend.threads:
            world.store.take(fetch(3, [KEY], [[4, 5]], [stored.sum]))
            world.step()
            return
        world.store.take(fetch(4, [KEY], [[4, 5]], [stored.sum]))
        world.store.take(Trial(5, "m"))
        seen.append(world.store.figures().backends[0])

    backend.fault = hang
    world.store.take(fetch(2, [KEY], [[4, 5]], [stored.sum]))
    world.step()
    backend.fault = lambda call: None
    late = "m did not answer in 100 ms"
    refused = "m hangs: calls over their time hold all its threads"
    answers = [(each.job, each.error) for each in world.sent]  # type: ignore[attr-defined]
    assert answers == [(2, late), (3, late), (4, refused), (5, refused)]
    assert [(each.breaker, each.write_breaker, each.errors) for each in seen] == [("open", "open", 2)], (
        "it opens before five failures"
    )
    assert world.ask(fetch(6, [KEY], [[4, 5]], [stored.sum])).good == 1  # type: ignore[attr-defined]
    assert world.store.figures().backends[0].breaker == "closed"
    world.close()


def test_writes_that_hang_are_refused_beside_reads_that_go_on() -> None:
    backend = FakeBackend()
    world = World(lambda kind: backend).ready(spec(timeout_ms=100))
    stored = put(world)
    seen: list[tuple[str, str]] = []

    def hang(call: str) -> None:
        backend.fault = lambda call: None
        world.pass_s(0.5)
        world.store.take(Put(3, 1, "m", OTHER, [0, 1], 1000))
        world.store.take(fetch(4, [KEY], [[4, 5]], [stored.sum]))
        world.work()
        figures = world.store.figures().backends[0]
        seen.append((figures.breaker, figures.write_breaker))

    backend.fault = hang
    world.sent.clear()
    world.store.take(Put(2, 1, "m", OTHER, [0, 1], 1000))
    world.work()
    answers = [(each.job, each.error) for each in world.sent]  # type: ignore[attr-defined]
    refused = "m hangs: writes over their time hold its threads"
    assert answers == [(2, "m did not answer in 100 ms"), (3, refused), (4, "")] and seen == [("closed", "open")]
    assert world.ask(Put(5, 1, "m", OTHER, [0, 1], 1000)).error == ""  # type: ignore[attr-defined]
    world.close()


def test_an_error_is_reported_once_though_a_call_has_succeeded_since() -> None:
    """A full disk fails every few writes: whether figures come between two of them is chance."""
    backend = FakeBackend()
    world = World(lambda kind: backend).ready()

    def fail(call: str) -> None:
        if call == "write":
            raise OSError(28, "No space left on device")

    backend.fault = fail
    put(world, job=1)
    backend.fault = lambda call: None
    put(world, job=2)
    seen = [world.store.figures().backends[0] for _ in range(2)]
    assert [each.errors for each in seen] == [1, 1]
    assert [each.error for each in seen] == ["[Errno 28] No space left on device", ""]
    world.close()


def test_the_queue_has_no_call_for_the_usage(world: World) -> None:
    world.pass_s(10.0)
    assert world.store.figures().backends[0].queue == 0, "an idle backend"
    world.store.take(Find(1, [KEY], 1000))
    assert world.store.figures().backends[0].queue == 1


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
    found = figures.breaker, figures.write_breaker, figures.errors, figures.error
    assert found == ("closed", "open", 6, "no route"), "the try has failed, too"
    world.close()


def test_a_full_disk_is_not_written_and_read_on() -> None:
    """Between two writes that fail, finds, reads and deletes go well."""
    backend = FakeBackend()
    world = World(lambda kind: backend).ready()
    stored = put(world)
    full = "[Errno 28] No space left on device"

    def fail(call: str) -> None:
        if call == "write":
            raise OSError(28, "No space left on device")

    backend.fault = fail
    for job in range(10, 30, 2):
        world.ask(Put(job, 1, "m", OTHER, [0, 1], 1000))
        world.store.take(Delete("m", [OTHER]))
        world.work()
        assert len(world.ask(Find(job + 1, [KEY], 100)).chunks) == 0  # type: ignore[attr-defined]
        assert world.ask(fetch(job + 1, [KEY], [[4, 5]], [stored.sum])).good == 1  # type: ignore[attr-defined]
    figures = world.store.figures().backends[0]
    assert (figures.breaker, figures.write_breaker, figures.errors, figures.error) == ("closed", "open", 5, full)
    refused = world.ask(Put(40, 1, "m", OTHER, [0, 1], 1000))
    assert refused.error == f"m is left alone after failures, and not written: {full}"  # type: ignore[attr-defined]
    assert world.ask(Trial(41, "m")).error == full  # type: ignore[attr-defined]
    assert world.store.figures().backends[0].breaker == "closed", "a test that cannot write says nothing of reads"
    backend.fault = lambda call: None
    assert world.ask(Trial(42, "m")).error == ""  # type: ignore[attr-defined]
    assert world.store.figures().backends[0].write_breaker == "closed", "a test closes it"
    world.close()


def test_a_backend_whose_reads_fail_is_written_on() -> None:
    backend = FakeBackend()
    world = World(lambda kind: backend).ready()

    def fail(call: str) -> None:
        if call == "find":
            raise OSError("no answer")

    backend.fault = fail
    for job in range(10, 20, 2):
        assert put(world, job=job).error == ""
        assert world.ask(Find(job + 1, [KEY], 100)).error == "no answer"  # type: ignore[attr-defined]
    put(world, job=30)
    for _ in range(2):
        figures = world.store.figures().backends[0]
        assert (figures.breaker, figures.write_breaker, figures.error) == ("open", "closed", "no answer")
    world.close()


def test_a_backend_that_does_not_open_says_why() -> None:
    def fail(call: str) -> None:
        raise OSError("no such host")

    world = World(lambda kind: FakeBackend(fail)).ready()
    figures = world.store.figures().backends[0]
    assert (figures.state, figures.error) == ("broken", "no such host")
    world.store.take(Delete("m", [KEY]))
    assert world.store.figures().backends[0].queue == 0, "no request waits for a delete"
    answer = world.ask(Find(1, [KEY], 100))
    assert isinstance(answer, Found) and answer.error == "m cannot be opened: no such host"
    world.close()


def test_a_test_opens_a_backend_at_once_when_its_place_is_mended() -> None:
    def fail(call: str) -> None:
        raise OSError("mode 755")

    backend = FakeBackend(fail)
    world = World(lambda kind: backend).ready()
    lane = world.lanes[0]
    world.store.take(Trial(1, "m"))
    world.work()
    assert not world.sent, "it waits for the try"
    lane.open_once()
    world.work()
    (answer,) = world.sent
    assert isinstance(answer, Done) and (answer.job, answer.error) == (1, "m cannot be opened: mode 755")
    backend.fault = lambda call: None
    world.store.take(Trial(2, "m"))
    lane.open_once()
    world.work()
    answer = world.sent[-1]
    assert isinstance(answer, Done) and (answer.job, answer.error) == (2, "") and "4 MiB written" in answer.text
    assert world.store.figures().backends[0].state == "open"
    world.close()


def test_a_test_that_waits_for_a_try_ends_with_its_cancel_its_backend_or_its_core() -> None:
    def fail(call: str) -> None:
        raise OSError("mode 755")

    world = World(lambda kind: FakeBackend(fail)).ready()
    world.store.take(Trial(1, "m"))
    world.store.take(Cancel(1))
    world.store.take(Trial(2, "m"))
    world.store.take(UseBackends([]))
    world.work()
    assert [(each.job, each.error) for each in world.sent] == [  # type: ignore[attr-defined]
        (1, "it was cancelled"), (2, "there is no backend m"),
    ]  # fmt: skip
    world.store.take(UseBackends([spec()]))
    world.store.take(Trial(3, "m"))
    world.store.reset()
    world.lanes[-1].open_once()
    world.store.resume()
    world.work()
    assert len(world.sent) == 2
    world.close()


def test_a_lane_does_not_wait_out_its_pause_for_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ppengine.store.lane.AGAIN_S", 60.0)
    fails = [True]

    def fault(call: str) -> None:
        if call == "open" and fails[0]:
            raise OSError("mode 755")

    tried = threading.Event()
    lane = Lane(spec(), Layout(("0.0",)), lambda: FakeBackend(fault), lambda call: call(), lambda: 0.0, CallPage())
    lane.start()
    while not lane.waits_to_open:
        time.sleep(0.01)
    fails[0] = False
    lane.open_soon(tried.set)
    assert tried.wait(10.0) and lane.figures().state == "open"
    lane.close()


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
    for lane in world.lanes:
        if lane.waits_to_open:
            lane.open_once()  # a test may wait for the next try of its thread
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
