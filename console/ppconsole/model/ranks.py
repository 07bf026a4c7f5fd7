"""Tensor ranks of stages: their names, and whether an engine has several a stage."""

from __future__ import annotations

from collections.abc import Iterable

from ppengine.protocol.place import Place
from ppengine.protocol.snapshot import Snapshot
from ppengine.protocol.stage_info import StageInfo


def place_of(stage: StageInfo) -> Place:
    """Return stage and rank of one process."""
    return Place(stage.index, stage.tensor_rank)


def several(snapshot: Snapshot) -> bool:
    """Return whether stages have several ranks, so that each process is named with its own."""
    return snapshot.engine.tensor_parallel_size > 1 or any_other(snapshot.stages)


def any_other(stages: Iterable[StageInfo]) -> bool:
    """Return whether any process is of another rank than 0."""
    return any(stage.tensor_rank for stage in stages)


def short(place: Place, ranked: bool) -> str:
    """Return the name in tables: `1`, or `1.0` where stages have several ranks."""
    return f"{place.stage}.{place.rank}" if ranked or place.rank else f"{place.stage}"


def words(stage: int, rank: int | None) -> str:
    """Return the name in sentences: `stage 1`, or `stage 1 rank 0`; `rank` None: the whole stage."""
    return f"stage {stage}" if rank is None else f"stage {stage} rank {rank}"


def of_snapshot(snapshot: Snapshot, stage: StageInfo) -> str:
    """Return the name of one process in tables."""
    return short(place_of(stage), several(snapshot))


def words_of(snapshot: Snapshot, stage: StageInfo) -> str:
    """Return the name of one process in sentences."""
    return words(stage.index, stage.tensor_rank if several(snapshot) else None)
