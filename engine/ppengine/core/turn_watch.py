"""Watches the turns of the core from a thread of its own: no message leaves while a turn lasts, so all stages wait.

A turn takes a millisecond or so. One that takes far longer is in a call that blocks, or computes. The thread looks ten
times a second, and takes the stack of the loop's thread while a turn is long. So a call that ends before any other
process could look is found with its line, too.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from ppengine.protocol.reports import HeldTurns

LONG_S = 0.1
"""Seconds from which a turn is long, and between two looks."""
WINDOW_S = 4.0
"""Seconds of the figures."""
LATE_S = 0.25
"""Seconds since the last look from which a look is late."""
_FRAMES = 8
_PACKAGE = "ppengine"


@dataclass(slots=True)
class _Turn:
    """A long turn."""

    began: float
    seen: float = 0.0
    """Time of the newest look."""
    held_s: float = 0.0
    """Seconds until then, without those in which its thread waited for a processor."""
    ran_s: float = 0.0
    """Seconds of them in which it computed."""
    frames: tuple[str, ...] = ()


class TurnWatch:
    """Made by the thread that takes the turns, which calls `begin` and `end`; `figures` is for any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._thread = threading.get_ident()
        self._times = _open_times(threading.get_native_id())
        self._began = 0.0
        self._turns: deque[_Turn] = deque(maxlen=256)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._looker = threading.Thread(target=self._run, name="turn-watch", daemon=True)
        self._looked = clock()
        self._spent = _read_times(self._times)

    def start(self) -> None:
        """Begin to look."""
        self._looker.start()

    def close(self) -> None:
        """Look no more."""
        self._closed.set()
        self._looker.join()
        if self._times is not None:
            os.close(self._times)

    def begin(self) -> None:
        """Note that a turn begins."""
        self._began = self._clock()

    def end(self) -> None:
        """Note that a turn has ended."""
        began, self._began = self._began, 0.0
        if began and (now := self._clock()) - began >= LONG_S:
            with self._lock:
                self._count(began, now)

    def figures(self) -> HeldTurns | None:
        """Return what the long turns of the last seconds were; None without any."""
        since = self._clock() - WINDOW_S
        with self._lock:
            while self._turns and self._turns[0].seen < since:
                self._turns.popleft()
            turns = list(self._turns)
        if not turns:
            return None
        by_place: Counter[tuple[str, ...]] = Counter()
        for turn in turns:
            by_place[turn.frames] += int(turn.held_s * 1e6)
        return HeldTurns(
            held_s=min(WINDOW_S, sum(turn.held_s for turn in turns)),
            ran_s=min(WINDOW_S, sum(turn.ran_s for turn in turns)),
            window_s=WINDOW_S,
            turns=len(turns),
            longest_s=max(turn.held_s for turn in turns),
            frames=list(by_place.most_common(1)[0][0]),
        )

    def look(self) -> None:
        """Count the time since the last look to the turn that lasts, if it is long, and take its stack."""
        now = self._clock()
        with self._lock:
            began = self._began
            if not began or now - began < LONG_S:
                self._looked, self._spent = now, _read_times(self._times)
                return
            turn = self._count(began, now)
            frame = sys._current_frames().get(self._thread)
            if frame is not None and self._began == began:
                turn.frames = _words(frame)

    def _count(self, began: float, now: float) -> _Turn:
        """Return the long turn that began at `began`, with its time until now."""
        ran_ns, waited_ns = self._spent
        self._spent = _read_times(self._times)
        since = now - max(began, self._looked)
        ran_s = min(since, (self._spent[0] - ran_ns) / 1e9)
        # A late look: the process was stopped, or that thread waited for the GIL while the turn computed.
        late = since > LATE_S
        held_s = ran_s if late else max(0.0, since - (self._spent[1] - waited_ns) / 1e9)
        turn = self._turns[-1] if self._turns else None
        if turn is None or turn.began != began:
            turn = _Turn(began, held_s=max(0.0, self._looked - began))
            self._turns.append(turn)
        self._looked = turn.seen = now
        turn.held_s += held_s
        turn.ran_s += ran_s
        return turn

    def _run(self) -> None:
        while not self._closed.wait(LONG_S):
            self.look()


def _words(frame: FrameType) -> tuple[str, ...]:
    """Return the newest frames, newest first, as `function file:line`."""
    stack = traceback.extract_stack(frame, limit=_FRAMES)
    return tuple(f"{one.name} {_short(one.filename)}:{one.lineno}" for one in reversed(stack))


def _short(path: str) -> str:
    """Return a path of this package from there on, and the last folder and name of others."""
    parts = path.split("/")
    return "/".join(parts[parts.index(_PACKAGE) :] if _PACKAGE in parts else parts[-2:])


def _open_times(thread: int) -> int | None:
    try:
        return os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _read_times(file: int | None) -> tuple[int, int]:
    """Return the nanoseconds for which the thread has run, and has waited for a processor; zeros if not known."""
    if file is None:
        return 0, 0
    ran, waited, _ = os.pread(file, 64, 0).split()
    return int(ran), int(waited)
