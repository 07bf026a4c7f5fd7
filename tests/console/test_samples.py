"""The bundled recordings: each plays to its end, and the screens tell the incident in words."""

from __future__ import annotations

import asyncio
import re

import pytest
from cli_helpers import Cli
from ppconsole.cli.recordings import SAMPLES
from ppconsole.link.replay import ReplaySource
from ppconsole.view import diagnosis, stream_table
from ppconsole.view.cells import text_of
from ppengine.protocol.inspection import FaultDetail, FindingsDetail
from ppengine.protocol.snapshot import Snapshot

EXPLAINED = {
    "sample": (1, "stopped", ["is stopped by a signal", "ppconsole continue 1", "──"], []),
    "stale-seqstart": (
        0,
        "stream_order",
        ["metadata reads seqstart without waiting for compute, which writes it", "written by: copy of seqstart"],
        ["written by", "copy of seqstart on stream compute", "read by", "pickling of seqstart on stream metadata"],
    ),
    "global-stream": (
        1,
        "stream_owner",
        ["thread main launches on stream kv-load, which thread kv-connector owns"],
        ["kv-connector made it the current stream", "all_reduce", "pass the stream explicitly"],
    ),
    "foreign-device": (
        1,
        "stream_owner",
        ["thread main launches on stream kv-load, which thread kv-connector owns"],
        ["CUDA error 400, invalid resource handle", "of cuda:0", "cuda:2"],
    ),
}


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], tmp_path) -> Cli:
    return Cli(capsys, tmp_path)


async def played(name: str) -> tuple[ReplaySource, list[Snapshot]]:
    source, pictures = ReplaySource(SAMPLES / f"{name}.ppr", speed=0), []

    def take(update: object) -> None:
        if isinstance(update, Snapshot):
            pictures.append(update)

    await source.start(take)
    await asyncio.wait_for(source.finished.wait(), 30)
    await source.close()
    assert source.error is None
    return source, pictures


@pytest.mark.parametrize("name", EXPLAINED)
async def test_the_screens_tell_it(name):
    stage, cause, words, found = EXPLAINED[name]
    source, pictures = await played(name)
    assert not pictures[0].verdicts, "all is well at first"
    picture = [each for each in pictures if each.verdicts][-1]
    kept = source.kept("fault")
    assert isinstance(kept, FaultDetail) and kept.rings is not None
    text = "\n".join(text_of(line) for line in diagnosis.page(picture, diagnosis.Known(fault=kept), 120, True).rows)
    assert f"! STAGE {stage} {cause}" in text and f"╔═ {stage} ROOT" in text
    assert f"! stage {stage} ROOT" in text and "frozen at the fault" in text
    assert all(each in text for each in words), text
    assert any(sum(record.kind == "step" for record in thread.records) > 5 for thread in kept.rings.stages[0].threads)
    if found:
        findings = source.kept("findings")
        assert isinstance(findings, FindingsDetail)
        rows = stream_table.rows(picture, findings.findings, "", 200)
        text = "\n".join(text_of(line) for line in rows)
        assert re.search("ledger +ON", text) and all(each in text for each in found), text


@pytest.mark.parametrize("name", EXPLAINED)
def test_no_event_of_a_sample_is_reported_as_lost(cli, name):
    ran = cli("replay", "--sample", name)
    assert ran.code == 0 and "link.gap" not in ran.out and "--:--:--" not in ran.out
    numbers = [int(line.split()[1]) for line in ran.out.splitlines() if re.match(r"\d\d:\d\d:\d\d +\d+ ", line)]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_samples_by_name(cli):
    assert set(cli("replay", "--sample", "list").out.split()) == set(EXPLAINED)
    assert {path.stem for path in SAMPLES.glob("*.ppr")} == set(EXPLAINED)
    ran = cli("replay", "--sample", "global-stream")
    assert ran.code == 0 and "stream_owner" in ran.out
    ran = cli("replay", "--sample", "nothing")
    assert ran.code == 2 and ran.err.startswith("error: no sample is called nothing; there are foreign-device, ")
    assert cli("replay").code == 2
