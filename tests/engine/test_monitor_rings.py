"""From records to what a stage does."""

import pytest
from monitor_helpers import record
from ppengine.agent.rank_waits import RankWaits
from ppengine.agent.ring_state import op_text, stream_info, waiting_on
from ppengine.agent.step_history import History
from ppengine.common.groups import Groups
from ppengine.common.ring import Kind
from ppengine.diagnosis.budgets import expected_ms
from ppengine.protocol.place import Place

MS = 1_000_000


def fed(*records):
    history = History()
    history.feed(records)
    return history


def step_of(seq, begin, end, step=1):
    """A step with a receive of 4 ms and, in a send of 2 ms, 1 ms without room at its ends."""
    return [
        record(seq, Kind.STEP, begin, end, step=step),
        record(seq + 1, Kind.RECEIVE, begin, begin + 4, step=step, peer=0),
        record(seq + 2, Kind.FORWARD, begin + 4, end - 2, step=step, size=8),
        record(seq + 3, Kind.SEND, end - 2, end, step=step, peer=2),
        record(seq + 4, Kind.ROOM, end - 2, end - 1, step=step, peer=2),
    ]


def test_the_open_operation_is_the_innermost():
    track = fed(record(1, Kind.STEP, 1, step=4), record(2, Kind.FORWARD, 2, step=4))
    assert track.open_op().kind == Kind.FORWARD
    track.feed([record(2, Kind.FORWARD, 2, 3, step=4)])
    assert track.open_op().kind == Kind.STEP
    track.feed([record(1, Kind.STEP, 1, 4, step=4)])
    assert track.open_op() is None


def test_what_an_exception_left_open_is_forgotten_with_the_next_step():
    track = fed(record(1, Kind.STEP, 1), record(2, Kind.FORWARD, 2), record(3, Kind.IDLE, 5, 6))
    assert track.open_op() is None


def test_an_asynchronous_send_does_not_hold_the_thread():
    track = fed(record(1, Kind.SEND, 1, returned_ns=2 * MS, peer=1), record(2, Kind.IDLE, 3))
    assert track.open_op().kind == Kind.IDLE
    assert [pending.kind for pending in track.unfinished()] == [Kind.SEND]
    assert stream_info("main", "main", track, 9 * MS).pending == 1


def test_own_work_leaves_waits_out():
    track = fed(*step_of(1, 10, 30), *step_of(6, 30, 60))
    assert track.step_ms(100 * MS) == (15.0, 25.0)
    assert track.step_ms(20_000 * MS) == (None, None)


def test_a_wait_for_tokens_is_no_work_though_it_is_of_the_step_that_samples_them():
    step = record(1, Kind.STEP, 10, 40, step=9, size=1)
    tokens = record(2, Kind.TOKEN_RETURN, 11, 36, step=8, peer=1)
    track = fed(step, tokens, record(3, Kind.FORWARD, 36, 39, step=9, size=1))
    assert track.step_ms(100 * MS) == (5.0, 5.0)
    assert track.work_ms() == [(1, pytest.approx(3.0))]


def test_waits_for_other_ranks_are_no_work_of_the_part_that_they_are_in():
    """A rank that waits for a late one is neither slower nor longer at work than it was."""
    track = fed(
        record(1, Kind.STEP, 10, 50, step=9, size=1),
        record(2, Kind.ALL_REDUCE, 11, 12, step=9, peer=1),
        record(3, Kind.FORWARD, 13, 33, step=9, size=1),
        record(4, Kind.ALL_REDUCE, 15, 30, step=9, peer=1),
        record(5, Kind.SAMPLE, 34, 49, step=9),
        record(6, Kind.ALL_GATHER, 36, 48, step=9, peer=1),
    )
    assert track.work_ms() == [(1, pytest.approx(5.0 + 3.0))]
    assert track.step_ms(100 * MS) == (12.0, 12.0)


def test_idle_is_the_share_of_waits_in_the_window():
    track = fed(*step_of(1, 0.001, 20), record(6, Kind.IDLE, 20))
    # 5 of 20 ms waited in the step, then 20 ms idle.
    assert track.idle_fraction(40 * MS) == pytest.approx(25 / 40, abs=1e-3)
    assert track.idle_fraction(60_000 * MS) == 1.0
    assert History().idle_fraction(5 * MS) is None


def test_the_timeline_is_in_ms_ago_and_leaves_whole_steps_out():
    track = fed(*step_of(1, 10, 30, step=7), record(6, Kind.IDLE, 30))
    assert track.timeline(50 * MS) == [
        [Kind.RECEIVE, 7, 40.0, 4.0],
        [Kind.FORWARD, 7, 36.0, 14.0],
        [Kind.ROOM, 7, 22.0, 1.0],
        [Kind.SEND, 7, 22.0, 2.0],
        [Kind.IDLE, 0, 20.0, 20.0],
    ]


def test_a_wait_for_a_rank_names_it():
    part = record(1, Kind.ALL_REDUCE, 1, peer=1, step=7)
    waiting = waiting_on(part, 5 * MS, 2)
    assert (waiting.stage, waiting.rank, waiting.what, waiting.since_ms) == (2, 1, "collective", 4.0)
    shown = stream_info("main", "main", fed(part), 5 * MS, Place(2, 0), Groups(4, 2))
    assert (shown.op, shown.waits_for) == ("all_reduce<1 m7", "stage 2 rank 1")
    message = fed(record(1, Kind.RECEIVE, 1, peer=1, step=7))
    assert stream_info("main", "main", message, 5 * MS, Place(2, 1), Groups(4, 2)).waits_for == "stage 1 rank 1"
    assert stream_info("main", "main", message, 5 * MS, Place(2, 0), Groups(4)).waits_for == "stage 1"


def test_the_share_of_waits_for_ranks_is_that_of_the_last_second():
    waits = RankWaits()
    assert waits.share(0, 0, None) is None
    assert waits.share(500 * MS, 100 * MS, None) == 0.2
    assert waits.share(1000 * MS, 600 * MS, None) == 0.6
    assert waits.share(2000 * MS, 600 * MS, None) == 0.0
    assert waits.share(2500 * MS, 600 * MS, record(1, Kind.ALL_GATHER, 2250, peer=1)) == pytest.approx(250 / 1500, 0.01)
    assert waits.share(2500 * MS, 600 * MS, record(1, Kind.RECEIVE, 2250, peer=1)) is not None


def test_whom_an_operation_waits_for():
    assert waiting_on(record(1, Kind.FORWARD, 1), 5 * MS) is None
    assert waiting_on(None, 5) is None
    waiting = waiting_on(record(1, Kind.RECEIVE, 1, peer=3), 5 * MS)
    assert (waiting.stage, waiting.what, waiting.since_ms) == (3, "receive", 4.0)
    assert waiting_on(record(1, Kind.IDLE, 1), 5 * MS).what == "step"
    assert waiting_on(record(1, Kind.SEND, 1, peer=2), 5 * MS) is None, "the kernel takes it at once"
    for waits in (record(1, Kind.ROOM, 1, peer=2), record(1, Kind.SEND, 1, returned_ns=2 * MS, peer=2)):
        waiting = waiting_on(waits, 5 * MS)
        assert (waiting.stage, waiting.what) == (2, "send"), "what it does not take waits for the peer"


def test_operations_in_words():
    assert op_text(record(1, Kind.SEND, 1, peer=2, step=6)) == "send>2 m6"
    assert op_text(record(1, Kind.RECEIVE, 1, peer=0)) == "receive<0"
    assert op_text(record(1, 99, 1)) == "kind99"


def test_history_of_work_scales():
    track = fed(record(1, Kind.FORWARD, 0.001, 10, size=8), record(2, Kind.FORWARD, 20, 100, size=100))
    history = track.work_ms()
    assert [tokens for tokens, _ in history] == [8, 128]
    assert expected_ms(history, 3) == pytest.approx(10, abs=0.1)
    assert expected_ms(history, 68) == pytest.approx(45, abs=0.1), "half way"
    assert expected_ms(history, 128) == pytest.approx(80, abs=0.1)
    assert expected_ms(history, 256) == pytest.approx(160, abs=0.1)
    assert expected_ms([], 1) is None
    assert expected_ms([(1, 9.0), (64, 3.0)], 32) == 9.0, "more work is not expected to take less time"


def test_a_forward_that_hung_is_not_expected_again():
    track = fed(record(1, Kind.STEP, 1, 11, step=1, size=8), record(2, Kind.FORWARD, 1, 11, step=1, size=8))
    track.feed([record(3, Kind.STEP, 20, 4020, step=2, size=8), record(4, Kind.FORWARD, 20, 4020, step=2, size=8)])
    assert track.work_ms() == [(8, pytest.approx(10.0))]
    assert track.step_ms(5000 * MS) == (10.0, 4000.0), "it is shown"
    track.feed([record(5, Kind.STEP, 5000, 9000, step=3, size=8), record(6, Kind.FORWARD, 5000, 9000, step=3, size=8)])
    assert track.work_ms() == [(8, pytest.approx(4000.0))], "two in a row are work"


def test_head_and_sampling_are_expected_and_no_slowness_of_the_stage():
    step = record(1, Kind.STEP, 0.001, 100, size=4)
    parts = (
        record(2, Kind.FORWARD, 1, 11, size=4),
        record(3, Kind.HEAD, 11, 31, size=4),
        record(4, Kind.SAMPLE, 31, 91, size=4),
    )
    track = fed(step, *parts)
    assert track.work_ms() == [(4, pytest.approx(90, abs=0.1))]
    assert list(track.pace._second.values()) == [[1, pytest.approx(40, abs=0.1)]]


# --- a stage on a device ------------------------------------------------------------------------------------


def on_device(seq, begin, end, step=1, sampled_from=None, **more):
    """What a device did for a step of 8 tokens; layers and head up to `sampled_from`."""
    through = int((end if sampled_from is None else sampled_from) * MS)
    return record(seq, Kind.ON_DEVICE, begin, end, step=step, size=8, detail=80, returned_ns=through, **more)


def launched(seq, begin, step):
    """A step that a host launches in 2 ms."""
    return record(seq, Kind.STEP, begin, begin + 2, step=step, size=8), record(
        seq + 1, Kind.FORWARD, begin, begin + 1, step=step, size=8
    )


def test_the_work_of_a_stage_on_a_device_is_the_devices():
    track = fed(*launched(1, 10, 1), *launched(3, 13, 2), on_device(5, 11, 31, 1, sampled_from=26))
    track.feed([on_device(6, 31, 61, 2), record(7, Kind.IDLE, 15, 61)])
    assert track.step_ms(100 * MS) == (20.0, 30.0)
    assert track.work_ms() == [(8, 30.0)]
    assert list(track.pace._second.values()) == [[2, pytest.approx(45)]], "without sampling"
    assert track.idle_fraction(110 * MS) == pytest.approx(0.5), "50 of 100 ms, whatever the host did"
    assert track.last_op().kind == Kind.IDLE


def test_launches_before_the_first_that_a_device_has_done_are_forgotten():
    """Whoever begins to read in the midst finds steps whose work is not done yet."""
    track = fed(*launched(1, 10, 1), *launched(3, 13, 2))
    assert track.step_ms(100 * MS)[0] == 2.0
    track.feed([on_device(5, 11, 31, 1)])
    assert track.step_ms(100 * MS) == (20.0, 20.0) and track.work_ms() == [(8, 20.0)]
    assert list(track.pace._second.values()) == [[1, pytest.approx(20)]]


def test_boot_tells_what_a_device_takes_before_the_first_step():
    forward = record(1, Kind.FORWARD, 1, 3, size=2048)
    track = fed(forward, record(2, Kind.ON_DEVICE, 1, 4001, size=2048, returned_ns=4001 * MS))
    track.feed(launched(3, 5000, 1))
    assert expected_ms(track.work_ms(), 2048) == 4000.0
    assert expected_ms(track.work_ms(), 8) > 15, "a launch is no history"
    assert track.step_ms(6000 * MS) == (None, None) and track.idle_fraction(6000 * MS) == 1.0


def test_the_idle_share_of_a_device_is_of_the_window():
    track = fed(*launched(1, 1, 1), on_device(3, 1, 2001))
    track.feed([on_device(4, 6000, 9000, 2)])
    assert track.idle_fraction(11_000 * MS) == pytest.approx(0.6, abs=1e-3), "1 of the first 2 s is behind the window"
    assert track.idle_fraction(30_000 * MS) == 1.0
    assert track.idle_fraction(11_000 * MS) == pytest.approx(1.0), "what is past is forgotten"


def test_the_timeline_has_what_a_device_did():
    track = fed(*launched(1, 10, 7), on_device(3, 11, 31, 7))
    assert track.timeline(50 * MS) == [[Kind.FORWARD, 7, 40.0, 1.0], [Kind.ON_DEVICE, 7, 39.0, 20.0]]


def test_open_operations_are_bounded():
    track = fed(*(record(seq, Kind.SEND, seq, returned_ns=1) for seq in range(1, 500)))
    assert len(track.pending()) == 64 and max(track.pending()) == 499
    track.feed([], gone=track.pending())
    assert track.pending() == []
