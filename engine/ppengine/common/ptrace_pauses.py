"""Time in which stages stood because somebody looked at them: for its native frames a process is paused.

It is nobody's fault, and comes off the ages by which a stage is judged. What stands by itself stands on: its age is
only less by what it was held. Where it stands was seen before: who waits in a poll is not in it while it is held.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Iterator

import msgspec

from ppengine.protocol.reports import TRACED, StageSample

_KEPT = 512
"""Changes of the sum; older ages are as they are."""


class Holds:
    """The agent's side: sums up the time in which at least one stage is held. Any thread may hold one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._since_ns = 0
        self._sum_ns = 0
        self._let_go_ns: dict[int, float] = {}

    @contextlib.contextmanager
    def hold(self, pid: int) -> Iterator[None]:
        """Hold a process while the block lasts; each once at a time."""
        with self._lock:
            if not self._open:
                self._since_ns = time.monotonic_ns()
            self._open += 1
            self._let_go_ns[pid] = math.inf
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1
                if not self._open:
                    self._sum_ns += time.monotonic_ns() - self._since_ns
                self._let_go_ns[pid] = time.monotonic_ns()

    def held(self, pid: int | None, from_ns: int) -> bool:
        """Return whether a process was held at any time since `from_ns`."""
        with self._lock:
            return pid in self._let_go_ns and self._let_go_ns[pid] >= from_ns

    def total_ns(self) -> int:
        """Return the sum so far."""
        with self._lock:
            return self._sum_ns + (time.monotonic_ns() - self._since_ns if self._open else 0)


class Unheld:
    """The agent's side: what the kernel says of a stage without what is due to who holds it."""

    def __init__(self, holds: Holds) -> None:
        self._holds = holds
        self._before: dict[tuple[int, int], StageSample] = {}

    def see(self, sample: StageSample, from_ns: int) -> StageSample:
        """Return a sample that was taken since `from_ns`; where the stage stood is what was seen before it was held."""
        key = sample.index, sample.rank
        if not (_is_traced(sample) and self._holds.held(sample.pid, from_ns)):
            self._before[key] = sample
            return sample
        before = self._before.get(key)
        if before is None or before.pid != sample.pid:
            return msgspec.structs.replace(sample, process_state="S", main_state="S", tracer=None, wchan=None)
        return msgspec.structs.replace(
            sample,
            process_state=before.process_state,
            main_state=before.main_state,
            tracer=before.tracer,
            wchan=before.wchan,
        )


def _is_traced(sample: StageSample) -> bool:
    return TRACED in (sample.process_state, sample.main_state) or sample.wchan == "ptrace_stop"


class Held:
    """The judge's side: what the sum was when, as one agent has told."""

    def __init__(self) -> None:
        self._told: deque[tuple[int, int]] = deque(maxlen=_KEPT)

    def note(self, at_ns: int, total_ns: int) -> None:
        """Enter the sum of one report. A smaller one than before is that of another agent."""
        told = self._told
        if told and total_ns < told[-1][1]:
            told.clear()
        if len(told) > 1 and told[-2][1] == told[-1][1] == total_ns:
            told.pop()  # Nothing was held in between: the two ends of that time are enough.
        told.append((at_ns, total_ns))

    def within_s(self, from_ns: int) -> float:
        """Return the seconds in which stages were held since `from_ns`, as far as reports have told."""
        if not self._told:
            return 0.0
        now_total = later = self._told[-1]
        for told in reversed(self._told):
            if told[0] <= from_ns:
                # Between two reports the sum has grown evenly, as far as anybody knows.
                share = (from_ns - told[0]) / max(1, later[0] - told[0])
                return (now_total[1] - told[1] - min(1.0, share) * (later[1] - told[1])) / 1e9
            later = told
        return (now_total[1] - later[1]) / 1e9
