"""Decisions about a lost stage: a new generation alone, a new process, or neither; and the cost of a restart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ppengine.core.scheduler.request import Request
from ppengine.core.stage_records import StageRecord, Stages

MOST_DEATHS, WINDOW_S = 3, 600.0
"""Deaths of a stage within this many seconds; one more, and it stays down until an operator restarts it."""
AGAIN_S = 60.0
"""Seconds after a closed connection; if one closes again within them, the stages at both ends are restarted."""


class Refusal(NamedTuple):
    """The reason why a lost stage is not restarted automatically."""

    text: str
    cordon: bool = False
    """The cordon of the stage is the only reason."""


def reconnects(record: StageRecord, now: float) -> bool:
    """Note that a connection closed; return whether a new generation without a new process is enough."""
    before, record.wire_closed = record.wire_closed, now
    return before is None or now - before > AGAIN_S


def refusal(record: StageRecord, first_loss: str, now: float) -> Refusal | None:
    """Note a loss; return why the stage is not restarted, None if it is."""
    loss, retry = record.loss.why if record.loss else "", f"restart-stage {record.stage} tries once more"
    deaths = record.deaths
    deaths.append(now)
    while deaths[0] < now - WINDOW_S:
        deaths.popleft()
    if len(deaths) > MOST_DEATHS:
        return Refusal(f"{first_loss}, and {len(deaths)} times within {WINDOW_S / 60:g} minutes; {retry}")
    if record.cordoned:
        lift = f"it is {record.cordoned}: restart-stage {record.stage}, or lift the cordon"
        return Refusal(f"{record.name} is lost: {loss}; {lift}", cordon=True)
    return None


def pids_text(records: Sequence[StageRecord]) -> str:
    """Return the pids of the processes that have loaded: `pid 7`, `pids 7 and 8`; empty if none has."""
    pids = [str(record.ready.pid) for record in records if record.ready is not None]
    return f"pid{'s' * (len(pids) > 1)} {' and '.join(pids)}" if pids else ""


def restart_plan(
    stages: Stages, live: Sequence[Request], stage: int, generation: int
) -> tuple[list[str], dict[str, float]]:
    """Return the effects and the cost of a restart of `stage` that begins `generation`, in lines and figures."""
    restarted = sorted({stage, *(record.stage for record in stages.lost)})
    pids = pids_text(stages.ranks(stage))
    where = f"stage {stage}" + (f" ({pids})" if pids else "")
    lines = [f"{where} is ended and restarted, generation {generation}"]
    lines += [f"stage {other}, which is lost, too" for other in restarted if other != stage]
    others = [str(record.stage) for record in stages if record.stage not in restarted and not record.place.rank]
    if others:
        lines.append(f"stages {' '.join(others)} keep weights and memory and drop requests")
    back = [request for request in live if request.num_computed]
    tokens, host = sum(r.num_computed for r in back), sum(len(r.host_blocks) for r in live)
    lines.append(f"{len(live)} requests stay; {len(back)} are recomputed, {tokens} tokens")
    if host:
        lines.append(f"{host} host blocks are void: swapped and held requests are recomputed too")
    figures = {"requests": len(live), "recompute_requests": len(back), "recompute_tokens": tokens, "host": host}
    return lines, {name: float(value) for name, value in figures.items()}
