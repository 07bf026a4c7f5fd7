"""Recordings: what is written comes back; anything else is one clean error."""

from __future__ import annotations

import asyncio
import gzip
from pathlib import Path

import pytest
from fake_gateway import FakeGateway, sample_snapshot
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from link_helpers import FAST, Seen
from ppconsole.cli.recordings import SAMPLE
from ppconsole.link.engine_link import EngineLink
from ppconsole.link.replay import ReplaySource
from ppconsole.link.source import QueryFailed
from ppengine.protocol.control import Refused
from ppengine.protocol.recording import MAGIC, LinkState, Recorder, Recording, RecordingError, Update
from ppengine.protocol.snapshot import Event, Snapshot
from ppengine.protocol.verbs import Pause

UPDATES: list[Update] = [
    LinkState(state="connecting"),
    LinkState(state="live", age_s=0.0),
    sample_snapshot(),
    Event(seq=1, wall=1.5, kind="op.applied", text="done", by="eve", op="op-1"),
    LinkState(state="lost", retry_in_s=1.0, text="gone"),
]


def record(path: Path, updates: list[Update]) -> None:
    with Recorder(path, engine="f00d", name="fake") as recorder:
        for update in updates:
            recorder.write(update)


async def play(path: Path) -> tuple[ReplaySource, Seen]:
    source, seen = ReplaySource(path, speed=0), Seen()
    await source.start(seen.take)
    await asyncio.wait_for(source.finished.wait(), 10)
    await source.close()
    return source, seen


async def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "a.ppr"
    record(path, UPDATES)
    source, seen = await play(path)
    assert seen.updates[:-1] == UPDATES
    assert seen.texts[-1] == "end of the recording"
    assert (source.header.engine, source.header.name, source.error) == ("f00d", "fake", None)
    assert path.stat().st_mode & 0o077 == 0


async def test_the_pace_is_the_recordings(tmp_path: Path) -> None:
    now = [0.0]
    with Recorder(tmp_path / "a.ppr", engine="e", name="n", clock=lambda: now[0]) as recorder:
        recorder.write(UPDATES[0])
        now[0] = 30.0
        recorder.write(UPDATES[1])
    source, seen = ReplaySource(tmp_path / "a.ppr", speed=100), Seen()
    begun = asyncio.get_running_loop().time()
    await source.start(seen.take)
    await asyncio.wait_for(source.finished.wait(), 10)
    assert asyncio.get_running_loop().time() - begun >= 0.29
    await source.close()


async def test_a_recording_of_a_live_link_replays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = tmp_path / "live.ppr"
    with FakeGateway() as fake, Recorder(path, engine=fake.id, name="fake") as recorder:
        link, live = EngineLink(fake.record, timing=FAST), Seen()

        def both(update: Update) -> None:
            live.take(update)
            recorder.write(update)

        await link.start(both)
        await live.until(lambda seen: bool(seen.snapshots))
        fake.event("stage.dead", "stage 1 is dead", stage=1)
        await live.until(lambda seen: bool(seen.events) and len(seen.snapshots) > 2)
        await link.close()
    _, seen = await play(path)
    assert seen.updates[:-1] == live.updates


async def test_a_recording_takes_no_verbs_and_has_no_details(tmp_path: Path) -> None:
    record(tmp_path / "a.ppr", UPDATES)
    source = ReplaySource(tmp_path / "a.ppr")
    assert not source.live
    refused = await source.command(Pause())
    assert isinstance(refused, Refused)
    assert refused.code == "UNSUPPORTED"
    with pytest.raises(QueryFailed):
        await source.fetch("r")
    await source.close()


async def test_cut_short_plays_up_to_the_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.ppr"
    record(path, UPDATES)
    path.write_bytes(path.read_bytes()[:-3])
    source, seen = await play(path)
    assert seen.updates[:-1] == UPDATES[:-1]
    assert "is cut short: it ends inside the frame at byte" in seen.texts[-1]
    assert source.error is not None


def test_errors_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.ppr"
    with pytest.raises(RecordingError, match="cannot be read: No such file"):
        Recording(path)
    path.write_bytes(b"PNG not a recording at all")
    with pytest.raises(RecordingError, match="is not a recording"):
        Recording(path)
    with pytest.raises(RecordingError, match="exists; name a new file"):
        Recorder(path, engine="e", name="n")
    path.write_bytes(MAGIC)
    with pytest.raises(RecordingError, match="ends before its header"):
        Recording(path)
    path.write_bytes(MAGIC + b"\xff\xff\xff\xff")
    with pytest.raises(RecordingError, match="damaged"):
        Recording(path)


@pytest.mark.parametrize("speed", [-1.0, float("nan"), 1e9])
def test_a_speed_out_of_range_is_refused(tmp_path: Path, speed: float) -> None:
    with pytest.raises(ValueError, match="speed is"):
        ReplaySource(tmp_path / "a.ppr", speed)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.binary(max_size=300), st.binary(max_size=300).map(lambda tail: MAGIC + tail)), st.data())
def test_random_bytes_end_in_one_clean_error_or_a_clean_end(tmp_path: Path, noise: bytes, data: st.DataObject) -> None:
    path = tmp_path / "noise.ppr"
    path.unlink(missing_ok=True)
    if data.draw(st.booleans()):
        record(path, UPDATES)
        good = path.read_bytes()
        place = data.draw(st.integers(0, len(good)))
        noise = good[:place] + noise + good[place + data.draw(st.integers(0, 40)) :]
    path.write_bytes(noise)
    try:
        recording = Recording(path)
    except RecordingError as error:
        assert "\n" not in str(error)
        return
    try:
        for frame in recording.frames():
            assert frame.at_s is not None
    except RecordingError as error:
        assert str(path) in str(error)


async def test_a_packed_recording_is_read_and_one_cut_short_says_so(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.ppr", tmp_path / "b.ppr"
    record(plain, UPDATES)
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    _, seen = await play(packed)
    assert seen.updates[:-1] == UPDATES
    whole = packed.read_bytes()
    for size in range(2, len(whole) - 1, 37):
        packed.write_bytes(whole[:size])
        try:
            source, _ = await play(packed)
        except RecordingError as error:
            text = str(error)
        else:
            text = str(source.error)
        assert "cut short" in text, (size, text)
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    packed.write_bytes(bytes(damaged))
    with pytest.raises(RecordingError):
        list(Recording(packed).frames())


async def test_the_bundled_sample_shows_a_stopped_stage_and_its_end() -> None:
    assert SAMPLE.stat().st_size < 300_000
    _, seen = await play(SAMPLE)
    pictures = [update for update in seen.updates if isinstance(update, Snapshot)]
    causes = [{(verdict.stage, verdict.cause) for verdict in picture.verdicts} for picture in pictures]
    assert any({(1, "stopped"), (2, "starved")} <= found for found in causes)
    assert causes[0] == causes[-1] == set()
    assert all(len(picture.stages) == 3 for picture in pictures)


async def test_what_the_receiver_raises_ends_the_play(tmp_path: Path) -> None:
    record(tmp_path / "a.ppr", UPDATES)

    def refuse(update: Update) -> None:
        raise BrokenPipeError

    source = ReplaySource(tmp_path / "a.ppr", speed=0)
    await source.start(refuse)
    with pytest.raises(BrokenPipeError):
        await asyncio.wait_for(source.played(), 5)
    await source.close()
