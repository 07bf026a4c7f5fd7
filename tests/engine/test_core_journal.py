"""The core's journal as a file: torn, garbled and full, bounded, and read again as it was written."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import time
import tracemalloc
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from ppengine.core import journal as journal_file
from ppengine.core.journal import FILE, FRAME_BYTES, OLDER, Journal, read
from ppengine.core.journal_records import Dropped, Ended, Entered, Moved, Noticed, Record, Tokens
from ppengine.core.journal_state import Restored, restore
from ppengine.core.output_state import compact
from ppengine.protocol.finished import FinishedInfo
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.snapshot import Event


def entered(number: int, name: str = "", samples: int = 1) -> Entered:
    return Entered(
        name=name or f"r-{number}", session="", first=number, prompt_ids=compact([1, 2, number]),
        sampling=SamplingParams(n=samples, max_tokens=100), seed=7, owner="eve", arrival=1.0,
    )  # fmt: skip


def tokens(number: int, *values: int) -> list[Record]:
    return [Tokens(1.0, value, [number], [value]) for value in values]


def finished(name: str, number: int) -> list[Record]:
    info = FinishedInfo(
        id=name, owner="eve", wall=1.0, ended_s=0.0, took_s=1.0, prompt_tokens=3, output_tokens=1, reason="length"
    )  # fmt: skip
    return [Ended(number), Noticed(number + 1, Event(seq=0, wall=1.0, kind="request.finished", text="", finished=info))]


def nothing() -> list[Record]:
    return []


def written(folder: Path, turns: list[list[Record]], state=nothing, **options: int) -> Journal:
    """Write turns as a core does, and leave as one that is killed."""
    journal = Journal(folder, **options)
    journal.begin(lambda: iter(state()))
    for turn in turns:
        for record in turn:
            journal.note(record)
        journal.commit(lambda: iter(state()), 0.0)
    return journal


def found(folder: Path) -> tuple[list[Record], list[str]]:
    damage: list[str] = []
    return [record for record in read(folder, damage.append) if not isinstance(record, Moved)], damage


TURNS: list[list[Record]] = [
    [entered(0)], tokens(0, 5, 6), [entered(1, samples=2)], tokens(1, 9), tokens(0, 7), [Dropped(["r-1"])],
]  # fmt: skip


def test_a_first_core_finds_none(tmp_path: Path) -> None:
    assert restore(tmp_path) is None


def test_records_come_back_in_order_and_only_their_owner_can_read_them(tmp_path: Path) -> None:
    written(tmp_path, TURNS)
    assert found(tmp_path) == ([record for turn in TURNS for record in turn], [])
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == [FILE]


def test_half_a_frame_at_the_end_is_left_out_without_a_word(tmp_path: Path) -> None:
    written(tmp_path, TURNS)
    data = (tmp_path / FILE).read_bytes()
    whole = [len(data)]
    for cut in range(len(data) - 1, 0, -1):
        (tmp_path / FILE).write_bytes(data[:cut])
        records, damage = found(tmp_path)
        assert damage == []
        whole.append(len(records))
    assert whole[1:] == sorted(whole[1:], reverse=True) and whole[-1] == 0


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_garbled_frame_is_named_and_all_others_are_read(tmp_path: Path, data: st.DataObject) -> None:
    for path in (tmp_path / FILE, tmp_path / OLDER):
        path.unlink(missing_ok=True)
    written(tmp_path, TURNS).close()
    good, _ = found(tmp_path)
    content = bytearray((tmp_path / FILE).read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    noise = data.draw(st.binary(min_size=1, max_size=8))
    content[at : at + len(noise)] = noise
    (tmp_path / FILE).write_bytes(bytes(content))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal_file, "FIND_BYTES", data.draw(st.sampled_from([5, 50, 2**16])))
        records, damage = found(tmp_path)
    lost = [record for record in good if record not in records]
    assert all(record in good for record in records), "nothing is invented"
    assert len(lost) <= 8, "the other frames are read"
    last = [record for turn in TURNS[-1:] for record in turn]
    if lost and not any(record in lost for record in last):
        assert damage and all("bytes from byte" in text for text in damage)


def test_a_full_disk_switches_it_off_and_a_later_turn_writes_everything_again(tmp_path: Path, monkeypatch) -> None:
    live: list[Record] = [entered(0)]
    journal = written(tmp_path, [], lambda: live)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(journal_file, "AGAIN_S", 0.0)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / FILE).stat().st_size + 20, before[1]))
    try:
        journal.note(entered(1))
        journal.commit(lambda: iter(live), 0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert journal.take_failure() == "No space left on device" and journal.take_failure() == ""
    assert found(tmp_path) == (live, []), "the half frame does not count"
    live.append(entered(1))
    journal.note(entered(2))
    journal.commit(lambda: iter(live), float("inf"))
    assert found(tmp_path) == (live, [])


def test_without_descriptors_the_file_is_synced_later(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(journal_file, "SYNC_S", 0.01)
    monkeypatch.setattr(journal_file, "AGAIN_S", 0.0)
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    journal = written(tmp_path, [])
    until = time.monotonic() + 60.0
    while not synced or Path(f"/proc/self/fd/{synced[0]}").exists():
        assert time.monotonic() < until, "its beginning is synced, and the copy of the descriptor is closed"
        time.sleep(0.01)
    synced.clear()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        journal.note(entered(2))
        journal.commit(nothing, 0.0)
        time.sleep(0.1)
        assert not synced, "no copy of the descriptor can be made"
        other = Journal(tmp_path)
        other.begin(nothing)
        assert other.take_failure() == "Too many open files"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    until = time.monotonic() + 60.0
    while not synced:
        assert time.monotonic() < until, "its thread has ended"
        time.sleep(0.01)


def test_a_folder_that_is_gone_is_a_failure_and_no_error(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "none")
    journal.begin(lambda: iter([]))
    assert journal.take_failure() == "No such file or directory"


def test_a_file_that_cannot_be_looked_at_is_a_failure_and_no_error(tmp_path: Path, monkeypatch) -> None:
    journal = written(tmp_path, [])
    stat = os.stat

    def broken(path, **options):
        if Path(path).name == FILE:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return stat(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", broken)
        journal.note(entered(0))
        journal.commit(lambda: iter(nothing()), journal_file.LOOK_S)
    assert journal.take_failure() == os.strerror(errno.EIO)
    later = time.monotonic() + 2 * journal_file.AGAIN_S
    journal.commit(lambda: iter([entered(0)]), later)
    assert found(tmp_path) == ([entered(0)], []), "a later turn writes everything again"


def test_the_file_is_bounded_and_whole_at_every_moment(tmp_path: Path) -> None:
    """Live requests move to another file in slices, while tokens go on to be written."""
    draw = random.Random(3)
    model = Restored()
    names = [f"r-{number}" for number in range(200)]
    model.apply(entered(number) for number in range(200))
    journal = Journal(tmp_path, limit=50_000)
    most = moves = 0
    moving = False

    def state():
        for name in list(names):
            if name in model.requests:
                yield model.requests[name]

    journal.begin(state)
    for step in range(6000):
        number = draw.randrange(200)
        turn: list[Record] = tokens(number, step) if f"r-{number}" in model.requests else []
        if step % 60 == 59:
            turn.append(Dropped([f"r-{step // 60}"]))
        for record in turn:
            journal.note(record)
        model.apply(turn)
        journal.commit(state, 0.0)
        most = max(most, sum(path.stat().st_size for path in tmp_path.iterdir()))
        moves += moving and not (tmp_path / OLDER).exists()
        moving = (tmp_path / OLDER).exists()
        if step % 97 == 0 or moving:
            again = Restored()
            again.apply(found(tmp_path)[0])
            assert again.requests == model.requests, step
    assert moves >= 2 and most < 400_000, (moves, most)


def test_a_move_that_was_cut_off_is_complete_with_the_older_file(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(journal_file, "SLICE_S", 0.0)
    live: list[Record] = [entered(number) for number in range(5)]
    journal = written(tmp_path, [], lambda: live, limit=1)
    journal._limit = 1
    for number in range(3):
        journal.note(tokens(4, number)[0])
        journal.commit(lambda: iter(live), 0.0)
    assert (tmp_path / OLDER).exists()
    state = restore(tmp_path)
    assert state is not None and list(state.requests) == [f"r-{number}" for number in range(5)]
    assert state.requests["r-4"].samples[0].tokens.tolist() == [0, 1, 2]
    following = Journal(tmp_path)
    following.begin(lambda: iter(state.requests.values()))
    assert not (tmp_path / OLDER).exists()
    assert restore(tmp_path).requests == state.requests  # type: ignore[union-attr]


def test_a_state_has_frames_of_bounded_size_and_is_read_with_little_more_than_its_tokens(tmp_path: Path) -> None:
    """In lists, and with the whole file at once, it took 47 bytes a token."""
    requests, prompt, steps = 400, 500, 200
    ids = range(1000, 1000 + prompt)
    state = [msgspec.structs.replace(entered(number), prompt_ids=compact(ids)) for number in range(requests)]
    turns: list[list[Record]] = [
        [Tokens(1.0, step, list(range(requests)), [1000 + step] * requests)] for step in range(steps)
    ]
    written(tmp_path, turns, lambda: state).close()
    tracemalloc.start()
    restored = restore(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert restored is not None and len(restored.requests) == requests
    for known in restored.requests.values():
        assert known.prompt_ids.tolist() == list(ids)
        assert known.samples[0].tokens.tolist() == list(range(1000, 1000 + steps))
    assert peak < 12 * requests * (prompt + steps), peak
    with (tmp_path / FILE).open("rb") as file:
        assert max(map(len, journal_file._frames_of(file, FILE, pytest.fail, bytes))) < 2 * FRAME_BYTES


def test_an_old_event_of_a_name_does_not_end_the_request_that_has_it_now(tmp_path: Path) -> None:
    first, again = entered(0, "x"), entered(5, "x")
    written(tmp_path, [[first], finished("x", 0), [Dropped(["x"])], [again], [finished("x", 0)[1]]])
    state = restore(tmp_path)
    assert state is not None and state.requests["x"].samples[0].finished is None
    written(tmp_path, [[again], finished("x", 5)])
    state = restore(tmp_path)
    assert state is not None and state.requests["x"].samples[0].finished is not None


@pytest.mark.parametrize("content", [b"", b"\x00" * 100, os.urandom(1000)])
def test_a_file_of_other_content_holds_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    assert found(tmp_path)[0] == []
