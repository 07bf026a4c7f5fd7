"""A memory utilization as it is typed: `0.5`, or a change of the present KV memory: `-20%`, `+5%`, `-2GiB`."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ppengine.protocol.snapshot import Snapshot
    from ppengine.protocol.stage_info import StageInfo

FORM = "a number above 0 and at most 1, such as 0.5, or a change of the KV memory: -20%, +5%, -2GiB"
_CHANGE = re.compile(r"([+-])(\d+\.?\d*|\.\d+)\s*(%|([KMGT])(?:iB)?)", re.IGNORECASE)
_POWERS = {"K": 10, "M": 20, "G": 30, "T": 40}
_STEPS = 1e6
"""Utilizations between 0 and 1 that are computed: six decimals, as many as the console shows."""


class Change(NamedTuple):
    """A change of the present KV memory: by a share of it, or by bytes on each device."""

    text: str
    share: float = 0.0
    size: float = 0.0


def parse(text: str) -> float | Change:
    """Return the number or the change that `text` writes. Raises ValueError for anything else."""
    found = _CHANGE.fullmatch(text.strip())
    if found is None:
        return float(text)
    amount = float(found[1] + found[2])
    unit = found[4]
    if found[3] == "%":
        return Change(found[0], share=amount / 100)
    return Change(found[0], size=amount * float(2 ** _POWERS[unit.upper()]))


def utilization(text: str, snapshot: Snapshot) -> float:
    """Return the utilization that `text` writes, above 0 and at most 1. Raises ValueError with what would be right."""
    try:
        value = parse(text)
    except ValueError:
        value = math.nan
    if isinstance(value, Change):
        return after(value, snapshot)
    if not 0 < value <= 1:
        raise ValueError(f"{text!r} is no utilization; it is {FORM}")
    return value


def after(change: Change, snapshot: Snapshot) -> float:
    """Return the utilization after a change, by the stage that sets the number of blocks. Raises ValueError."""
    present, stage = snapshot.engine.memory_utilization, _binding(snapshot)
    memory, blocks = stage.memory, stage.kv_blocks
    if not (memory.total and memory.kv_mapped and blocks.mapped and blocks.capacity):
        raise ValueError(f"{change.text}: the KV memory of stage {stage.index} is not known yet; type it as 0.5")
    held = blocks.capacity * memory.kv_mapped / blocks.mapped
    more = change.size + change.share * held
    # Rounded up: a block that still fits is kept.
    value = math.ceil((present + more / memory.total) * _STEPS) / _STEPS
    if more < 0 and -more >= held:
        raise ValueError(f"{change.text} leaves no KV memory: it is {held / 2**20:.1f} MiB on stage {stage.index}")
    if not 0 < value <= 1:
        most = 100 * (1 - present) * memory.total / held
        raise ValueError(f"{change.text} is utilization {value:g}; the most is 1, which is +{most:.0f}%")
    return value


def resolved(values: dict[str, Any], snapshot: Snapshot | None) -> dict[str, Any]:
    """Return the values of a verb with each change in place of its utilization. Raises ValueError."""
    if not changes(values):
        return values
    if snapshot is None:
        raise ValueError("the present memory is not known yet; type a utilization such as 0.5")
    return {name: after(value, snapshot) if isinstance(value, Change) else value for name, value in values.items()}


def changes(values: dict[str, Any]) -> list[Change]:
    """Return the changes among the values of a verb."""
    return [value for value in values.values() if isinstance(value, Change)]


def stepped(text: str, percent: int) -> str:
    """Return the change by `percent` more than `text`, which counts as none if it is no percentage."""
    try:
        value = parse(text)
    except ValueError:
        value = 0.0
    before = round(100 * value.share) if isinstance(value, Change) else 0
    return f"{max(-95, before + percent):+d}%"


def _binding(snapshot: Snapshot) -> StageInfo:
    """Return the stage that sets the number of blocks. Raises ValueError if there is no stage."""
    if not snapshot.stages:
        raise ValueError("no stage is known yet; type a utilization such as 0.5")
    return next((stage for stage in snapshot.stages if stage.kv_blocks.binding), snapshot.stages[0])
