"""Files that one process writes through a mapping: another process that opens one finds a whole one."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
from ppengine.common import mapped_file

SIZE = 2**16


def test_a_successor_is_never_seen_as_an_empty_file_or_as_none(tmp_path: Path) -> None:
    """A rank may open the file of another one that has begun the next generation."""
    path = tmp_path / "shm" / "g0.1.calls"
    kept = mapped_file.make(path, SIZE)
    kept[:4] = b"kept"
    over = threading.Event()

    def succeed() -> None:
        while not over.is_set():
            mapped_file.make(path, SIZE).close()

    writer = threading.Thread(target=succeed)
    writer.start()
    try:
        for _ in range(2000):
            with mapped_file.open_for_reading(path) as seen:
                assert len(seen) == SIZE
    finally:
        over.set()
        writer.join()
    assert kept[:4] == b"kept", "those who map a predecessor keep it"
    assert sorted(tmp_path.joinpath("shm").iterdir()) == [path]


def test_a_draft_of_a_killed_process_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.ring"
    path.with_name("a.ring.new").write_bytes(b"half")
    assert mapped_file.make(path, SIZE)[:4] == bytes(4)
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("room", [True, False])
def test_a_predecessor_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: bool) -> None:
    path, fallocate = tmp_path / "a.ring", os.posix_fallocate
    mapped_file.make(path, SIZE)

    def full(descriptor: int, offset: int, size: int) -> None:
        if path.exists() or not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        fallocate(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    if room:
        assert len(mapped_file.make(path, SIZE)) == SIZE
        return
    with pytest.raises(OSError, match=r"a\.ring") as caught:
        mapped_file.make(path, SIZE)
    assert caught.value.errno == errno.ENOSPC and not list(tmp_path.iterdir())
