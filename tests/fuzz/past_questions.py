"""The past over `bulk`: any question to a gateway with files, and any list to a console."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from ppconsole.link.far_past import FarPast
from ppengine.gateway.past_desk import PastDesk
from ppengine.protocol import frames
from ppengine.protocol.control import Failed, FromBulk, ToBulk
from ppengine.protocol.discovery import EngineRecord
from ppengine.protocol.past_files import ListPast, PastListed, PastPart, ReadPast
from values import value_of

OWN, EARLIER = "own1", "old1"
SEGMENT, SECRET = "history/001700000000000.rec", b"not for consoles"
NAMES = [SEGMENT, "incidents/1/incident.json", "incidents/1/001700000000000.rec"]
WRONG = ["core.log", "record.json", "../other/core.log", "/etc/passwd", "history/..", f"{SEGMENT}/../../core.log", ""]
RECORD = EngineRecord(
    id=OWN, name="a", epoch="x", pid=0, pid_start=1, state_endpoint="s", control_endpoint="c", bulk_endpoint="b",
    proto=1, model="m", pipeline_parallel_size=2, run_dir="", started_wall=1.0, address="tcp://10.0.0.5:7400",
)  # fmt: skip


def question(chance: Random) -> bytes:
    """Return a question about the past; most name an engine and a file that are there."""
    asked = value_of(chance.choice([ListPast, ReadPast, ReadPast, ReadPast]), chance)
    asked["engine"] = chance.choice([OWN, OWN, EARLIER, "", "other", "..", f"{OWN}/../other"])
    if "file" in asked:
        asked["file"] = chance.choice([*NAMES, SEGMENT, *WRONG])
    return msgspec.msgpack.encode(asked)


def listing(chance: Random) -> bytes:
    """Return a list of files; most have names that a console takes."""
    listed = value_of(PastListed, chance) | {"engine": chance.choice([OWN, OWN, OWN, "", "../x"])}
    names = [*NAMES * 4, *WRONG]
    listed["files"] = [[chance.choice(names), chance.choice([0, 7, 2**40, -1])] for _ in range(chance.randrange(3))]
    listed["earlier"] = [chance.choice([EARLIER] * 6 + ["..", "a/b"]) for _ in range(chance.randrange(3))]
    return msgspec.msgpack.encode(listed)


class Questions:
    """Asks the files of two engines; another one, of another name, and a log lie beside them."""

    def __init__(self, folder: Path) -> None:
        for engine, name in ((OWN, "a"), (EARLIER, "a"), ("other", "b")):
            for file in NAMES:
                (folder / engine / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / engine / file).write_bytes(SECRET if engine == "other" else b"a recording" * 9)
            (folder / engine / "core.log").write_bytes(SECRET)
            record = msgspec.structs.replace(RECORD, id=engine, name=name)
            (folder / engine / "record.json").write_bytes(msgspec.json.encode(record))
        self._desk = PastDesk(folder / OWN, OWN, "a")
        self._codec = frames.Codec(ToBulk)

    def take(self, data: bytes) -> None:
        """Answer one question, and assert that it got files of the past alone. Raises ProtocolError."""
        asked = self._codec.decode(data)
        if not isinstance(asked, ListPast | ReadPast):
            return
        answer = self._desk.answer(asked)
        if isinstance(answer, PastPart):
            assert asked.file in NAMES and asked.engine in ("", OWN, EARLIER) and SECRET not in answer.data
            assert len(answer.data) <= asked.size
        assert answer.nonce == asked.nonce and isinstance(answer, PastListed | PastPart | Failed)
        frames.encode(answer)


class _Link:
    """A link whose engine answers each question with the same list."""

    record = RECORD

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def ask_past(self, asked: ListPast | ReadPast) -> Any:
        return self._answer


_from_bulk = frames.Codec(FromBulk)


def take_list(data: bytes) -> None:
    """Read one list as a console does, and assert that no folder is outside of the copies. Raises QueryFailed too."""
    answer = _from_bulk.decode(data)
    for one in asyncio.run(FarPast(_Link(answer)).incidents()):  # type: ignore[arg-type]
        assert ".." not in one.folder.parts and "remote" in one.folder.parts
