"""Time in which stages are paused by a ptrace reader: py-spy pauses a process to read its native frames.

Such a pause is no fault, so the gateway subtracts it from the ages by which it judges a stage. A stage that hangs by
itself still hangs, and its age is only less by the pause. The agent reports the kernel state from before the pause,
because a paused process seems to have left its system call.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Iterator

import msgspec

from ppengine.protocol.stage_samples import TRACED, StageSample

_KEPT = 512
"""Changes of the sum that are kept; older ages are not corrected."""


class PtracePauses:
    """The agent's side: sums up the time in which at least one stage is paused. Any thread may pause one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._since_ns = 0
        self._sum_ns = 0
        self._resumed_ns: dict[int, float] = {}

    @contextlib.contextmanager
    def pause(self, pid: int) -> Iterator[None]:
        """Count a process as paused while the block lasts; each once at a time."""
        with self._lock:
            if not self._open:
                self._since_ns = time.monotonic_ns()
            self._open += 1
            self._resumed_ns[pid] = math.inf
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1
                if not self._open:
                    self._sum_ns += time.monotonic_ns() - self._since_ns
                self._resumed_ns[pid] = time.monotonic_ns()

    def was_paused(self, pid: int | None, from_ns: int) -> bool:
        """Return whether a process was paused at any time since `from_ns`."""
        with self._lock:
            return pid in self._resumed_ns and self._resumed_ns[pid] >= from_ns

    def total_ns(self) -> int:
        """Return the sum so far."""
        with self._lock:
            return self._sum_ns + (time.monotonic_ns() - self._since_ns if self._open else 0)


class PauseFilter:
    """The agent's side: removes the effect of the pauses from the kernel state of a stage."""

    def __init__(self, pauses: PtracePauses) -> None:
        self._pauses = pauses
        self._before: dict[tuple[int, int], StageSample] = {}

    def apply(self, sample: StageSample, from_ns: int) -> StageSample:
        """Return a sample that was taken since `from_ns`; a paused stage gets its kernel state from before."""
        key = sample.index, sample.rank
        if not (_is_traced(sample) and self._pauses.was_paused(sample.pid, from_ns)):
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


class PauseHistory:
    """The gateway's side: the sums that one agent has reported, with their times."""

    def __init__(self) -> None:
        self._reported: deque[tuple[int, int]] = deque(maxlen=_KEPT)

    def note(self, at_ns: int, total_ns: int) -> None:
        """Enter the sum of one report. A smaller one than before is that of another agent."""
        reported = self._reported
        if reported and total_ns < reported[-1][1]:
            reported.clear()
        if len(reported) > 1 and reported[-2][1] == reported[-1][1] == total_ns:
            reported.pop()  # There was no pause in between: the two ends of that time are enough.
        reported.append((at_ns, total_ns))

    def within_s(self, from_ns: int) -> float:
        """Return the seconds in which stages were paused since `from_ns`, as far as reported."""
        if not self._reported:
            return 0.0
        now_total = later = self._reported[-1]
        for earlier in reversed(self._reported):
            if earlier[0] <= from_ns:
                # Between two reports the sum is taken to grow evenly.
                share = (from_ns - earlier[0]) / max(1, later[0] - earlier[0])
                return (now_total[1] - earlier[1] - min(1.0, share) * (later[1] - earlier[1])) / 1e9
            later = earlier
        return (now_total[1] - later[1]) / 1e9
