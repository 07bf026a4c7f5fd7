"""The recorder's ring: what is read is whole, or it is not read."""

import multiprocessing
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ppengine.common.ring import HEADER_BYTES, Gauge, Kind, Phase, RingReader, RingWriter, Word, shape_code, shape_text
from ppengine.stage.recorder import Recorder


def test_an_operation_is_seen_open_and_then_ended(tmp_path):
    writer = RingWriter(tmp_path / "r", "main", stage=1, rank=0, capacity=8)
    reader = RingReader(tmp_path / "r")
    writer.generation = 5
    seq = writer.begin(Kind.RECEIVE, step=9, peer=0, size=64)
    first = reader.record(seq)
    assert (first.kind, first.step, first.peer, first.size, first.generation) == (Kind.RECEIVE, 9, 0, 64, 5)
    assert first.done_ns == 0
    writer.end(seq)
    second = reader.record(seq)
    assert first.enqueued_ns <= second.done_ns and second.returned_ns == 0
    assert reader.name == "main" and reader.word(Word.STAGE) == 1


def test_what_was_measured_elsewhere_is_one_whole_record(tmp_path):
    writer = RingWriter(tmp_path / "r", "main", 0, 0, capacity=8)
    reader = RingReader(tmp_path / "r")
    writer.generation = 3
    times = {"begun_ns": 100, "returned_ns": 130, "done_ns": 150}
    assert writer.begin(Kind.ON_DEVICE, step=9, size=4, detail=40, **times) == writer.begin(Kind.STEP) - 1
    first = reader.record(1)
    assert (first.kind, first.step, first.size, first.detail, first.generation) == (Kind.ON_DEVICE, 9, 4, 40, 3)
    assert (first.enqueued_ns, first.returned_ns, first.done_ns, first.peer, first.code) == (100, 130, 150, -1, 0)


def test_counts_of_an_engine_that_runs_for_years_do_not_end_it(tmp_path):
    """Step, message number and context have 32 bits in a record; a thousand messages a second fill them in 50 days."""
    ring = Recorder(tmp_path / "main", "main", 0, 0)
    ring.begin(Kind.SEND, 2**32 + 5, 1, 8, 2**32 + 7)
    ring.part(Kind.FORWARD, 2**32 + 6, detail=2**33 + 1)
    (sent, part) = RingReader(tmp_path / "main").latest(2)
    assert (sent.step, sent.detail, part.step, part.detail) == (5, 7, 6, 1)
    ring.close()


@pytest.mark.parametrize(
    ("dtype", "width", "size", "text"),
    [
        ("float64", 64, 1024, "float64[2, 64] 1024 B"), ("bfloat16", 4096, 8192, "bfloat16[1, 4096] 8192 B"),
        ("int64", 1, 24, "int64[3, 1] 24 B"), ("bool", 2, 4, "bool[2, 2] 4 B"), ("complex64", 2, 16, "16 B"),
    ],
)  # fmt: skip
def test_the_shape_of_a_message_fits_32_bits(dtype, width, size, text):
    assert shape_text(size, shape_code(dtype, width)) == text and shape_code(dtype, width) < 2**32


def test_parts_of_a_step_follow_each_other_without_a_gap(tmp_path):
    ring = Recorder(tmp_path / "r", "main", 0, 0, capacity=8)
    reader = RingReader(tmp_path / "r")
    with ring.operation(Kind.STEP, 3):
        ring.part(Kind.RECEIVE, 3, peer=1)
        ring.part(Kind.FORWARD, 3, size=4, detail=8)
        assert [record.done_ns == 0 for record in reader.since(0)] == [True, False, True]
        ring.end_part()
        ring.end_part()
    step, receive, forward = reader.since(0)
    assert (receive.kind, receive.peer, forward.kind, forward.size, forward.detail) == (
        Kind.RECEIVE,
        1,
        Kind.FORWARD,
        4,
        8,
    )
    assert step.enqueued_ns <= receive.enqueued_ns <= receive.done_ns <= forward.enqueued_ns <= forward.done_ns
    assert forward.done_ns <= step.done_ns and reader.word(Word.HEAD) == 3


def test_gauges_phase_and_ticks(tmp_path):
    writer = RingWriter(tmp_path / "r", "main", 0, 0)
    reader = RingReader(tmp_path / "r")
    writer.gauge(Gauge.BLOCK_BYTES, 2**40)
    writer.phase(Phase.SERVING)
    writer.tick()
    writer.tick()
    assert reader.gauge(Gauge.BLOCK_BYTES) == 2**40
    assert reader.word(Word.PHASE) == Phase.SERVING and reader.word(Word.MAIN_TICKS) == 2
    assert reader.word(Word.MAIN_TICK_NS) >= reader.word(Word.PHASE_NS) > 0


@settings(max_examples=60, deadline=None)
@given(capacity=st.integers(4, 16), written=st.integers(0, 60), seen=st.integers(0, 60))
def test_since_gives_what_the_ring_still_holds(tmp_path_factory, capacity, written, seen):
    path = tmp_path_factory.mktemp("ring") / "r"
    writer = RingWriter(path, "main", 0, 0, capacity)
    reader = RingReader(path)
    for step in range(1, written + 1):
        writer.end(writer.begin(Kind.FORWARD, step=step))
    got = [record.seq for record in reader.since(seen)]
    # The oldest slot is where the writer would write next: it is never trusted.
    assert got == list(range(max(seen + 1, written - capacity + 2, 1), written + 1))
    assert all(record.step == record.seq for record in reader.since(seen))
    assert reader.rows(seen) == [tuple(record) for record in reader.since(seen)]
    assert [r.seq for r in reader.latest(3)] == [seq for seq in got if seq > written - 3] or seen > written - 3


def test_a_lapped_operation_is_not_touched(tmp_path):
    writer = RingWriter(tmp_path / "r", "main", 0, 0, capacity=4)
    reader = RingReader(tmp_path / "r")
    old = writer.begin(Kind.SEND)
    for _ in range(4):
        writer.begin(Kind.FORWARD)
    writer.end(old)
    assert reader.record(old) is None
    assert all(record.returned_ns == record.done_ns == 0 for record in reader.since(0))


def test_what_is_no_ring_is_refused(tmp_path):
    for name, content in {"empty": b"", "short": b"PPRING", "zeros": bytes(8192)}.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"not a recorder ring|empty"):
            RingReader(path)
    RingWriter(tmp_path / "cut", "main", 0, 0, capacity=64).close()
    with (tmp_path / "cut").open("r+b") as file:
        file.truncate(HEADER_BYTES + 64)
    with pytest.raises(ValueError, match="not a recorder ring"):
        RingReader(tmp_path / "cut")


def _write(path, count):
    writer = RingWriter(path, "main", 0, 0, capacity=64)
    for step in range(1, count + 1):
        seq = writer.begin(Kind.FORWARD, step=step, size=step * 3)
        writer.end(seq)


def test_no_torn_record_from_a_writer_at_full_speed(tmp_path):
    path, count = tmp_path / "r", 60_000
    process = multiprocessing.get_context("fork").Process(target=_write, args=(path, count))
    process.start()
    try:
        reader = None
        while reader is None:
            try:
                reader = RingReader(path)
            except (OSError, ValueError):
                continue
        looked = 0
        while process.is_alive() or looked == 0:
            for record in reader.since(0):
                assert record.step == record.seq and record.size == record.seq * 3
                assert record.done_ns == 0 or record.done_ns >= record.enqueued_ns
                looked += 1
    finally:
        process.join()
    assert [record.seq for record in reader.since(count - 10)] == list(range(count - 9, count + 1))


def test_a_header_of_another_version_is_refused(tmp_path):
    writer = RingWriter(tmp_path / "r", "main", 0, 0)
    writer.close()
    with (tmp_path / "r").open("r+b") as file:
        file.write(struct.pack("<Q", 7))
    with pytest.raises(ValueError, match="not a recorder ring"):
        RingReader(tmp_path / "r")


def test_a_ring_is_this_users_alone_and_takes_the_place_of_its_predecessors(tmp_path):
    path = tmp_path / "rings" / "r"
    first = RingWriter(path, "main", 0, 0, capacity=8)
    first.begin(Kind.IDLE)
    known = RingReader(path)
    second = RingWriter(path, "main", 0, 0, capacity=8)
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert (known.word(Word.HEAD), RingReader(path).word(Word.HEAD)) == (1, 0), "who has mapped the old one keeps it"
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    RingWriter(path, "main", 0, 0, capacity=8).close()
    assert not path.is_symlink() and not (tmp_path / "elsewhere").exists()
    first.close(), second.close()
