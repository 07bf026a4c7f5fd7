"""Measures from a thread of little work how often the GIL is held when it is wanted, and for how long.

The thread sleeps for a known time without the GIL. If it is late, it has waited for the GIL, but for
the time in which it had no core. A long wait may also be for a main thread that holds the GIL and
has no core, so that time of the main thread is left out of it.

A host may take cores from its guests without a trace in those times, so the switches count, too: a
thread that waits for the GIL gives up its core at once, and again every 5 ms.

A sleep begins while the GIL is free, so a short one finds less than half of the holds, for which the
agent makes up. Sleeps of many lengths find all. They count while the main thread always has a core;
while it has not, short ones do.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from resource import RUSAGE_THREAD, getrusage
from time import monotonic_ns

from ppengine.common.ring import Word
from ppengine.stage.recorder import Recorder

_TURN_NS, _LONG_NS = 5_000_000, 8_000_000
"""The turn that Python grants a thread; a wait of 8 ms is for a thread that grants none."""
_GOLDEN = 0.618034
_WAIT_SWITCHES, _LONG_SWITCHES = 2, 3
"""Least voluntary switches of a sleep and any, or a long, wait: one to sleep, one to wait, one more after 5 ms."""
_LEAST_MS, _SPREAD_MS = 40, 80
_SHORT_MS = 20
"""The shorter a sleep, the less time without a core of the main thread lies outside of the wait."""
_QUIET_NS = 1_000_000
"""Most time without a core of the main thread in a long sleep that counts."""


class GilProbe:
    """Belongs to the thread that makes it; its counts are in the header of that thread's ring."""

    def __init__(self, ring: Recorder) -> None:
        self._ring = ring
        self._turn, self._crowded = 0.0, False
        # One system call a look: the files stay open. A kernel may have none.
        self._own = _open("/proc/thread-self/schedstat")
        alone = threading.get_native_id() == os.getpid()
        self._main = None if alone else _open("/proc/self/schedstat")

    def sleep_ms(self) -> int:
        """Return the milliseconds of the next sleep: 40 to 120, and 20 behind one in which the main thread had no core.

        Long ones are spread, so that no holder keeps time with the probe.
        """
        if self._crowded:
            self._crowded = False
            return _SHORT_MS
        self._turn = (self._turn + _GOLDEN) % 1.0
        return _LEAST_MS + int(_SPREAD_MS * self._turn)

    @contextmanager
    def asleep(self, ms: int) -> Iterator[None]:
        """Count a block that sleeps for `ms`; one that ends early is left out."""
        own_ns, main_ns, begun_ns = _waited_ns(self._own), _waited_ns(self._main), monotonic_ns()
        before = getrusage(RUSAGE_THREAD).ru_nvcsw
        yield
        switches = getrusage(RUSAGE_THREAD).ru_nvcsw - before
        late_ns = monotonic_ns() - begun_ns - ms * 1_000_000
        if late_ns < 0:
            return
        late_ns -= _waited_ns(self._own) - own_ns
        main_late_ns = _waited_ns(self._main) - main_ns
        self._crowded = ms != _SHORT_MS and main_late_ns > _QUIET_NS
        if self._crowded:
            return
        held_ns = late_ns - main_late_ns
        ring = self._ring
        ring.count(Word.GIL_PROBES, 1)
        ring.count(Word.GIL_SLEEP_NS, ms * 1_000_000)
        if switches >= _WAIT_SWITCHES:
            ring.count(Word.GIL_WAITS, 1)
            ring.count(Word.GIL_WAIT_NS, max(0, min(late_ns, _TURN_NS)))
        if held_ns >= _LONG_NS and switches >= _LONG_SWITCHES:
            ring.count(Word.GIL_HOLDS, 1)
            ring.count(Word.GIL_HOLD_NS, held_ns)

    def close(self) -> None:
        """Close the files."""
        for file in (self._own, self._main):
            if file is not None:
                os.close(file)
        self._own = self._main = None


def _open(path: str) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _waited_ns(file: int | None) -> int:
    """Return the time so far in which a thread could run and had no core; 0: the kernel does not say."""
    return 0 if file is None else int(os.pread(file, 64, 0).split()[1])
