"""Kept files of engines, as a gateway and a supervisor leave them."""

from __future__ import annotations

import time
from pathlib import Path
from unittest import mock

import msgspec
import snapshots
from ppengine.protocol.discovery import EngineRecord, keep_record
from ppengine.protocol.incidents import FILE, Incident
from ppengine.protocol.kept_files import EngineEnd, engine_folder, write_end
from ppengine.protocol.recording import Recorder
from ppengine.protocol.snapshot import Event, IncidentInfo, Snapshot, Verdict

NO_PID = 2**22 + 1
KILLED = "core ended: killed by SIGKILL"


def kept_engine(
    identity: str = "dead01", name: str = "inc", *, reason: str = KILLED, clean: bool = False, age_s: float = 60.0
) -> Path:
    """Make the files of an engine that ran for a minute and ended `age_s` seconds ago; return their folder."""
    end = time.time() - age_s
    record = EngineRecord(
        id=identity, name=name, epoch="x", pid=NO_PID, pid_start=1, state_endpoint="s", control_endpoint="c",
        bulk_endpoint="b", proto=1, model="m", pipeline_parallel_size=2, run_dir="/nowhere", started_wall=end - 60.0,
    )  # fmt: skip
    keep_record(record)
    folder = engine_folder(identity)
    (folder / "core.log").write_text("2026-11-23 02:34:11.000 INFO the last words of the core\n")
    (folder / "stage1.log").write_text("2026-11-23 02:34:10.000 INFO stage one was here\n")
    (folder / "audit.jsonl").write_text('{"verb":"pause"}\n')
    minute(folder / "history", end - 60.0, name)
    write_end(identity, EngineEnd(wall=end, reason=reason, clean=clean, code=0 if clean else 1))
    return folder


def minute(folder: Path, begin: float, name: str = "inc", seconds: int = 60) -> Path:
    """Write a segment: a picture a second, whose step is the second, and an event every ten."""
    folder.mkdir(parents=True, exist_ok=True)
    now = [begin]
    path = folder / f"{int(begin * 1e3):015d}.rec"
    with mock.patch("time.time", return_value=begin):
        recorder = Recorder(path, engine="dead01", name=name, packed=True, clock=lambda: now[0])
    for second in range(seconds):
        now[0] = begin + second
        if second % 10 == 0:
            recorder.write(Event(seq=second // 10 + 1, wall=now[0], kind="test.event", text=f"second {second}"))
        shown = picture(second, name)
        shown.sampled_at = now[0]
        recorder.write(shown)
    recorder.close()
    return path


def picture(step: int, name: str = "inc") -> Snapshot:
    made = snapshots.snapshot(2, 1)
    made.engine.step, made.engine.name = step, name
    return made


def kept_incident(
    folder: Path, number: int = 1, *, over: bool = True, age_s: float = 90.0, **changes: object
) -> Incident:
    """Write an incident: stage 1 was killed and came back, or the engine ended with its core."""
    wall = time.time() - age_s
    cause, stage = ("dead", 1) if over else ("core", None)
    summary = "stage 1 was killed by SIGKILL" if over else "the engine core (pid 7) was killed by SIGKILL"
    verdict = Verdict(stage=stage, cause=cause, summary=summary, since_s=0.3, evidence=["pid 7: gone"], suggest="")
    fault = snapshots.fault(snapshots.stuck(), at=1, wall=wall, over_wall=wall + 1.9 if over else None)
    fault.verdict = verdict
    events = [Event(seq=5, wall=wall, kind="op.accepted", text="restart-stage 1", by="ann")]
    if not over:
        events += [
            Event(seq=6 + each, wall=wall, kind="verdict.raised", text=f"dead: stage {each} was killed by SIGKILL")
            for each in range(4)
        ]
    info = IncidentInfo(
        number=number, wall=wall, over_wall=wall + 1.9 if over else None, stage=stage, cause=cause, summary=summary,
        ended="all stages are back after 1.9 s" if over else "the engine ended before it was over", **changes,
    )  # fmt: skip
    made = Incident(
        info=info, fault=fault, consequences=["stage 0 is starved by stage 1"] if over else [], events=events
    )
    path = folder / "incidents" / str(number)
    path.mkdir(parents=True)
    (path / FILE).write_bytes(msgspec.json.encode(made))
    return made
