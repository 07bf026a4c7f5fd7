"""Files of the past over `bulk`: which are listed, which are read, and none else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ppengine.gateway.past_desk import PastDesk
from ppengine.protocol.control import Failed
from ppengine.protocol.discovery import EngineRecord, keep_record
from ppengine.protocol.incidents import FILE
from ppengine.protocol.kept_files import engine_folder
from ppengine.protocol.past_files import PART_BYTES, ListPast, PastFile, PastListed, PastPart, ReadPast, is_past_file
from ppengine.protocol.snapshot import IncidentInfo

SEGMENT = "history/001700000000000.rec"
SECRETS = ("core.log", "audit.jsonl", "engine.json", "record.json", "end.json", "history/notes.txt", "history/x.rec")


def record(identity: str, name: str, started: float) -> EngineRecord:
    return EngineRecord(
        id=identity, name=name, epoch="x", pid=1, pid_start=1, state_endpoint="s", control_endpoint="c",
        bulk_endpoint="b", proto=1, model="m", pipeline_parallel_size=2, run_dir="/nowhere", started_wall=started,
    )  # fmt: skip


def incident(folder: Path, number: int, summary: str = "a fault") -> None:
    info = IncidentInfo(number=number, wall=1.7e9, stage=1, cause="dead", summary=summary)
    path = folder / "incidents" / str(number)
    path.mkdir(parents=True, exist_ok=True)
    (path / FILE).write_bytes(msgspec.json.encode({"info": info}))


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PastDesk:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for identity, name, started in (("own1", "a", 3.0), ("old1", "a", 1.0), ("other", "b", 2.0)):
        keep_record(record(identity, name, started))
    folder = engine_folder("own1")
    (folder / "history").mkdir()
    for name in SECRETS:
        (folder / name).write_text("not for consoles")
    (folder / SEGMENT).write_bytes(bytes(range(256)) * 200)
    incident(folder, 2)
    incident(engine_folder("old1"), 1)
    return PastDesk(folder, "own1", "a")


def failure(answer: Any) -> str:
    assert isinstance(answer, Failed), answer
    return f"{answer.code}: {answer.text}"


def test_list_has_recordings_and_incidents_and_nothing_else(desk: PastDesk) -> None:
    listed = desk.answer(ListPast(nonce=4))
    assert isinstance(listed, PastListed) and (listed.nonce, listed.engine, listed.name) == (4, "own1", "a")
    assert [file.name for file in listed.files] == [SEGMENT, "incidents/2/incident.json"]
    assert listed.files[0] == PastFile(SEGMENT, 51_200)
    assert [info.number for info in listed.incidents] == [2]
    assert listed.earlier == ["old1"], "an engine of another name is no part of it"


def test_earlier_engine_of_the_name_is_listed_and_another_one_is_not(desk: PastDesk) -> None:
    listed = desk.answer(ListPast(nonce=1, engine="old1"))
    assert isinstance(listed, PastListed) and (listed.engine, listed.earlier) == ("old1", [])
    for engine in ("other", "own1/../other", "../engines/own1", ".", "absent"):
        assert failure(desk.answer(ListPast(nonce=1, engine=engine))).startswith("NOT_FOUND")
        assert failure(desk.answer(ReadPast(nonce=1, engine=engine, file=SEGMENT))).startswith("NOT_FOUND")


def test_list_has_an_incident_as_it_was_written_last(desk: PastDesk) -> None:
    desk.answer(ListPast(nonce=1))
    incident(engine_folder("own1"), 2, "another end")
    os.utime(engine_folder("own1") / "incidents" / "2" / FILE, ns=(1, 1))
    listed = desk.answer(ListPast(nonce=1))
    assert isinstance(listed, PastListed) and listed.incidents[0].summary == "another end"


def test_parts_make_the_file(desk: PastDesk) -> None:
    whole, parts = (engine_folder("own1") / SEGMENT).read_bytes(), []
    for offset in range(0, len(whole), PART_BYTES):
        part = desk.answer(ReadPast(nonce=7, engine="own1", file=SEGMENT, offset=offset))
        assert isinstance(part, PastPart) and (part.nonce, part.offset, part.size) == (7, offset, len(whole))
        parts.append(part)
    assert b"".join(part.data for part in parts) == whole and len({part.mark for part in parts}) == 1
    end = desk.answer(ReadPast(nonce=7, engine="own1", file=SEGMENT, offset=len(whole)))
    assert isinstance(end, PastPart) and end.data == b""


def test_mark_changes_with_the_file_and_not_with_its_growth(desk: PastDesk) -> None:
    def mark(name: str) -> int:
        part = desk.answer(ReadPast(nonce=1, engine="own1", file=name))
        assert isinstance(part, PastPart)
        return part.mark

    before = mark(SEGMENT), mark("incidents/2/incident.json")
    with (engine_folder("own1") / SEGMENT).open("ab") as file:
        file.write(b"more")
    os.utime(engine_folder("own1") / "incidents" / "2" / FILE, ns=(5, 5))
    assert mark(SEGMENT) == before[0] and mark("incidents/2/incident.json") != before[1]


@pytest.mark.parametrize(
    "name",
    [*SECRETS, "", ".", "..", "/etc/passwd", "history/../core.log", "history/001700000000000.rec/../../core.log",
     "incidents/2/../../core.log", "incidents/x/incident.json", "history/00170000000000\u0660.rec",
     SEGMENT + "\n", "\0", "incidents/2/incident.json\0", "end.json/" + SEGMENT],
)  # fmt: skip
def test_no_other_file_is_read(desk: PastDesk, name: str) -> None:
    assert not is_past_file(name)
    assert failure(desk.answer(ReadPast(nonce=1, engine="own1", file=name))).startswith("NOT_FOUND")


def test_a_link_or_a_folder_with_the_name_of_a_recording_is_not_read(desk: PastDesk) -> None:
    folder = engine_folder("own1")
    link, place, pipe = (f"history/00170000000000{number}.rec" for number in (1, 2, 3))
    (folder / link).symlink_to(folder / "core.log")
    (folder / place).mkdir()
    os.mkfifo(folder / pipe)
    listed = desk.answer(ListPast(nonce=1))
    assert isinstance(listed, PastListed) and not {link, place, pipe} & {file.name for file in listed.files}
    for name in (link, place, pipe):
        assert isinstance(desk.answer(ReadPast(nonce=1, engine="own1", file=name)), Failed)


def test_file_that_has_gone_is_gone_and_not_an_error_of_the_engine(desk: PastDesk) -> None:
    (engine_folder("own1") / SEGMENT).unlink()
    assert "'history/001700000000000.rec' is gone" in failure(
        desk.answer(ReadPast(nonce=1, engine="own1", file=SEGMENT))
    )


@pytest.mark.parametrize(
    ("offset", "size"),
    [(-1, 10), (51_201, 10), (2**63, 10), (-(2**63), 1), (0, 0), (0, -1), (0, PART_BYTES + 1), (0, 2**63)],
)
def test_part_outside_of_the_file_or_too_large_is_refused(desk: PastDesk, offset: int, size: int) -> None:
    answer = desk.answer(ReadPast(nonce=1, engine="own1", file=SEGMENT, offset=offset, size=size))
    assert f"1 to {PART_BYTES} from 0 to 51200" in failure(answer)


def test_incident_that_cannot_be_read_is_left_out(desk: PastDesk) -> None:
    incident(engine_folder("own1"), 3)
    (engine_folder("own1") / "incidents" / "3" / FILE).write_bytes(b"{")
    listed = desk.answer(ListPast(nonce=1))
    assert isinstance(listed, PastListed) and [info.number for info in listed.incidents] == [2]
