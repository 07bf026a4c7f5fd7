"""Makes the bundled recordings: `python tests/end_to_end/record_samples.py [NAME...]`, on a machine that is not busy.

All are of a real engine of three stages under load. `sample`: somebody stops stage 1, and continues it. The others are
the incidents of `drills/incident_programs`: the program of each report runs on fake streams, in place of a stage, and
what the ledger says of it is shown from the third second on, by the verdict's own rule and with the engine's own steps.
"""

from __future__ import annotations

import asyncio
import copy
import gzip
import itertools
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from ppconsole.cli.recordings import SAMPLES
from ppconsole.link.engine_link import EngineLink
from ppconsole.link.fault_watcher import FaultWatcher
from ppengine.common.config import profiles_dir
from ppengine.diagnosis.case import Case
from ppengine.diagnosis.finding_rules import found
from ppengine.diagnosis.wait_graph import Graph
from ppengine.drills.fake_streams import FakeRuntime
from ppengine.drills.incident_programs import INCIDENTS
from ppengine.protocol.inspection import FaultDetail, FindingsDetail, RingsDetail
from ppengine.protocol.recording import Recorder, Update
from ppengine.protocol.reports import Finding
from ppengine.protocol.snapshot import Event, Snapshot, Verdict
from ppengine.protocol.stage_info import StreamInfo
from ppengine.stage.ledger.ledger import Ledger

sys.path.append(str(Path(__file__).parent.parent / "engine"))

from operators import Operator
from serving import Served

from profiles import small

STAGES, AT_S, SECONDS = 3, 3.0, 9.0
WHERE = {"stale-seqstart": 0, "global-stream": 1, "foreign-device": 1}
"""Stage that plays the incident: the reports' own broadcaster, and a stage in the middle."""


class Overlay:
    """Adds what the ledger says of an incident to what a real engine shows."""

    def __init__(self, name: str, recorder: Recorder) -> None:
        self.stage, self._recorder = WHERE[name], recorder
        self._ledger = Ledger(self.stage)
        self._ledger.thread("main")  # as a stage calls its own
        self._ledger.switch(True)
        INCIDENTS[name](FakeRuntime(self._ledger), False)
        self.findings = self._ledger.troubles.findings()
        self._began = time.monotonic()
        self._events, self._last = 0, 0
        """Events that were added, and the number of the newest one that was written."""
        self.newest: Snapshot | None = None

    @property
    def age_s(self) -> float:
        """Seconds since the incident; negative before."""
        return time.monotonic() - self._began - AT_S

    def aged_findings(self) -> list[Finding]:
        """The findings with their ages of now."""
        return [msgspec.structs.replace(each, since_s=round(self.age_s, 2)) for each in self.findings]

    def verdicts(self) -> list[Verdict]:
        """What the diagnosis makes of them."""
        return found(Case(SimpleNamespace(findings=self.aged_findings()), Graph({}), []))

    def take(self, update: Update) -> None:
        """Write one update with what is added."""
        if isinstance(update, Snapshot):
            # The link keeps its own: it would ask the engine for the events that are added here, and report a gap.
            update = copy.deepcopy(update)
            update.engine.checks.ledger = True
            if self.age_s >= 0:
                self._add(update)
            self.newest = update
        elif isinstance(update, Event):
            update = msgspec.structs.replace(update, seq=update.seq + self._events)
            self._last = update.seq
        self._recorder.write(update)

    def _add(self, picture: Snapshot) -> None:
        picture.engine.checks.findings = len(self.findings)
        picture.verdicts = self.verdicts()
        stage = picture.stages[self.stage]
        for actor in self._ledger._actors:
            if actor.owner is not None:
                # The fake streams have done what was launched on them: they are idle.
                stage.streams.append(StreamInfo(name=actor.name, owner=actor.owner.name, pending=0))
        if not self._events:
            lines = [(f"check.{each.cause}", each.summary) for each in self.findings]
            lines += [("verdict.raised", f"{each.cause}: {each.summary}") for each in picture.verdicts]
            for kind, text in lines:
                self._events, self._last = self._events + 1, self._last + 1
                self._recorder.write(Event(seq=self._last, wall=time.time(), kind=kind, text=text, stage=self.stage))
        picture.event_seq += self._events


async def record(engine: Served, name: str, path: Path) -> None:
    """Record one sample."""
    raw = path.with_suffix(".raw")
    with Recorder(raw, engine=engine.record.id, name=name) as recorder:
        overlay = Overlay(name, recorder) if name in WHERE else None
        watcher = FaultWatcher(recorder)

        def take(update: Update) -> None:
            if overlay is not None:
                overlay.take(update)
            else:
                recorder.write(update)
                watcher.see(update)

        link = EngineLink(engine.record, find=lambda: engine.record, user="eve", slow=True, backlog=16)
        await link.start(take)
        asking = asyncio.create_task(watcher.run(link))
        try:
            await asyncio.sleep(AT_S)
            await (_stop(engine) if overlay is None else _keep(link, recorder, overlay))
        finally:
            asking.cancel()
            await link.close()
    # No name and no time: the same recording is the same bytes.
    path.write_bytes(gzip.compress(raw.read_bytes(), mtime=0))
    raw.unlink()
    print(f"{path}: {path.stat().st_size} bytes")


async def _stop(engine: Served) -> None:
    os.kill(engine.pids["stage1"], signal.SIGSTOP)
    await asyncio.sleep(SECONDS)
    os.kill(engine.pids["stage1"], signal.SIGCONT)
    await asyncio.sleep(AT_S)


async def _keep(link: EngineLink, recorder: Recorder, overlay: Overlay) -> None:
    await asyncio.sleep(0.1)
    rings = await link.inspect("rings", lines=64)
    picture, verdict = overlay.newest, overlay.verdicts()[0]
    assert isinstance(rings, RingsDetail) and picture is not None
    retired = [stage.retired_step for stage in picture.stages]
    kept = FaultDetail(number=1, wall=time.time(), verdict=verdict, waits=picture.waits, retired=retired, rings=rings)
    recorder.write_detail("fault", kept)
    while overlay.age_s < SECONDS:
        recorder.write_detail("findings", FindingsDetail(findings=overlay.aged_findings()))
        await asyncio.sleep(1.0)


async def _feed(op: Operator) -> None:
    """Let about four requests run up to the end of the recording; each takes two seconds or more."""
    for prompt in itertools.cycle(["The old clock", "A river", "She said", "In the north"]):
        await op.submit(prompt, max_tokens=900)
        await asyncio.sleep(0.6)


async def main(names: list[str]) -> None:
    """Serve an engine for each sample, and record it."""
    sections: dict[str, Any] = {
        "model": {"dtype": "float32", "skip_tokenizer": False, "max_model_len": 1024},
        "memory": {"device_mib": 48, "swap_space_gib": 0.03, "utilization": 0.8},
        "scheduler": {"max_num_seqs": 16, "schedule_ahead": True},
    }
    for name in names:
        profile = small(profiles_dir() / "models" / "tiny", stages=STAGES, name=name, **sections)
        with Served(profile) as engine:
            async with engine.operator("alice") as op:
                feeding = asyncio.create_task(_feed(op))
                try:
                    await asyncio.sleep(1.5)
                    await record(engine, name, SAMPLES / f"{name}.ppr")
                finally:
                    feeding.cancel()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:] or [*WHERE, "sample"]))
