"""Points at which a fault can strike a stage: its own parts, each behind a stand-in that checks the points first.

The hot path has no code for this: a stage with faults on demand is assembled from stand-ins once, after boot.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ppengine.common.ring import RingWriter
from ppengine.drills.fault_messages import CORE
from ppengine.drills.registry import Kind

Go = Callable[..., Any]
"""The call in whose place a fault acts."""


@dataclass
class StageParts:
    """The stage as a fault sees it, in its present generation."""

    stage: int
    stages: int
    ring: RingWriter
    control: threading.Thread
    run_dir: Path = Path()
    runner: Any = None
    receiver: Any = None
    """None on the first stage."""
    sender: Any = None
    """The end for hidden states, or the last stage's for tokens; None if it sends nothing."""
    buffers: Any = None
    """Device buffers; None on a CPU."""
    rank: int = 0

    @property
    def name(self) -> str:
        """Name of the process for operators."""
        group = getattr(self.runner, "_group", None)
        return f"stage {self.stage}" + (f" rank {self.rank}" if group is not None and group.size > 1 else "")


@dataclass
class CoreParts:
    """The core as a fault sees it. Its loop has no points: a fault replaces a method of a part."""

    engine: Any
    stores: Any
    """Socket of the stores; it belongs to the thread of the loop."""
    stage: int = CORE.stage
    rank: int = CORE.rank
    buffers: None = None
    name: str = "the core"


class Fault:
    """A fault that is on, aimed at stage `aim`: this one, or its neighbour. `over` is set when it is lifted."""

    def __init__(self, kind: Kind, parts: StageParts, aim: int) -> None:
        self.kind, self.parts, self.aim = kind, parts, aim
        self.since = time.monotonic()
        self.tool: Any = None
        """The result of `Kind.prepare`."""
        self.over = threading.Event()
        self.late: deque[Callable[[], object]] = deque()
        """Calls for the step loop after the fault is lifted: a socket belongs to one thread."""
        self._kept: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()
        self._struck = False

    def hold(self) -> None:
        """Wait, without the GIL, until it is lifted."""
        self.over.wait()

    def keep(self, call: Callable[[], object]) -> None:
        """Defer `call` until the fault is lifted; then the fault thread makes the calls in order."""
        with self._lock:
            if not self.over.is_set():
                self._kept.append(call)
                return
        call()

    def lift(self) -> None:
        """Make the deferred calls, and release waiting threads."""
        with self._lock:
            while self._kept:
                self._kept.popleft()()
            self.over.set()

    def first(self) -> bool:
        """Return whether it strikes for the first time."""
        struck, self._struck = self._struck, True
        return not struck

    def strike(self, go: Go, *args: Any) -> Any:
        """Act in place of `go(*args)`."""
        return self.kind.act(self, go, *args)


class Points:
    """The faults that are on, by the point where they strike. The fault thread changes them, the others read them."""

    def __init__(self) -> None:
        self._at: dict[str, Fault] = {}
        self._late: deque[Callable[[], object]] = deque()

    def add(self, fault: Fault, point: str) -> None:
        """Let `fault` strike at `point` from now on, in place of an earlier one."""
        self._at[point] = fault

    def lift(self, fault: Fault) -> None:
        """Remove `fault`, release its waiting threads, and make its deferred calls."""
        fault.lift()
        for point in [point for point, other in self._at.items() if other is fault]:
            del self._at[point]
        self._late.extend(fault.late)

    def through(self, point: str, go: Go, *args: Any) -> Any:
        """Return `go(*args)`, or the result of a fault at `point`."""
        while point == "poll" and self._late:
            self._late.popleft()()
        fault = self._at.get(point)
        return go(*args) if fault is None else fault.strike(go, *args)


class StandIn:
    """Wraps one part. Its attributes are the part's; a method named in `at` is called by way of that point."""

    def __init__(self, part: Any, points: Points, **at: str) -> None:
        self._part, self._points, self._at = part, points, at

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._part, name)
        return partial(self._points.through, self._at[name], value) if name in self._at else value


class GraphsPoint(StandIn):
    """The layers of a stage on a GPU, where a step is the replay of a graph."""

    def run(self, *args: Any) -> Any:
        """Point `forward`, with the stream of the layers as the current one, as it is without a graph."""
        with self._part.compute.use():
            return self._points.through("forward", self._part.run, *args)


class SwapPoint(StandIn):
    """The host memory of swapped blocks."""

    @property
    def layers(self) -> Any:
        """Point `copy`: the runner takes the layers when it is about to copy."""
        return self._points.through("copy", lambda: self._part.layers)


class SocketPoint(StandIn):
    """The step loop's socket to the core. A look at its events is a poll that takes no time.

    `leave` is called before it closes.
    """

    def __init__(self, part: Any, points: Points, leave: Callable[[], None]) -> None:
        super().__init__(part, points, poll="poll", send="ack")
        self._leave = leave

    def getsockopt(self, option: int) -> Any:
        """Point `poll`; without a message, no event is there."""
        return self._points.through("poll", lambda _: self._part.getsockopt(option), 0)

    def close(self) -> None:
        """End the fault thread, then close."""
        self._leave()
        self._part.close()
