"""Faults that were: the list, one in full, its export and its replay."""

from __future__ import annotations

import json
import time
import zipfile
from pathlib import Path

import msgspec
import pytest
from cli_helpers import Cli
from fake_gateway import FakeGateway
from kept_engines import kept_engine, kept_incident, minute
from ppconsole.link.incident_source import IncidentSource, choose, list_incidents
from ppconsole.model.endings import where
from ppengine.protocol.discovery import keep_record
from ppengine.protocol.inspection import LogsDetail
from ppengine.protocol.kept_files import engine_folder
from ppengine.protocol.snapshot import OUTSIDE_STEPS, IncidentInfo


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("PPCONSOLE_ENGINE", raising=False)
    (tmp_path / "run").mkdir()


def test_the_list_has_this_engine_and_earlier_ones_of_its_name(cli: Cli) -> None:
    kept_incident(kept_engine("dead01", "inc"), 1, age_s=3000.0, by="ann")
    kept_incident(kept_engine("dead02", "other"), 1)
    with FakeGateway(name="inc") as live:
        keep_record(live.record)
        kept_incident(engine_folder(live.id), 3, age_s=60.0)
        _, *lines = cli("-e", "inc", "incidents").out.splitlines()
        assert [line.split()[0] for line in lines] == ["dead01/1", "3"], "oldest first, one's own by number alone"
        assert "1.9s" in lines[0] and " ann " in lines[0] and "all stages are back after 1.9 s" in lines[0]
        rows = cli("incidents", "--all", "--json").rows[0]
        assert {row["id"] for row in rows} == {"dead01/1", "dead02/1", f"{live.id}/3"}


def test_one_in_full_has_verdict_consequences_authors_and_records(cli: Cli) -> None:
    kept_incident(kept_engine(), 1, by="ann")
    for words in (["-e", "inc", "incidents", "1"], ["incidents", "dead01/1"], ["incidents", "dea/1"]):
        run = cli(*words)
        assert run.code == 0, run.err
        text = run.out
        assert "healed in 1.9s" in text and "STAGE 1 was dead: stage 1 was" in text and "pid 7: gone" in text
        assert "ended: all stages are back after 1.9 s (ann acted)" in text
        assert "    stage 0 is starved by stage 1" in text and "[ann] restart-stage 1" in text
        assert "kept: 64 steps of each thread, 1 stacks" in text
    assert cli("incidents", "dead01/1", "--json").rows[0]["info"]["by"] == "ann"
    run = cli("-e", "inc", "incidents", "7")
    assert run.code == 7 and "no incident '7'; there are: 1" in run.err


def test_damage_hides_no_other_incident(cli: Cli) -> None:
    folder = kept_engine()
    kept_incident(folder, 1)
    kept_incident(folder, 2)
    (folder / "incidents" / "1" / "incident.json").write_text("{")
    assert [line.split()[0] for line in cli("-e", "inc", "incidents").out.splitlines()] == ["ID", "2"]


async def test_the_source_has_the_minutes_around_and_begins_before(cli: Cli) -> None:
    """A minute of it is in the incident's folder, the newest one in the engine's history alone."""
    folder = kept_engine(age_s=60.0)
    incident = kept_incident(folder, 1, age_s=150.0)
    begun = time.time() - 180.0
    minute(folder / "history", begun - 3600.0)
    minute(folder / "incidents" / "1", begun)
    (listed,) = list_incidents(None, everything=True)
    source = IncidentSource(listed)
    assert source.history.begin == pytest.approx(begun, abs=0.1)
    assert source.history.end == pytest.approx(time.time() - 61.0, abs=2.0), "the history's newest minute"
    updates: list[object] = []
    await source.start(updates.append)
    assert source.position <= incident.info.wall - 29.0
    detail = await source.inspect("fault")
    assert msgspec.to_builtins(detail) == msgspec.to_builtins(incident.fault)
    logs = await source.inspect("logs", stage=1)
    assert isinstance(logs, LogsDetail) and logs.lines == ["stage1| 2026-11-23 02:34:10.000 INFO stage one was here"]
    await source.close()


def test_export_and_replay_of_an_incident_show_its_fault(cli: Cli, tmp_path: Path) -> None:
    folder = kept_engine()
    kept_incident(folder, 1)
    file = tmp_path / "i.zip"
    assert cli("-e", "inc", "export", "--incident", "1", str(file)).code == 0
    with zipfile.ZipFile(file) as archive:
        assert json.loads(archive.read("fault.json"))["verdict"]["summary"] == "stage 1 was killed by SIGKILL"
        assert b"restart-stage 1" in archive.read("events.jsonl")
    run = cli("replay", str(file))
    assert run.code == 0 and "fault at " in run.out and "STAGE 1 dead" in run.out
    run = cli("-e", "inc", "replay", "--incident", "1")
    assert run.code == 0 and "STAGE 1 dead" in run.out and "step 59" in run.out
    assert cli("replay", "--incident", "dead01/1", str(file)).code == 2
    for path in (folder / "history").iterdir():
        path.unlink()
    run = cli("replay", "--incident", "dead01/1")
    assert run.code == 1 and "no recording of incident dead01/1 was kept" in run.err


def test_explain_on_a_healthy_engine_names_the_last_fault(cli: Cli) -> None:
    with FakeGateway(name="inc") as live:
        assert "last fault" not in cli("-e", "inc", "explain").out
        keep_record(live.record)
        live.snapshot.incident = kept_incident(engine_folder(live.id), 3).info
        run = cli("explain")
        assert run.code == 0 and run.out.startswith("no fault: serving")
        assert "stage 1 was killed by SIGKILL, healed in 1.9s: ppconsole incidents 3" in run.out


def test_an_id_of_two_parts_needs_both(cli: Cli) -> None:
    kept_incident(kept_engine(), 1)
    listed = list_incidents(None, everything=True)
    assert choose(listed, "dead01/1").folder.name == "1"


def test_the_place_of_an_incident_beside_the_pipeline_is_none() -> None:
    info = IncidentInfo(number=1, wall=0.0, stage=None, cause="core", summary="")
    assert where(info) == "core"
    for cause in OUTSIDE_STEPS:
        assert where(msgspec.structs.replace(info, cause=cause)) == "-"
