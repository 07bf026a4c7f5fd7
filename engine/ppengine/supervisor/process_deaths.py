"""The rule by which gateway, core and supervisor are restarted: at once, then with a back-off, and not for ever."""

from __future__ import annotations

MOST = 5
WITHIN_S = 600.0
"""Seconds within which `MOST` ends stop the engine: a restart does not remove their reason."""
BACKOFF_S = 0.25
"""Seconds until the restart after the second end; each further one doubles them."""
HELPER_AGAIN_S = 30.0
"""Seconds until an HTTP process, a store or the process of texts is restarted that keeps ending."""


class ProcessDeaths:
    """The times of the newest ends of one process."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def note(self, now: float) -> float | None:
        """Note an end at `now`; return the seconds until the restart, None if there must be none."""
        self._times = [time for time in self._times if now - time < WITHIN_S] + [now]
        before = len(self._times) - 1
        if before + 1 >= MOST:
            return None
        return 0.0 if before == 0 else BACKOFF_S * 2 ** (before - 1)
