"""Processes of others on a card, which take memory and time from the stages there."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from ppengine.common.sizes import size_text
from ppengine.diagnosis.budgets import NEIGHBOUR_USES
from ppengine.diagnosis.evidence import StageEvidence
from ppengine.diagnosis.phrases import percent
from ppengine.protocol.gpu import GpuInfo, GpuProcess

_FRESH_MS = 4000.0

Own = Callable[[int], bool]
"""Whether a pid is a process of this engine."""


def others(gpu: GpuInfo, stages: Mapping[int, int | None], own: Own) -> list[GpuProcess] | None:
    """Return the processes of others on a card; None: not known. `stages`: bytes by pid of the stages on the card."""
    if gpu.processes is None:
        return None
    known = [process.pid in stages for process in gpu.processes].count(True)
    if known == len(stages):
        return [process for process in gpu.processes if process.pid not in stages and not own(process.pid)]
    sizes = [size for size in stages.values() if size is not None]
    if known or len(sizes) < len(stages) or len(gpu.processes) < len(stages):
        return None
    # The driver numbers processes otherwise than this container. A stage is then the process of about its size.
    left = [msgspec.structs.replace(process, name="") for process in gpu.processes]
    for size in sorted(sizes, reverse=True):
        left.remove(min(left, key=lambda each: abs((each.bytes or 0) - size)))
    return left


def with_neighbours(
    now_ns: int,
    stage: StageEvidence,
    gpus: Mapping[str, tuple[GpuInfo, int]],
    cards: Mapping[str, Mapping[int, int | None]],
    own: Own,
) -> StageEvidence:
    """Return a stage with those who compute on its card.

    `gpus` by UUID, with the times of the reports; `cards`: the stages on each, bytes by pid.
    """
    if stage.card is None or stage.card not in gpus:
        return stage
    gpu, seen_ns = gpus[stage.card]
    if gpu.age_ms is None or gpu.age_ms + (now_ns - seen_ns) / 1e6 > _FRESH_MS:
        return stage
    found = others(gpu, cards.get(stage.card, {}), own) or []
    computing = [each for each in found if (each.sm or 0.0) >= NEIGHBOUR_USES]
    neighbours = sorted(computing, key=lambda each: -(each.sm or 0.0))
    mine = next((process.sm for process in gpu.processes or () if process.pid == stage.pid), None)
    return msgspec.structs.replace(stage, neighbours=tuple(neighbours), sm=mine)


def neighbour_lines(stage: StageEvidence) -> list[str]:
    """Return one line per process of others that computes on the stage's card, then the stage's own use."""
    lines = [
        f"{each.text} uses {percent(each.sm or 0.0)} of the card's SMs"
        + ("" if each.bytes is None else f", holds {size_text(each.bytes)}")
        for each in stage.neighbours
    ]
    return [*lines, f"this stage uses {percent(stage.sm)}"] if lines and stage.sm is not None else lines
