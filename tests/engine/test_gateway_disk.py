"""A gateway whose disk is full: a command has its record or is refused, and events follow when there is room."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import pytest
from ppengine.gateway import audit, event_journal
from ppengine.gateway.audit import AuditError, AuditLog, Entry, audit_file
from ppengine.gateway.event_journal import EventJournal
from ppengine.gateway.event_log import EventLog


class FullDisk:
    """A disk with `room` bytes for each module that writes through it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: int | None = None
        self._write = os.write
        for module in (audit, event_journal):
            monkeypatch.setattr(module.os, "write", self.write)

    def write(self, descriptor: int, data: bytes) -> int:
        if self.room is None:
            return self._write(descriptor, data)
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        part = data[: self.room]
        self.room -= len(part)
        return self._write(descriptor, part)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    return FullDisk(monkeypatch)


def entry(name: str, verb: str = "pause") -> Entry:
    return Entry(
        wall=1.0, id=name, by="eve", uid=0, verb=verb, args={}, reason="", dry_run=False, outcome="received"
    )  # fmt: skip


def names(folder: Path) -> list[str]:
    return [msgspec.json.decode(line)["id"] for line in audit_file(folder).read_bytes().splitlines()]


@pytest.mark.parametrize("room", [0, 10])
def test_a_line_without_room_leaves_nothing_behind(tmp_path: Path, disk: FullDisk, room: int) -> None:
    log = AuditLog(tmp_path, "e", "id", {})
    log.write(entry("a"))
    disk.room = room
    with pytest.raises(
        AuditError, match=r"^the audit log cannot be written: No space left on device \(.*/audit\.jsonl\)$"
    ):
        log.write(entry("b"))
    disk.room = None
    log.write(entry("c"))
    assert names(tmp_path) == ["a", "c"]


def test_a_link_in_place_of_a_removed_log_is_not_followed(tmp_path: Path) -> None:
    run_dir, kept = tmp_path / "run", tmp_path / "kept"
    log = AuditLog(run_dir, "e", "id", {audit.KEEP_VARIABLE: str(kept)})
    log.write(entry("a"))
    (kept / "e-id.jsonl").unlink()
    (kept / "e-id.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AuditError, match="symbolic links"):
        log.write(entry("b"))
    assert not (tmp_path / "elsewhere").exists()
    log.close()


def test_a_removed_log_is_made_again_although_the_other_cannot_be(tmp_path: Path) -> None:
    run_dir, kept = tmp_path / "run", tmp_path / "kept"
    log = AuditLog(run_dir, "e", "id", {audit.KEEP_VARIABLE: str(kept)})
    log.write(entry("a"))
    audit_file(run_dir).unlink()
    (kept / "e-id.jsonl").rename(tmp_path / "elsewhere")
    kept.rmdir()
    with pytest.raises(AuditError, match="No such file or directory"):
        log.write(entry("b"))
    kept.mkdir()
    log.write(entry("c"))
    assert names(run_dir) == ["a", "c"]
    assert (kept / "e-id.jsonl").read_bytes() == audit_file(run_dir).read_bytes()
    log.close()


def test_the_reserve_is_there_for_a_line_that_must_be_written(tmp_path: Path, disk: FullDisk) -> None:
    log = AuditLog(tmp_path, "e", "id", {})
    reserve = tmp_path / audit.RESERVE
    assert reserve.stat().st_blocks * 512 >= audit.RESERVE_BYTES
    disk.room = 0
    unlink = Path.unlink

    def free(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok)
        disk.room = audit.RESERVE_BYTES

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "unlink", free)
        log.write(entry("stop", "stop"), reserved=True)
    assert names(tmp_path) == ["stop"] and not reserve.exists()
    disk.room = None
    log.write(entry("a"))
    assert reserve.exists(), "it is taken again when there is room"


@pytest.mark.parametrize("room", [0, 7])
def test_events_from_a_full_disk_are_written_when_there_is_room(
    tmp_path: Path, disk: FullDisk, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr(event_journal, "AGAIN_S", 0.0)
    log = EventLog(lambda one: None, journal=EventJournal(tmp_path, 100))
    log.say("note", "first")
    disk.room = room
    log.say("note", "second")
    log.say("note", "third")
    disk.room = None
    log.say("note", "fourth")
    kept = [(one.event.seq, one.event.text) for one in EventJournal(tmp_path, 100).restored]
    assert kept == [(1, "first"), (2, "second"), (3, "third"), (4, "fourth")]
