"""The ledger's rules one by one: what orders an access, what does not, and what it costs while it is off."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from ppengine.drills.fake_streams import FakeError, FakeRuntime, LifoPool
from ppengine.stage.ledger.ledger import Ledger
from ppengine.stage.ledger.picture import picture
from ppengine.stage.ledger.storage import StorageBuffers


@pytest.fixture
def ledger() -> Ledger:
    made = Ledger(0)
    made.thread("main")
    made.switch(True)
    return made


def causes(ledger: Ledger) -> list[str]:
    return [finding.cause for finding in ledger.findings()]


def summaries(ledger: Ledger) -> list[str]:
    return [finding.summary.removeprefix("stage 0: ") for finding in ledger.findings()]


def in_thread(name: str, work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work, name=name)
    thread.start()
    thread.join()


def test_waits_travel_through_other_streams(ledger: Ledger) -> None:
    """a writes, b waits for a, c waits for b: c has waited for a."""
    a, b, c = (ledger.stream(name, "compute") for name in "abc")
    buffer = ledger.buffer("x")
    ledger.launch(a, "write", writes=[buffer])
    ledger.wait(b, ledger.record(a, "e1"))
    ledger.wait(c, ledger.record(b, "e2"))
    ledger.launch(c, "read", reads=[buffer])
    assert causes(ledger) == []


def test_an_event_covers_only_what_came_before_it(ledger: Ledger) -> None:
    a, b = ledger.stream("a", "compute"), ledger.stream("b", "copy")
    buffer = ledger.buffer("x")
    event = ledger.record(a, "early")
    ledger.launch(a, "write", writes=[buffer])
    ledger.wait(b, event)
    ledger.launch(b, "read", reads=[buffer])
    assert summaries(ledger) == ["b reads x without waiting for a, which writes it"]


def test_a_wait_that_comes_after_the_read_is_none(ledger: Ledger) -> None:
    a, b = ledger.stream("a", "compute"), ledger.stream("b", "copy")
    buffer = ledger.buffer("x")
    ledger.launch(a, "write", writes=[buffer])
    event = ledger.record(a, "behind")
    ledger.launch(b, "read", reads=[buffer])
    ledger.wait(b, event)
    assert causes(ledger) == ["stream_order"]


def test_a_second_event_tells_of_what_the_stream_waited_for_between(ledger: Ledger) -> None:
    a, b, c = (ledger.stream(name, "compute") for name in "abc")
    buffer = ledger.buffer("x")
    ledger.launch(b, "something")
    first = ledger.record(b, "first")
    ledger.wait(c, first)
    ledger.launch(a, "write", writes=[buffer])
    ledger.wait(b, ledger.record(a, "e"))
    ledger.wait(c, ledger.record(b, "second"))
    ledger.launch(c, "read", reads=[buffer])
    assert causes(ledger) == []


def test_a_host_that_synchronised_orders_what_it_launches_next(ledger: Ledger) -> None:
    a, b = ledger.stream("a", "compute"), ledger.stream("b", "copy")
    buffer = ledger.buffer("x")
    mark = ledger.launch(a, "write", writes=[buffer])
    ledger.sync(mark)
    ledger.launch(b, "read", reads=[buffer])
    ledger.read(buffer, "look")
    assert causes(ledger) == []


def test_a_host_that_did_not_is_told(ledger: Ledger) -> None:
    a = ledger.stream("a", "compute")
    buffer = ledger.buffer("x")
    ledger.launch(a, "write", writes=[buffer])
    ledger.read(buffer, "look")
    assert summaries(ledger) == ["main reads x without waiting for a, which writes it"]


def test_queues_between_threads(ledger: Ledger) -> None:
    buffer = ledger.buffer("x")
    ledger.write(buffer, "fill")
    mark = ledger.release("queue")
    ledger.write(buffer, "fill again")

    def consumer() -> None:
        ledger.acquire(mark)
        ledger.read(buffer, "use")

    in_thread("worker", consumer)
    assert summaries(ledger) == ["worker reads x without waiting for main, which writes it"], "the second write"
    assert [(p.name, c.name, via, n) for p, c, via, n in ledger.handoffs] == [("main", "worker", "queue", 1)]


def test_two_writers_without_order(ledger: Ledger) -> None:
    a, b = ledger.stream("a", "compute"), ledger.stream("b", "compute")
    buffer = ledger.buffer("x")
    ledger.launch(a, "write", writes=[buffer])
    ledger.launch(b, "write", writes=[buffer])
    assert summaries(ledger) == ["b rewrites x while a may still write it"]


def test_one_pair_of_sites_is_one_finding_with_a_count(ledger: Ledger) -> None:
    a, b = ledger.stream("a", "compute"), ledger.stream("b", "copy")
    buffer = ledger.buffer("x")
    for _ in range(5):
        ledger.launch(a, "write", writes=[buffer])
        ledger.launch(b, "read", reads=[buffer])
    # a never waits for b's read either: the other half of the same mistake.
    first, second = ledger.findings()
    assert first.evidence[-1] == "seen 5 times"
    assert second.summary == "stage 0: a rewrites x while b may still read it"
    assert second.evidence[-1] == "seen 4 times"


def test_streams_have_one_owner_and_an_end(ledger: Ledger) -> None:
    stream = ledger.stream("s", "compute")
    in_thread("other", lambda: ledger.launch(stream, "kernel") and None)
    assert summaries(ledger) == ["thread other launches on stream s, which thread main owns"]
    ledger.switch(False)
    ledger.switch(True)
    ledger.close(stream)
    ledger.launch(stream, "kernel")
    assert summaries(ledger) == ["thread main launches on stream s, which is destroyed"]
    assert any("destroyed at engine/test_streams_ledger.py:" in line for line in ledger.findings()[0].evidence)


def test_devices_of_stream_thread_and_buffer(ledger: Ledger) -> None:
    ledger.thread(device="cuda:1")
    stream = ledger.stream("s", "compute", "cuda:1")
    ledger.launch(stream, "kernel", reads=[ledger.buffer("there", "cuda:1")])
    assert causes(ledger) == []
    ledger.launch(stream, "kernel", reads=[ledger.buffer("elsewhere", "cuda:0")])
    assert summaries(ledger) == ["stream s of cuda:1 is used with buffer elsewhere of cuda:0"]
    ledger.thread(device="cuda:0")
    ledger.launch(stream, "kernel")
    assert summaries(ledger)[1] == "stream s of cuda:1 is used with thread main of cuda:0"


def test_a_stuck_stream_is_named_once_its_time_is_over(ledger: Ledger) -> None:
    stream = ledger.stream("s", "compute")
    mark = ledger.launch(stream, "kernel that never ends")
    ledger.check_stuck(60.0)
    assert causes(ledger) == []
    time.sleep(0.002)
    ledger.check_stuck(0.001)
    assert summaries(ledger) == ["stream s is stuck in kernel that never ends"]
    ledger.switch(False)
    ledger.switch(True)
    mark = ledger.launch(stream, "kernel")
    ledger.completed(mark)
    time.sleep(0.002)
    ledger.check_stuck(0.001)
    assert causes(ledger) == []


def test_what_is_done_takes_along_what_it_has_waited_for(ledger: Ledger) -> None:
    fill, compute = ledger.stream("fill", "copy"), ledger.stream("c", "steps")
    ledger.launch(fill, "zeroing")
    ledger.wait(compute, ledger.record(fill, "zeroed"))
    ledger.launch(fill, "more zeroing")
    ledger.launch(compute, "layers")
    ledger.sync(ledger.record(compute, "done"))
    assert [(one.op, one.pending) for one in picture(ledger, stage=0, rank=0).streams] == [("more zeroing", 1), ("", 0)]


def test_a_stage_at_the_other_end_acts_behind_what_it_has_seen(ledger: Ledger) -> None:
    stream, peer = ledger.stream("c", "steps"), ledger.peer("stage 1")
    slot = ledger.buffer("slot")
    ledger.launch(stream, "send", writes=[slot])
    read = ledger.peer_does(peer, "receive", ledger.record(stream, "FILLED"), reads=[slot])
    ledger.wait(stream, read)
    ledger.launch(stream, "send", writes=[slot])
    assert summaries(ledger) == []
    ledger.peer_does(peer, "receive", reads=[slot])
    (finding,) = ledger.findings()
    assert finding.summary == "stage 0: stage 1 reads slot without waiting for c, which writes it"
    assert finding.evidence[1].startswith("read by: receive on stage 1, at engine/test_streams_ledger.py:")
    assert [(p.name, c.name, via, n) for p, c, via, n in ledger.handoffs] == [
        ("c", "stage 1", "FILLED", 1), ("stage 1", "c", "receive", 1),
    ]  # fmt: skip


def test_connections_and_pinned_memory_are_of_every_device(ledger: Ledger) -> None:
    ledger.thread(device="cuda:1")
    wire, upload = ledger.stream("send>1", "send"), ledger.stream("upload", "upload", "cuda:1")
    pinned = ledger.buffer("recv<0 buffer")
    ledger.sync(ledger.launch(wire, "receive", writes=[pinned]))
    ledger.launch(upload, "upload", reads=[pinned])
    assert causes(ledger) == []


def test_switching_forgets(ledger: Ledger) -> None:
    a, b = ledger.stream("a", "compute"), ledger.stream("b", "copy")
    buffer = ledger.buffer("x")
    ledger.launch(a, "write", writes=[buffer])
    stale = ledger.record(a, "e")
    ledger.launch(b, "read", reads=[buffer])
    assert causes(ledger)
    ledger.switch(False)
    assert causes(ledger) == []
    ledger.switch(True)
    # What was launched before is not known: no finding, and no order from an event of then.
    ledger.launch(b, "read", reads=[buffer])
    assert causes(ledger) == []
    ledger.launch(a, "write", writes=[buffer])
    ledger.wait(b, stale)
    ledger.launch(b, "read", reads=[buffer])
    assert len(causes(ledger)) == 2, "a rewrites under b, b reads without a wait"


def test_the_picture_shows_streams_hand_offs_and_who_still_reads(ledger: Ledger) -> None:
    compute, send = ledger.stream("compute", "compute", "cuda:0"), ledger.stream("send", "send to stage 1", "cuda:0")
    buffer = ledger.buffer("hidden", "cuda:0", 64)
    ledger.launch(compute, "forward of m1", writes=[buffer])
    ledger.wait(send, ledger.record(compute, "filled"))
    mark = ledger.launch(send, "send of m1", reads=[buffer])
    shown = picture(ledger, stage=2, rank=0)
    assert [(s.name, s.owner, s.purpose, s.alive, s.op, s.pending) for s in shown.streams] == [
        ("compute", "main", "compute", True, "forward of m1", 1),
        ("send", "main", "send to stage 1", True, "send of m1", 1),
    ]
    assert [(h.producer, h.consumer, h.event, h.count) for h in shown.handoffs] == [
        ("stream compute", "stream send", "filled", 1)
    ]
    (row,) = shown.buffers
    assert (row.generation, row.writer) == (1, "forward of m1 (stream compute)")
    assert row.in_flight == row.readers == ["send of m1 (stream send)"]
    ledger.sync(mark)
    (row,) = picture(ledger, stage=2, rank=0).buffers
    assert (row.readers, row.in_flight) == (["send of m1 (stream send)"], [])
    assert [s.pending for s in picture(ledger, stage=2, rank=0).streams] == [0, 0], "what it waited for is done, too"


class Storage:
    """Anything that lives at an address."""


def test_storage_that_ends_is_freed_and_may_come_again(ledger: Ledger) -> None:
    buffers = StorageBuffers(ledger, "send")
    storage = Storage()
    buffer = buffers.of(storage, 0x1000, 64)
    ledger.write(buffer, "fill")
    mark = ledger.release("queue")

    def worker() -> None:
        ledger.acquire(mark)
        ledger.read(buffer, "send")

    in_thread("send", worker)
    # Kept and filled again, nothing orders the reader before it: a rewrite in flight.
    assert buffers.of(storage, 0x1000, 64) is buffer
    ledger.write(buffer, "fill again")
    assert summaries(ledger) == ["main rewrites send 0 while send may still read it"]


def test_storage_freed_by_its_reader_is_fit_to_be_reused(ledger: Ledger) -> None:
    buffers = StorageBuffers(ledger, "send")
    held = [Storage()]
    buffer = buffers.of(held[0], 0x1000, 64)
    ledger.write(buffer, "fill")
    mark = ledger.release("queue")

    def worker() -> None:
        ledger.acquire(mark)
        ledger.read(buffer, "send")
        held.clear()

    in_thread("send", worker)
    again = Storage()
    assert buffers.of(again, 0x1000, 64) is buffer
    ledger.write(buffer, "fill")
    assert causes(ledger) == []
    assert buffer.generation == 4, "issued, filled, issued, filled"


def test_storage_freed_under_a_stream_is_found(ledger: Ledger) -> None:
    buffers, stream = StorageBuffers(ledger, "send"), ledger.stream("wire", "send")
    held = [Storage()]
    buffer = buffers.of(held[0], 0x1000, 64)
    ledger.write(buffer, "fill")
    ledger.launch(stream, "send", reads=[buffer])
    held.clear()
    assert summaries(ledger) == ["main frees send 0 while wire may still read it"]
    assert any("freed by: end of the storage on thread main, at engine/test_streams" in e
               for e in ledger.findings()[0].evidence)  # fmt: skip


@pytest.mark.parametrize("waits", [True, False])
def test_storage_that_a_collector_frees_in_another_thread_is_freed_behind_its_users(
    ledger: Ledger, waits: bool
) -> None:
    buffers, stream = StorageBuffers(ledger, "copy out"), ledger.stream("compute", "steps")
    held = [Storage()]
    buffer = buffers.of(held[0], 0x1000, 64)
    ledger.launch(stream, "copy", writes=[buffer])
    if waits:
        ledger.sync(ledger.record(stream, "copied"))
    in_thread("kv-map", held.clear)
    assert summaries(ledger) == ([] if waits else ["kv-map frees copy out 0 while compute may still write it"])


def test_the_pool_gives_out_what_came_back_last(ledger: Ledger) -> None:
    runtime = FakeRuntime(ledger)
    pool, stream = LifoPool(runtime), runtime.stream("s", "compute")
    first, second = pool.take(2, "a", stream), pool.take(2, "b", stream)
    second.data[:] = [8.0, 8.0]
    pool.give(first, stream)
    pool.give(second, stream)
    assert pool.take(2, "c", stream) is second
    assert second.data == [8.0, 8.0]
    runtime.close()
    with pytest.raises(FakeError, match="400"):
        stream.launch("late", lambda: None)
    assert summaries(ledger) == ["thread main launches on stream s, which is destroyed"]


def test_what_it_costs() -> None:
    """Microseconds when on; off is the caller's look at one attribute."""
    ledger = Ledger(0)
    ledger.thread("main")
    a, b = ledger.stream("a", "compute"), ledger.stream("b", "copy")
    buffer = ledger.buffer("x")
    ledger.switch(True)
    count = 2000
    begun = time.perf_counter()
    for _ in range(count):
        ledger.launch(a, "write", writes=[buffer])
        ledger.wait(b, ledger.record(a, "e"))
        ledger.launch(b, "read", reads=[buffer])
        ledger.wait(a, ledger.record(b, "e"))
    each = (time.perf_counter() - begun) / (6 * count)
    print(f"{each * 1e6:.2f} µs a declaration")
    assert causes(ledger) == []
    assert each < 100e-6
