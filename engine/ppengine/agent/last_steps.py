"""The last steps of a stage, read from its rings on request: for a screen, an export, or the record of a fault.

Each request maps the rings for itself, so this may run in any thread beside the one that samples.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path

from ppengine.agent.ring_state import kind_name
from ppengine.agent.stage_watch import DEVICE_PAGE
from ppengine.common.ring import Gauge, Record, RingReader, Word
from ppengine.protocol.inspection import OpRecord, RingsDetail, StageRings, ThreadRing
from ppengine.protocol.place import Place

STEPS_MOST = 512
_RECORDS_A_STEP = 16
"""Records read per step: more than a step has, so that all requested steps are read."""

Files = Mapping[str, tuple[Path, int]]
"""Path and inode of each ring of a stage, by its name."""


def read_rings(found: Mapping[tuple[int, int], Files], places: list[Place], steps: int) -> RingsDetail:
    """Return the last `steps` steps (at most 512) of `places`; one without rings says so in `error`."""
    steps = max(1, min(steps, STEPS_MOST))
    read = [read_stage(*key, files, steps) for key, files in sorted(found.items()) if key in places]
    read += [
        StageRings(stage=place.stage, rank=place.rank, pid=None, error="it has no rings on this host")
        for place in places
        if place not in found
    ]
    read.sort(key=lambda each: (each.stage, each.rank))
    return RingsDetail(mono_ns=time.monotonic_ns(), wall=time.time(), steps=steps, stages=read)


def read_stage(stage: int, rank: int, files: Files, steps: int) -> StageRings:
    """Return the last `steps` steps of every thread of one stage."""
    answer = StageRings(stage=stage, rank=rank, pid=None)
    latest: list[tuple[ThreadRing, list[Record]]] = []
    with contextlib.ExitStack() as stack:
        for name in sorted(files.keys() - {DEVICE_PAGE}, key=lambda name: (name != "main", name)):
            try:
                reader = stack.enter_context(contextlib.closing(RingReader(files[name][0])))
            except (OSError, ValueError) as error:
                answer.error = f"ring {name}: {error}"
                continue
            # The oldest record of a full ring may be overwritten now.
            head, most = reader.word(Word.HEAD), min(steps * _RECORDS_A_STEP, reader.word(Word.CAPACITY) - 1)
            records = reader.latest(most)
            ring = ThreadRing(ring=name, name=reader.name or name, recorded=head, records=[])
            ring.torn = max(0, min(head, most) - len(records))
            latest.append((ring, records))
            if name == "main":
                answer.pid = reader.word(Word.PID)
                answer.begun_step, answer.finished_step = (
                    reader.gauge(Gauge.STEP_BEGUN),
                    reader.gauge(Gauge.STEP_FINISHED),
                )
    newest = max((record.step for _, records in latest for record in records), default=0)
    for ring, records in latest:
        ring.records = _of_steps(records, newest - steps)
        answer.threads.append(ring)
    return answer


def _of_steps(records: list[Record], above: int) -> list[OpRecord]:
    """Return the records of steps above that number, and later records that belong to no step."""
    since = min((record.enqueued_ns for record in records if record.step > above), default=0)
    return [
        OpRecord(
            kind_name(record.kind), record.step, record.peer, record.enqueued_ns, record.returned_ns, record.done_ns,
            record.size, record.detail,
        )
        for record in records
        if record.step > above or (not record.step and record.enqueued_ns >= since)
    ]  # fmt: skip
