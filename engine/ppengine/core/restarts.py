"""What is done about a lost stage without an operator: a new generation alone, a new process, or nothing."""

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
        return self._engine.serving and self._engine.config.profile.parallel.restarts

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
