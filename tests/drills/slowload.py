"""An engine whose stages load slowly, watched from before it serves."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from pathlib import Path

import msgspec
import yaml
from engines import Engine
from load import Load, profile
from ppengine.drills import cgroups
from ppengine.drills.registry import FaultError
from ppengine.protocol.discovery import EngineRecord
from watching import tell, watch

SHARE = 0.05
LOADED_S = 300.0


async def slow_load(stages: int = 2) -> list[str]:
    """The stages load with 5 % of a processor each, then serve at once."""
    runtime = Path(tempfile.mkdtemp(prefix="pp-", dir="/tmp"))
    file = runtime / "profile.yaml"
    file.write_text(yaml.safe_dump(msgspec.to_builtins(profile(stages))))
    engine = await asyncio.to_thread(Engine, runtime, ["ppengine.supervisor", str(file)])
    try:
        return await _watch_loading(engine, stages)
    finally:
        await asyncio.to_thread(engine.end)
        shutil.rmtree(runtime, ignore_errors=True)
        shutil.rmtree(engine.ring_dir, ignore_errors=True)


async def _watch_loading(engine: Engine, stages: int) -> list[str]:
    pids = await asyncio.to_thread(engine.find_processes, 3 + stages)
    path = engine.runtime / "ppconsole" / f"{engine.event['id']}.json"
    record = msgspec.json.decode(path.read_bytes(), type=EngineRecord)
    undo = []
    # Where no cgroup of processors can be had, an ordinary load is watched.
    with contextlib.suppress(FaultError):
        undo = [cgroups.throttle(pids[f"stage{stage}"], SHARE) for stage in range(stages)]
    try:
        async with watch(record, loading=True) as watcher:
            await watcher.until(lambda picture: picture.engine.state == "serving", "it serves", LOADED_S)
            for one in undo:
                one()
            undo.clear()
            load = Load(watcher)
            load.start()
            await asyncio.sleep(3.0)
            await load.finish(60)
            # A stage that serves before its quota is lifted is held back by it: that is no false alarm.
            alarms = [text for text in tell(watcher) if "cgroup's cpu quota" not in text]
            return [*alarms, *load.errors, *(f"wrong tokens: {name}" for name in load.wrong)]
    finally:
        for one in undo:
            one()
