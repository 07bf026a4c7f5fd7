"""Exports: what goes in comes out, no text unless it is asked for, never over another file."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import snapshots
from fake_source import FakeSource
from ppconsole.link.export import ExportError, ExportSource, gather, write
from ppconsole.link.source import QueryFailed
from ppengine.protocol.inspection import FindingsDetail
from ppengine.protocol.reports import Finding
from ppengine.protocol.snapshot import Event, Snapshot
from ppengine.protocol.verbs import Pause

MISMATCH = Finding(
    stage=None,
    cause="mismatch",
    summary="request r-1: token 81234567 at position 9, the reference gives 87654321",
    since_s=1.0,
    evidence=[
        "output 3 (position 9): the pipeline chose token 81234567, one stage chooses 87654321",
        "its best two: 87654321 and 81234567",
    ],
)


async def made(path: Path, picture: Snapshot, *, with_text: bool = False, **details: object) -> FakeSource:
    source = FakeSource(picture)
    source.details.update(details)
    files = await gather(source, picture, snapshots.events(), with_text=with_text, program="test")
    write(path, files)
    return source


async def test_what_goes_in_comes_out(tmp_path):
    picture, path = snapshots.stuck(), tmp_path / "a.zip"
    kept = snapshots.fault(picture)
    await made(path, picture, fault=kept, findings=FindingsDetail(findings=snapshots.findings()))
    source, seen = ExportSource(path), []
    await source.start(seen.append)
    assert seen[0].state == "recorded" and seen[1] == picture and seen[2:] == snapshots.events()
    assert await source.inspect("fault") == kept
    assert await source.inspect("rings") == snapshots.rings(4, None)
    assert (await source.inspect("stacks")).stages and (await source.inspect("audit")).lines
    assert (await source.inspect("about")).versions["torch"] == "2.9"
    with pytest.raises(QueryFailed, match="this export has no logs"):
        await source.inspect("logs")
    assert (await source.command(Pause())).code == "UNSUPPORTED"
    assert path.stat().st_mode & 0o077 == 0
    with zipfile.ZipFile(path) as archive:
        record = json.loads(archive.read("rings.json"))["stages"][0]["threads"][0]["records"][0]
        assert set(record) >= {"kind", "step", "begun_ns", "done_ns", "peer"}
        manifest = json.loads(archive.read("manifest.json"))
        assert manifest["versions"]["ppconsole"] == "0.1" and manifest["missing"] == {}
        assert "replay" in archive.read("README.txt").decode()


async def test_no_text_unless_asked(tmp_path):
    picture = snapshots.stuck()
    details = {"findings": FindingsDetail(findings=[MISMATCH])}
    await made(tmp_path / "a.zip", picture, **details)
    await made(tmp_path / "b.zip", picture, with_text=True, **details)
    texts = {}
    for name in ("a", "b"):
        with zipfile.ZipFile(tmp_path / f"{name}.zip") as archive:
            texts[name] = {part: archive.read(part).decode() for part in archive.namelist()}
    everything = "".join(texts["a"].values())
    assert "81234567" not in everything and "87654321" not in everything and "hands its hidden states" not in everything
    assert "requests.jsonl" not in texts["a"] and "logs.json" not in texts["a"]
    assert "token (left out)" in texts["a"]["findings.json"] and "position 9" in texts["a"]["findings.json"]
    assert "hands its hidden states" in texts["b"]["requests.jsonl"] and "81234567" in texts["b"]["findings.json"]
    assert "retired in 22 ms" in texts["b"]["logs.json"]


async def test_what_the_engine_does_not_answer_is_named(tmp_path):
    await made(tmp_path / "a.zip", snapshots.snapshot(), stacks=QueryFailed("FAILED", "the agent has not reported"))
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        missing = json.loads(archive.read("manifest.json"))["missing"]
    assert missing == {"fault": "this engine has had no fault yet", "stacks": "the agent has not reported"}


def test_it_never_overwrites_unless_told_to(tmp_path):
    path = tmp_path / "a.zip"
    path.write_text("mine")
    with pytest.raises(ExportError, match="exists; name a new file, or say --force"):
        write(path, {"a.json": b"{}"})
    assert path.read_text() == "mine" and list(tmp_path.iterdir()) == [path]
    assert write(path, {"a.json": b"{}"}, force=True) == path.stat().st_size
    with pytest.raises(ExportError, match="cannot be written: No such file"):
        write(tmp_path / "no" / "b.zip", {})


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (None, "cannot be read as an export"),
        ({}, "has no manifest.json"),
        ({"manifest.json": '{"format": "other 3"}'}, "its format is 'other 3'"),
        ({"manifest.json": "no"}, "manifest.json: "),
        ({"manifest.json": '{"format": "ppconsole export 1"}'}, "has no snapshot.json"),
        ({"manifest.json": '{"format": "ppconsole export 1"}', "snapshot.json": '{"engine": 1}'}, "snapshot.json: "),
    ],
)
def test_anything_else_is_one_line(tmp_path, files, says):
    path = tmp_path / "a.zip"
    if files is None:
        path.write_bytes(b"PK\x03\x04 nothing")
    else:
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
    with pytest.raises(ExportError, match=says) as caught:
        ExportSource(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


async def test_a_damaged_detail_is_told(tmp_path):
    path = tmp_path / "a.zip"
    files = await gather(
        FakeSource(snapshots.snapshot()), snapshots.snapshot(), [Event(seq=1, wall=1, kind="a", text="b")]
    )
    write(path, files | {"stacks.json": b'{"stages": 3}'})
    with pytest.raises(QueryFailed, match=r"stacks\.json"):
        await ExportSource(path).inspect("stacks")
