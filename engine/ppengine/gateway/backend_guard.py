"""Has a backend paused whose calls end its stores again and again: such an end takes all other backends with it."""

from __future__ import annotations

import time
from collections.abc import Callable

from ppengine.protocol.backend_calls import while_text
from ppengine.protocol.facts import Exited
from ppengine.protocol.store_verbs import StorePause

ENDS = 2
"""Ends of stores in a row in calls of one backend."""
AGAIN_S = 600.0
"""Seconds after which an end is no repetition of the one before it."""

Issue = Callable[[str, StorePause, str], None]
"""Carries out a verb of the engine itself: an id, the verb, the reason. The second one of an id changes nothing."""


class BackendGuard:
    """Counts the ends of stores by the backends in whose calls they were. Facts come again to each new gateway."""

    def __init__(self, issue: Issue, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._issue, self._clock_ns = issue, clock_ns
        self._ends: dict[str, tuple[int, int]] = {}
        """Ends in a row and the time of the newest one, by backend."""

    def note(self, exited: Exited) -> None:
        """Take the end of a process. One in which no call was under way says nothing of a backend."""
        backends = {call.backend for call in exited.calls}
        if not backends:
            return
        # A call that was under way by chance is not so at the next end.
        self._ends = {name: self._next(name, exited.mono_ns) for name in backends}
        guilty = [name for name, (count, _) in self._ends.items() if count >= ENDS]
        if len(guilty) != 1:
            return
        (name,) = guilty
        del self._ends[name]
        if self._clock_ns() - exited.mono_ns < AGAIN_S * 1e9:
            calls = while_text([call for call in exited.calls if call.backend == name])
            reason = f"{ENDS} stores have ended in a row{calls}; ppconsole store resume {name} uses it again"
            self._issue(f"engine-pause-{name}-{exited.pid}", StorePause(backend=name), reason)

    def _next(self, name: str, at_ns: int) -> tuple[int, int]:
        count, before_ns = self._ends.get(name, (0, at_ns))
        return (count + 1 if at_ns - before_ns < AGAIN_S * 1e9 else 1), at_ns
