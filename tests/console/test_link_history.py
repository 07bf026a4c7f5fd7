"""Recordings by time: segments of a gateway, seek, pause and speed."""

from __future__ import annotations

import asyncio
import gzip
import threading
from pathlib import Path

import pytest
import snapshots
from link_helpers import Seen
from ppconsole.link import minutes as kept
from ppconsole.link.history import History, Moment
from ppconsole.link.replay import ReplaySource
from ppengine.protocol.inspection import FindingsDetail
from ppengine.protocol.recording import Recorder, Recording, RecordingError
from ppengine.protocol.snapshot import Event, Snapshot

BEGIN = 1_700_000_000.0


def picture(step: int) -> Snapshot:
    made = snapshots.snapshot(2, 1)
    made.engine.step = step
    return made


def event(number: int) -> Event:
    return Event(seq=number, wall=BEGIN + number, kind="test.event", text=f"event {number}")


def segment(folder: Path, begin: float, count: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write `count` seconds from `begin` on: a snapshot and an event a second, step and seq are the seconds."""
    path = folder / f"{int(begin * 1e3):015d}.rec"
    path.parent.mkdir(parents=True, exist_ok=True)
    now = [0.0]
    monkeypatch.setattr("time.time", lambda: begin)
    with Recorder(path, engine="f00d", name="fake", packed=True, clock=lambda: now[0]) as recorder:
        for second in range(count):
            now[0] = float(second)
            recorder.write(picture(int(begin - BEGIN) + second))
            recorder.write(event(int(begin - BEGIN) + second))
    monkeypatch.undo()
    return path


def count(past: History) -> int:
    place, found = past.first, 0
    while place is not None:
        place, found = past.after(place), found + 1
    return found


@pytest.fixture
def minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Three minutes, the second of which was not kept."""
    return [segment(tmp_path / "h", BEGIN + at, 60, monkeypatch) for at in (0, 120)]


def test_segments_are_one_past(minutes: list[Path]) -> None:
    past = History.of_segments(minutes)
    assert (past.begin, past.end) == (BEGIN, BEGIN + 179)
    moment = past.at(BEGIN + 30.5)
    assert moment.snapshot is not None and moment.snapshot.engine.step == 30
    assert [one.seq for one in moment.events] == list(range(31))
    later = past.at(BEGIN + 121.0, events_most=3)
    assert [one.seq for one in later.events] == [59, 120, 121]
    assert past.at(BEGIN - 100.0).snapshot is not None, "before the first snapshot that one counts"
    past.close()


def test_a_segment_in_two_folders_counts_once(
    minutes: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = segment(tmp_path / "incident", BEGIN, 60, monkeypatch)
    assert count(History.of_segments([*minutes, again])) == count(History.of_segments(minutes)) == 240


def test_a_segment_that_is_written_now_is_read_up_to_there(minutes: list[Path]) -> None:
    minutes[1].write_bytes(minutes[1].read_bytes()[:-200])
    (minutes[0].parent / "000000000000001.rec").write_bytes(b"")
    past = History.of_segments(minutes[0].parent.glob("*.rec"))
    assert past.error is None and BEGIN + 120 < past.end < BEGIN + 180


def test_details_are_those_of_the_moment(tmp_path: Path) -> None:
    now = [0.0]
    with Recorder(tmp_path / "a.ppr", engine="e", name="n", clock=lambda: now[0]) as recorder:
        recorder.write(picture(0))
        now[0] = 5.0
        recorder.write_detail("findings", FindingsDetail(findings=[]))
        now[0] = 9.0
        recorder.write(picture(9))
    past = History(tmp_path / "a.ppr")
    assert past.at(past.begin + 4).details == {} and set(past.at(past.begin + 6).details) == {"findings"}


async def test_seek_delivers_the_moment_and_goes_on_from_there(minutes: list[Path]) -> None:
    source, seen = ReplaySource(History.of_segments(minutes), speed=60.0, paused=True), Seen()
    await source.start(seen.take)
    source.seek(BEGIN + 40.2)
    await asyncio.sleep(0.1)
    assert (seen.snapshots[-1].engine.step, len(seen.events), source.position) == (40, 41, BEGIN + 40.2)
    source.set_paused(False)
    await seen.until(lambda seen: seen.snapshots[-1].engine.step >= 45)
    source.set_paused(True)
    held = source.position
    assert BEGIN + 44 < held < BEGIN + 60
    source.seek(BEGIN + 10)
    await asyncio.sleep(0.1)
    assert seen.snapshots[-1].engine.step == 10 and source.position == BEGIN + 10, "back in time, and it stays"
    await source.close()


async def test_minutes_that_were_not_kept_are_skipped(minutes: list[Path]) -> None:
    source, seen = ReplaySource(History.of_segments(minutes), speed=2.0, begin=BEGIN + 59.0), Seen()
    await source.start(seen.take)
    await seen.until(lambda seen: seen.snapshots[-1].engine.step >= 120, seconds=5)
    assert source.position < BEGIN + 130
    await source.close()


async def test_from_the_end_one_can_go_back(minutes: list[Path]) -> None:
    source, seen = ReplaySource(History.of_segments(minutes), speed=0), Seen()
    await source.start(seen.take)
    await asyncio.wait_for(source.played(), 10)
    assert seen.texts[-1] == "end of the recording" and source.position == BEGIN + 179
    source.set_paused(True)
    source.seek(source.position - 10)
    await seen.until(lambda seen: seen.snapshots[-1].engine.step == 169)
    assert source.position == BEGIN + 169
    await source.close()


def test_only_the_minutes_that_are_shown_are_read(
    minutes: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour of a large engine is a GB of snapshots."""
    read: list[Path] = []
    outlines = Recording.outlines
    old = [segment(tmp_path / "h", BEGIN - at, 60, monkeypatch) for at in (1200, 3600)]
    past = History.of_segments([*old, *minutes])
    monkeypatch.setattr(Recording, "outlines", lambda file: read.append(file.path) or outlines(file))
    assert past.at(past.end).snapshot is not None
    assert read and old[1] not in read, "its minute is further back than any event that is shown"
    past.close()


def test_steps_in_a_minute_unpack_it_once(minutes: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked: list[Path] = []
    whole = Recording.unpacked
    monkeypatch.setattr(Recording, "unpacked", lambda file, most: unpacked.append(file.path) or whole(file, most))
    past = History.of_segments(minutes)
    steps = [past.at(BEGIN + 120 + second, events_most=2).snapshot for second in (50, 20, 21, 59, 5)]
    assert [each.engine.step for each in steps if each is not None] == [170, 140, 141, 179, 125]
    assert unpacked == [minutes[1]], "for its places and for all moments"
    past.at(BEGIN + 30)
    past.at(BEGIN + 130)
    assert unpacked == [minutes[1], minutes[0]], "both are kept"
    past.close()


def test_the_minutes_in_memory_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [segment(tmp_path / "h", BEGIN + 60 * minute, 60, monkeypatch) for minute in range(6)]
    past = History.of_segments(paths)
    past.at(BEGIN + 30)
    one = past.bytes
    assert one > len(gzip.decompress(paths[0].read_bytes())), "unpacked, and the places"
    monkeypatch.setattr(kept, "BYTES_MOST", int(2.5 * one))
    most = 0
    for minute in (*range(6), *reversed(range(6))):
        moment = past.at(BEGIN + 60 * minute + 30, events_most=1)
        assert moment.snapshot is not None and moment.snapshot.engine.step == 60 * minute + 30
        most = max(most, past.bytes)
    assert 1.9 * one < most <= 2.5 * one, "two of them"
    past.close()


def test_a_minute_too_large_for_memory_is_read_on_disk(minutes: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "BYTES_MOST", 1000)
    past = History.of_segments(minutes)
    for second in (150, 125, 179, 10):
        moment = past.at(BEGIN + second)
        assert moment.snapshot is not None and moment.snapshot.engine.step == second
    assert past.bytes <= 24 * 240, "places alone"
    past.close()


def test_a_past_does_not_grow_while_its_newest_minute_is_written(
    minutes: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = minutes[1].read_bytes()
    minutes[1].write_bytes(whole[: len(whole) // 2])
    past = History.of_segments(minutes)
    end, frames = past.end, count(past)
    with minutes[1].open("ab") as file:
        file.write(whole[len(whole) // 2 :])
    monkeypatch.setattr(kept, "BYTES_MOST", 1000)
    past.at(BEGIN)
    assert past.end == end < BEGIN + 179 and count(past) == frames
    past.close()


async def test_a_step_shows_once_it_was_read_and_the_next_one_is_read_ahead(
    minutes: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop goes on meanwhile: no key waits for the disk."""
    first = segment(tmp_path / "h", BEGIN - 120, 60, monkeypatch)
    source, seen = ReplaySource(History.of_segments([first, *minutes]), begin=BEGIN + 170, paused=True), Seen()
    threads: list[threading.Thread] = []
    at, prepare, going = History.at, History.prepare, threading.Event()
    prepared: list[float] = []

    def slow(past: History, wall: float) -> Moment:
        threads.append(threading.current_thread())
        going.wait(10)
        return at(past, wall)

    await source.start(seen.take)
    monkeypatch.setattr(History, "at", slow)
    monkeypatch.setattr(History, "prepare", lambda past, wall: prepared.append(wall) or prepare(past, wall))
    seen.updates.clear()
    source.seek(source.goal - 60)
    source.seek(source.goal - 60)
    await asyncio.sleep(0.05)
    assert source.position == BEGIN + 170 and not seen.updates, "the last picture stays"
    assert source.goal == BEGIN + 50, "two keys are two steps"
    going.set()
    await seen.until(lambda seen: bool(seen.snapshots) and seen.snapshots[-1].engine.step == 50)
    assert source.position == source.goal == BEGIN + 50
    assert threads and threading.main_thread() not in threads
    async with asyncio.timeout(10):
        while not prepared:
            await asyncio.sleep(0.01)
    assert prepared == [BEGIN - 70], "as far again"
    await source.close()


async def test_a_moment_that_cannot_be_read_leaves_the_position(
    minutes: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, seen = ReplaySource(History.of_segments(minutes), begin=BEGIN + 30, paused=True), Seen()
    await source.start(seen.take)

    def damaged(past: History, wall: float) -> Moment:
        raise RecordingError("no such frame")

    with monkeypatch.context() as patched:
        patched.setattr(History, "at", damaged)
        source.seek(BEGIN + 10)
        await seen.until(lambda seen: seen.texts[-1:] == ["no such frame"])
    assert source.position == source.goal == BEGIN + 30
    source.seek(BEGIN + 10)
    await seen.until(lambda seen: seen.snapshots[-1].engine.step == 10)
    await source.close()


def test_a_moment_is_read_forward_and_from_no_more_minutes_than_it_has(
    minutes: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A packed file is unpacked from its begin for each step back: 500 events took seconds."""
    places: list[int] = []
    opened: list[Path] = []
    read, outlines = Recording.read, Recording.outlines
    monkeypatch.setattr(Recording, "read", lambda file, place: places.append(place) or read(file, place))
    monkeypatch.setattr(Recording, "outlines", lambda file: opened.append(file.path) or outlines(file))
    past = History.of_segments(minutes)
    moment = past.at(BEGIN + 179, events_most=20)
    assert [one.seq for one in moment.events] == list(range(160, 180))
    assert len(places) == 21 and places == sorted(places)
    assert opened == [minutes[1]], "a search for a link would read the minutes before"
    past.close()
