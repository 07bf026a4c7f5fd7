"""What is done about a lost stage: without an operator a new generation alone, a new process, or nothing; and what a
restart costs."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ppengine.core.engine import Engine

MOST_DEATHS, WINDOW_S = 3, 600.0
"""A stage that dies more often in so many seconds stays down until an operator restarts it."""
AGAIN_S = 60.0
"""A wire that closes once more within so many seconds: then the stages at its ends are started anew."""


class Restarts:
    """Decides by the profile, by what happened before, and by cordons."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._deaths: dict[int, deque[float]] = {stage: deque() for stage in range(engine.config.stages)}
        self._broke: dict[int, float] = {}
        """When a wire of a stage closed and its process lived."""
        self.cordoned = False
        """The newest refusal was for a cordon alone."""

    @property
    def _allowed(self) -> bool:
        return self._engine.serving and self._engine.config.profile.parallel.restart == "auto"

    def heals(self, stage: int) -> bool:
        """Note that a wire of `stage` closed; return whether a new generation is all that is done about it."""
        now = self._engine.clock()
        before = self._broke.get(stage)
        self._broke[stage] = now
        return self._allowed and (before is None or now - before > AGAIN_S)

    def refuses(self, stage: int, *, loading: bool) -> str | None:
        """Note that `stage` is lost, `loading` or not; return why it is not started anew, None: it is."""
        engine, deaths, now = self._engine, self._deaths[stage], self._engine.clock()
        self.cordoned = False
        if not self._allowed:
            return engine.board.loss
        lost, retry = engine.board.lost[stage], f"restart-stage {stage} tries once more"
        if loading:
            return f"stage {stage} died again while loading: {lost}; {retry}"
        deaths.append(now)
        while deaths[0] < now - WINDOW_S:
            deaths.popleft()
        if len(deaths) > MOST_DEATHS:
            minutes = WINDOW_S / 60
            return f"{engine.board.loss}, and {len(deaths)} times within {minutes:g} minutes; {retry}"
        if stage in engine.cordons:
            self.cordoned = True
            cordoned = f"it is {engine.cordons.of(stage)}: restart-stage {stage}, or lift the cordon"
            return f"stage {stage} is lost: {lost}; {cordoned}"
        return None


def restart_plan(engine: Engine, stage: int, generation: int) -> tuple[list[str], dict[str, float]]:
    """Return what a restart of `stage` that begins `generation` does and costs, in lines and figures."""
    board, live = engine.board, engine.live()
    stages = sorted({stage, *board.lost})
    ready = board.ready.get((stage, 0))
    where = f"stage {stage}" + (f" (pid {ready.pid})" if ready is not None else "")
    lines = [f"{where} is ended and started anew, generation {generation}"]
    lines += [f"stage {other}, which is lost, too" for other in stages if other != stage]
    others = [str(other) for other in range(engine.config.stages) if other not in stages]
    if others:
        lines.append(f"stages {' '.join(others)} keep weights and memory and forget requests")
    back = [request for request in live if request.num_computed]
    tokens, host = sum(r.num_computed for r in back), sum(len(r.host_blocks) for r in live)
    lines.append(f"{len(live)} requests stay; {len(back)} are recomputed, {tokens} tokens")
    if host:
        lines.append(f"{host} host blocks are void: swapped and held requests are recomputed too")
    figures = {"requests": len(live), "recompute_requests": len(back), "recompute_tokens": tokens, "host": host}
    return lines, {name: float(value) for name, value in figures.items()}
