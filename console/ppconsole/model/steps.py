"""The last steps of every stage, out of the rings: what each began, finished and waited for."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import NamedTuple

from ppengine.protocol.inspection import OpRecord, RingsDetail, StageRings
from ppengine.protocol.operation_kinds import RANK_WAIT_WORDS, WAIT_WORDS
from ppengine.protocol.place import Place

from ppconsole.model.ranks import short


class StepCell(NamedTuple):
    """One step on one stage. Milliseconds; `done` False: it was under way at the time of the record."""

    done: bool
    total_ms: float
    waited_ms: float
    op: str = ""
    """The open operation of a step under way, as `send>1`; empty: between two."""
    op_ms: float = 0.0


class StageSteps(NamedTuple):
    """The steps of one stage by their number. `began`, `finished`: the newest; None: the rings do not say."""

    stage: int
    pid: int | None
    cells: dict[int, StepCell]
    began: int | None
    finished: int | None
    error: str
    rank: int = 0


def ranks_of(detail: RingsDetail, roots: Set[int], most: int) -> list[StageRings]:
    """Return the rings of all ranks if these are `most` at most; else of the ranks of `roots`, and the first others."""
    if len(detail.stages) <= most:
        return detail.stages
    return [stage for stage in detail.stages if stage.rank == 0 or stage.stage in roots]


def of_stage(stage: StageRings, now_ns: int) -> StageSteps:
    """Return the steps of one stage. `now_ns`: the time of the record."""
    main = _main(stage)
    # By time and not by number: a step waits for tokens that are those of an older one.
    inside: list[tuple[OpRecord, list[OpRecord]]] = []
    for record in main:
        if record.kind == "step":
            inside.append((record, []))
        elif inside and (not (around := inside[-1][0]).done_ns or record.begun_ns < around.done_ns):
            inside[-1][1].append(record)
    cells = {step.step: _cell(step, parts, stage.stage, now_ns) for step, parts in inside}
    return StageSteps(stage.stage, stage.pid, cells, stage.begun_step, stage.finished_step, stage.error, stage.rank)


def _main(stage: StageRings) -> list[OpRecord]:
    return next((thread.records for thread in stage.threads if thread.ring == "main"), [])


def _cell(step: OpRecord, parts: list[OpRecord], stage: int, now_ns: int) -> StepCell:
    waited = sum(_held_ns(part, now_ns) for part in parts if part.kind in WAIT_WORDS)
    total = (step.done_ns or now_ns) - step.begun_ns
    held = [part for part in parts if not part.done_ns and not part.returned_ns]
    op = held[-1] if held and not step.done_ns else None
    return StepCell(
        done=bool(step.done_ns),
        total_ms=max(0, total) / 1e6,
        waited_ms=min(max(0, total), waited) / 1e6,
        op="" if op is None else op_text(op, stage),
        op_ms=0.0 if op is None else max(0, now_ns - op.begun_ns) / 1e6,
    )


def _held_ns(part: OpRecord, now_ns: int) -> int:
    """Return how long an operation held the thread: an asynchronous one until its call came back."""
    return max(0, (part.returned_ns or part.done_ns or now_ns) - part.begun_ns)


def op_text(record: OpRecord, stage: int) -> str:
    """Return `send>1` or `forward`; of a wait for a rank of the same stage `all_reduce<1.0`."""
    if record.kind in RANK_WAIT_WORDS and record.peer >= 0:
        return f"{record.kind}<{short(Place(stage, record.peer), ranked=True)}"
    arrow = {"receive": "<", "token_return": "<", "send": ">", "room": ">"}.get(record.kind)
    return f"{record.kind}{arrow}{record.peer}" if arrow and record.peer >= 0 else record.kind


def numbers(stages: Iterable[StageRings], most: int) -> list[int]:
    """Return the newest `most` step numbers that any stage has, the newest first."""
    found = {record.step for stage in stages for record in _main(stage) if record.kind == "step"}
    return sorted(found, reverse=True)[:most]
