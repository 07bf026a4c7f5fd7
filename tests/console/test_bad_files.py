"""Exports, recordings and kept files that are damaged or made to harm: one short line, in bounded time and memory."""

from __future__ import annotations

import gzip
import io
import json
import random
import threading
import time
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
import snapshots
from fake_source import FakeSource
from ppconsole.cli import main
from ppconsole.cli.recordings import SAMPLE
from ppconsole.link.config_file import ConfigFileError, read_config
from ppconsole.link.export import ExportError, ExportSource, gather
from ppconsole.link.history import History
from ppconsole.link.kept_finished import KeptFinished
from ppconsole.link.kept_points import read_points
from ppconsole.link.kept_requests import find_request
from ppconsole.link.settings import Settings
from ppconsole.link.source import QueryFailed
from ppconsole.model.endings import clock_text
from ppconsole.model.units import wall_text
from ppengine.protocol import recording
from ppengine.protocol.error_text import LINE_MOST, TEXT_MOST
from ppengine.protocol.incidents import read_incident
from ppengine.protocol.json_files import BYTES_MOST, decode_json, read_json_file
from ppengine.protocol.kept_files import EngineEnd
from ppengine.protocol.recording import MAGIC, Recorded, Recording, RecordingError, RecordingHeader
from ppengine.protocol.snapshot import SCHEMA

VALUES = [0, 1, 0x7F, 0x80, 0x90, 0xC0, 0xCA, 0xCB, 0xCF, 0xDC, 0xFF]
"""Bytes that begin something else in msgpack, JSON or deflate."""


@pytest.fixture
async def parts() -> dict[str, bytes]:
    source = FakeSource(snapshots.stuck())
    source.details.update(fault=snapshots.fault(snapshots.stuck()))
    return await gather(source, snapshots.stuck(), snapshots.events(), program="test")


def zipped(parts: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    return made.getvalue()


def flipped(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 5])):
        changed[draw.randrange(len(changed))] = draw.choice([*VALUES, draw.randrange(256)])
    return bytes(changed)


def replays_or_says_why(path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> int:
    """Replay in this process: an exception that leaves `main` is a traceback in a terminal."""
    code = main(["replay", str(path), *words])
    error = capsys.readouterr().err
    if code:
        assert code == 1
        assert error.startswith("error: ")
        assert error.endswith("\n")
        assert error[:-1].isprintable()
        assert len(error[:-1]) <= LINE_MOST
    return code


# --- texts --------------------------------------------------------------------------------------------------


def with_escapes(value: Any, kind: type, whole: Any) -> None:
    """Put escapes in front of each text in `value` that a message of `kind` may have: names, ids, errors."""
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(each, dict | list):
            with_escapes(each, kind, whole)
        elif isinstance(each, str):
            value[key] = f"\x1b]52;c;aGk=\x07\x1b[2J\x9b2J\u202e\r\n{each}"
            try:
                msgspec.convert(whole, kind)
            except msgspec.ValidationError:
                value[key] = each


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_no_text_of_a_recording_moves_the_cursor(tmp_path, capsys, options):
    path, source = tmp_path / "a.ppr", Recording(SAMPLE)
    with path.open("wb") as file:
        file.write(MAGIC)
        bodies = [msgspec.msgpack.encode(source.header), *source.bodies()]
        last = max(number for number, body in enumerate(bodies) if b"snapshot" in body[:40])
        for number, body in enumerate(bodies):
            whole = msgspec.msgpack.decode(body)
            if "snapshot" not in whole or number == last:  # The others are not shown.
                with_escapes(whole, Recorded if number else RecordingHeader, whole)
            body = msgspec.msgpack.encode(whole)
            file.write(len(body).to_bytes(4, "big") + body)
    assert main(["replay", str(path), *options]) == 0
    shown = capsys.readouterr()
    assert "SUBMIT" in shown.out.upper()
    assert [line for line in (shown.out + shown.err).split("\n") if not line.isprintable()] == []


def test_a_name_of_megabytes_makes_no_line_of_megabytes(tmp_path, capsys):
    path, source, picture = tmp_path / "a.ppr", Recording(SAMPLE), snapshots.stuck()
    picture.stages[0].host = "W" * 2**20
    picture.stages = [picture.stages[0]] + [picture.stages[1]] * 50
    with path.open("wb") as file:
        file.write(MAGIC)
        for message in (source.header, Recorded(at_s=0.0, snapshot=picture)):
            body = msgspec.msgpack.encode(message)
            file.write(len(body).to_bytes(4, "big") + body)
    source.close()
    assert main(["replay", str(path)]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) < 1000


# --- exports ------------------------------------------------------------------------------------------------


def test_flipped_bytes_of_an_export(parts, tmp_path, capsys):
    draw, path, whole = random.Random(1), tmp_path / "a.zip", zipped(parts)
    codes = []
    for number in range(150):
        path.write_bytes(flipped(whole, draw))
        codes.append(replays_or_says_why(path, capsys, *(["--json"] if number % 2 else [])))
    assert sum(codes) > 50


def test_flipped_bytes_inside_an_export(parts, tmp_path, capsys):
    draw, path = random.Random(2), tmp_path / "a.zip"
    for number in range(40):
        path.write_bytes(zipped({name: flipped(data, draw) for name, data in parts.items() if data}))
        replays_or_says_why(path, capsys, *(["--json"] if number % 2 else []))
        changed = parts | {name: flipped(parts[name], draw) for name in ("fault.json", "rings.json", "snapshot.json")}
        path.write_bytes(zipped(changed))
        replays_or_says_why(path, capsys, *(["--json"] if number % 2 else []))


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_ways_of_packing_are_refused(parts, tmp_path, method):
    (tmp_path / "a.zip").write_bytes(zipped(parts, method))
    with pytest.raises(ExportError, match=rf"manifest\.json is packed by method {method}; an export is deflated"):
        ExportSource(tmp_path / "a.zip")


def test_a_zip_bomb_is_refused_before_it_is_unpacked(parts, tmp_path):
    path = tmp_path / "a.zip"
    for bomb in (
        {"snapshot.json": bytes(BYTES_MOST + 1)},
        {f"{what}.json": bytes(BYTES_MOST) for what in ("rings", "fault", "stacks", "findings", "about")},
    ):
        path.write_bytes(zipped(parts | bomb))
        assert path.stat().st_size < 2**20
        tracemalloc.start()
        begun = time.process_time()
        with pytest.raises(ExportError, match=f"has {len(next(iter(bomb.values())))} bytes; at most {BYTES_MOST} are"):
            ExportSource(path)
        assert time.process_time() - begun < 5
        assert tracemalloc.get_traced_memory()[1] < 8 * BYTES_MOST
        tracemalloc.stop()


def test_members_that_are_not_ours_are_not_read(parts, tmp_path):
    path = tmp_path / "a.zip"
    path.write_bytes(zipped(parts | {f"{number}.json": bytes(BYTES_MOST + 1) for number in range(3)}))
    assert ExportSource(path).export.snapshot == snapshots.stuck()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rings.json", b"[" * 100_000),
        ("rings.json", b'{"stages": 5}'),
        ("rings.json", b'{"stages": [{"threads": [{"records": [5]}]}]}'),
        ("fault.json", b'{"rings": {"stages": {"a": 1}}}'),
        ("stacks.json", b'{"\xff": 1}'),
        ("about.json", b"9" * 5_000),
    ],
)
async def test_a_part_of_another_shape_is_one_line(parts, tmp_path, name, content):
    path = tmp_path / "a.zip"
    path.write_bytes(zipped(parts | {name: content}))
    with pytest.raises(QueryFailed, match=name) as caught:
        await ExportSource(path).inspect(name.removesuffix(".json"))
    assert "\n" not in str(caught.value)


def test_a_number_of_more_than_64_bits_is_refused(parts, tmp_path):
    path, snapshot = tmp_path / "a.zip", json.loads(parts["snapshot.json"])
    snapshot["engine"]["max_num_seqs"] = 10**400
    path.write_bytes(zipped(parts | {"snapshot.json": json.dumps(snapshot).encode()}))
    with pytest.raises(ExportError, match=r"snapshot\.json: "):
        ExportSource(path)


# --- recordings ---------------------------------------------------------------------------------------------


def first_frames(count: int) -> bytes:
    whole = gzip.decompress(SAMPLE.read_bytes())
    end = len(MAGIC)
    for _ in range(count):
        end += 4 + int.from_bytes(whole[end : end + 4], "big")
    return whole[:end]


@pytest.mark.parametrize("packed", [False, True])
def test_flipped_bytes_of_a_recording(packed, tmp_path, capsys):
    whole = first_frames(15)
    data = gzip.compress(whole) if packed else whole
    draw, path = random.Random(3), tmp_path / "a.ppr"
    for number in range(100):
        path.write_bytes(flipped(data, draw))
        replays_or_says_why(path, capsys, *(["--json"] if number % 2 else []))


def recorded(*frames: object, header: RecordingHeader | None = None) -> bytes:
    header = header or RecordingHeader(schema=SCHEMA, recorded_at=1.0, engine="e", name="n")
    bodies = [msgspec.msgpack.encode(each) for each in (header, *frames)]
    return MAGIC + b"".join(len(body).to_bytes(4, "big") + body for body in bodies)


@pytest.mark.parametrize("at_s", [float("nan"), float("inf"), -1.0, 1e300])
def test_times_that_no_clock_has_are_refused(at_s, tmp_path):
    path = tmp_path / "a.ppr"
    path.write_bytes(recorded({"at_s": at_s}))
    assert "at_s" in str(History(path).error)
    path.write_bytes(recorded(header=RecordingHeader(schema=SCHEMA, recorded_at=at_s, engine="e", name="n")))
    with pytest.raises(RecordingError, match="recorded_at"):
        Recording(path)


def test_a_packed_bomb_ends_at_its_limits(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "FRAMES_MOST", 1_000)
    monkeypatch.setattr(recording, "UNPACKED_MOST", 2**20)
    path = tmp_path / "a.ppr"
    path.write_bytes(gzip.compress(recorded(*[{"at_s": 0.0}] * 1_001)))
    assert str(History(path).error).endswith("has more than 1000 updates, the most that are read")
    path.write_bytes(gzip.compress(recorded(*[{"at_s": 0.0, "new": "x" * 2**16}] * 20)))
    assert "unpacks to more than 1048576 bytes" in str(History(path).error)
    path.write_bytes(recorded(*[{"at_s": 0.0, "new": "x" * 2**16}] * 20))
    assert History(path).error is None


def test_a_deep_frame_ends_what_is_read_of_a_kept_recording(tmp_path):
    path = tmp_path / "1.rec"
    deep = msgspec.Raw(b"\x82\xa4at_s\x00\xa3new" + b"\x91" * 100_000 + msgspec.msgpack.encode("r-1"))
    path.write_bytes(recorded(deep))
    assert KeptFinished([path]).before(1e9).requests == []
    assert find_request([path], "r-1") is None
    assert read_points([path], 0.0, 1e9, threading.Event()) == []
    assert "recursion" in str(History(path).error)


@pytest.mark.parametrize("wall", [1e308, float("inf"), float("nan"), -1e300])
def test_a_time_that_no_calendar_has_is_unknown(wall):
    assert wall_text(wall) == "?"
    assert clock_text(wall, 0.0) == "?"


# --- kept files ---------------------------------------------------------------------------------------------

BROKEN_JSON = [
    b"",
    b"\xff",
    b"[" * 100_000,
    b"9" * 5_000,
    b'{"wall": 1e999}',
    b'{"a": "\xff"}',
    b"[]",
    b" " * 2**24 + b"  ",
]


@pytest.mark.parametrize("content", BROKEN_JSON, ids=range(len(BROKEN_JSON)))
def test_a_kept_file_that_is_broken_is_one_error(content, tmp_path):
    path = tmp_path / "incident.json"
    path.write_bytes(content)
    for read in (lambda: read_json_file(path, EngineEnd), lambda: read_incident(tmp_path)):
        with pytest.raises(ValueError, match=r"\w") as caught:
            read()
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) <= TEXT_MOST


@pytest.mark.parametrize(
    "content",
    [b"\xff", b"[]", b'{"trends_s": 1.5}', b'{"panels": 5}', b'{"prompt": {"n": "' + b"\\u001b" * 9_000 + b'"}}'],
)
def test_settings_that_are_broken_are_one_line(content, tmp_path):
    path = tmp_path / "console.json"
    path.write_bytes(content)
    problem = Settings(path).problem
    assert problem.startswith(f"{path} is not in effect")
    assert problem.isprintable()
    assert len(problem) <= TEXT_MOST


def test_numbers_of_kept_files_have_64_bits():
    assert decode_json(b'{"wall": 1, "reason": "r", "clean": true, "code": 3}', EngineEnd).code == 3
    with pytest.raises(ValueError, match="more than 64 bits"):
        decode_json(b'{"wall": 1, "reason": "r", "clean": true, "code": %d}' % 10**50, EngineEnd)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"a = " + b"9" * 5_000, "is not TOML: "),
        (b"a = " + b"[" * 5_000, "is not TOML: "),
        (b"a = 2024-13-45", "is not TOML: "),
        (b"a = 0x" + b"f" * 5_000, "a is a value of type int, too large to print: no such key"),
        (b"a = \xff", "cannot be read"),
        (b"#" * 2**20, "has more than 262144 bytes, the most that is read"),
        (b'"' + b"k" * 10_000 + b'" = 1', "no such key; the keys are"),
        (b'bell = "' + b"x" * 10_000 + b'"', "bell is 'xxx"),
    ],
)
def test_a_config_that_cannot_be_is_one_line(content, text, tmp_path):
    path = tmp_path / "config.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigFileError) as caught:
        read_config(path)
    assert text in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) <= 500
