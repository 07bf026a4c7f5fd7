"""Rows of the stage table: one a stage with its ranks folded in, one a rank of an opened stage, the rest folded."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

import msgspec
from ppengine.protocol.place import Place
from ppengine.protocol.snapshot import Snapshot
from ppengine.protocol.stage_info import StageInfo

from ppconsole.model.ranks import place_of, several, short
from ppconsole.model.units import ratio
from ppconsole.view.marks import faulty_places

HALTED = ("dead", "stopped")
"""States of a process that does nothing by itself."""
_ORDER = (*HALTED, "resizing", "blocked", "loading", "starved")
NONE_OPENED: frozenset[int] = frozenset()


class RowKey(NamedTuple):
    """Identity of a row: a stage, or one rank of it. `rank` None: all ranks of the stage are in the row."""

    stage: int
    rank: int | None = None


class StageRow(NamedTuple):
    """One row. `info`: of a folded stage the state of its worst rank; `name`: see `_name`."""

    key: RowKey
    info: StageInfo
    name: str


def severity(stage: StageInfo, faulty: Set[Place]) -> tuple[float, ...]:
    """Return the order of trouble, larger is worse: fault, bad state, no progress, sets the minimum, busy."""
    bad = len(_ORDER) - _ORDER.index(stage.state) if stage.state in _ORDER else 0
    stalled = int((stage.progress_age_ms or 0.0) / 1000)
    busy = -1.0 if stage.idle_fraction is None else 1.0 - stage.idle_fraction
    return (place_of(stage) in faulty, bad, stalled, stage.kv_blocks.binding, round(busy, 1), -stage.index)


def fold(
    snapshot: Snapshot, limit: int, opened: Set[int] = NONE_OPENED
) -> tuple[list[StageRow], list[StageRow]]:  # fmt: skip
    """Return the rows to show, at most `limit` in pipeline order, and the rest. `opened`: stages with a row a rank.

    Faulty rows stay first, then those of opened stages, then the others by their severity.
    """
    faulty = faulty_places(snapshot)
    found = rows(snapshot, opened, faulty)
    if len(found) <= limit:
        return found, []

    def weight(row: StageRow) -> tuple[object, ...]:
        mine = severity(row.info, faulty)
        return (mine[0], row.key.stage in opened, mine)

    keep = {row.key for row in sorted(found, key=weight, reverse=True)[: limit - 1]}
    return [row for row in found if row.key in keep], [row for row in found if row.key not in keep]


def rows(snapshot: Snapshot, opened: Set[int], faulty: Set[Place]) -> list[StageRow]:
    """Return all rows in pipeline order."""
    ranked = several(snapshot)
    stages: dict[int, list[StageInfo]] = {}
    for stage in snapshot.stages:
        stages.setdefault(stage.index, []).append(stage)
    found = []
    for index, ranks in sorted(stages.items()):
        if index in opened:
            found += [
                StageRow(RowKey(index, each.tensor_rank), each, short(place_of(each), ranked))
                for each in sorted(ranks, key=lambda each: each.tensor_rank)
            ]
        else:
            worst = max(ranks, key=lambda each: severity(each, faulty))
            found.append(StageRow(RowKey(index), _folded(worst, ranks), _name(worst, len(ranks), ranked, faulty)))
    return found


def rows_of_ranks(snapshot: Snapshot, stage: int) -> list[StageRow]:
    """Return one row a rank of a stage."""
    return [each for each in rows(snapshot, {stage}, faulty_places(snapshot)) if each.key.stage == stage]


def count(snapshot: Snapshot, opened: Set[int]) -> int:
    """Return the number of rows."""
    if not opened:
        return len({stage.index for stage in snapshot.stages})
    return len({RowKey(each.index, each.tensor_rank if each.index in opened else None) for each in snapshot.stages})


def name_width(snapshot: Snapshot) -> int:
    """Return the cells that the longest name of any state takes, so that columns keep still."""
    if not several(snapshot):
        return 0
    last = max((stage.index for stage in snapshot.stages), default=0)
    others = max(1, snapshot.engine.tensor_parallel_size - 1)
    return len(f"{last}.{others}+{others}")


def _name(worst: StageInfo, ranks: int, ranked: bool, faulty: Set[Place]) -> str:
    """Return the name of a folded stage: `1`, `1×2` with two ranks, `1.0+1` if rank 0 is faulty or has halted."""
    if ranks == 1:
        return short(place_of(worst), ranked)
    if place_of(worst) in faulty or worst.state in HALTED:
        return f"{short(place_of(worst), True)}+{ranks - 1}"
    return f"{worst.index}×{ranks}"


def _folded(worst: StageInfo, ranks: Sequence[StageInfo]) -> StageInfo:
    """Return the worst rank with the memory of the fullest one, the fewest blocks, the longest wait, the oldest sample.

    A dead rank has no figures of memory; the others have.
    """
    if len(ranks) == 1:
        return worst
    fullest = max(ranks, key=lambda each: (ratio(each.memory.used, each.memory.limit) or -1.0, each is worst))
    known = [each.kv_blocks for each in ranks if each.kv_blocks.capacity is not None]
    return msgspec.structs.replace(
        worst,
        memory=fullest.memory,
        kv_blocks=min(known, key=lambda each: each.capacity or 0, default=worst.kv_blocks),
        rank_wait=max((each.rank_wait for each in ranks if each.rank_wait is not None), default=None),
        sample_age_ms=max((each.sample_age_ms for each in ranks if each.sample_age_ms is not None), default=None),
        cordon=next((each.cordon for each in ranks if each.cordon is not None), None),
    )
