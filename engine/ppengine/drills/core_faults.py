"""Two habits of KV connectors that this engine does not have, put into its core: both make computing wait for lookups.

They use the stores and backends of the engine as they are. So the same backend can be timed with and without them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from ppengine.drills.fault_points import CoreParts
from ppengine.drills.registry import FaultError, Undo, arm
from ppengine.protocol.frames import Codec
from ppengine.protocol.store_messages import FromStore

_NO_DEADLINE_S = 60.0
"""Seconds of a lookup: neither habit gives one up."""
_LOOK_MS = 50
"""Milliseconds between two looks whether the fault is lifted."""


@arm("slow", "core", clears=True, on="core", needs="lookups")
def lookup_in_step(parts: CoreParts) -> Undo:
    """The core asks the backends about each new prompt in its own turn, and waits there for the answer.

    Verdict: the engine core waits in its turns for most of the time, with the line that waits for the answer.
    """
    desk, codec, over = _desk(parts, "lookup-in-step"), Codec(FromStore), threading.Event()
    finder = desk.finder
    consider, find_s = finder.consider, finder._find_s

    def look_up_and_wait(pools: Any, request: Any) -> None:
        consider(pools, request)
        while request.state == "finding" and not over.is_set():
            if parts.stores.poll(_LOOK_MS):
                store, *frames = parts.stores.recv_multipart()
                desk.take(store, codec.decode(frames[-1]))

    _replace(finder, "consider", look_up_and_wait)
    finder._find_s = _NO_DEADLINE_S
    finder.wake()

    def undo() -> None:
        over.set()
        finder._find_s = find_s
        del finder.consider

    return undo


@arm("none", "store", clears=True, on="core", needs="lookups", held_out=True)
def load_polled_by_steps(parts: CoreParts) -> Undo:
    """Answers of stores count when a step retires, so the core sends empty steps while prompts wait for one.

    Verdict: no fault, or a backend is slow; steps without tokens run through all stages while nothing else does.
    """
    desk, scheduler = _desk(parts, "load-polled-by-steps"), parts.engine.health.serving.scheduler
    take, schedule, retire, over = desk.take, scheduler.schedule, scheduler.retire, threading.Event()
    kept: deque[tuple[bytes, Any]] = deque()
    find_s = desk.finder._find_s

    def keep(store: bytes, message: Any) -> None:
        if scheduler.queues.aside:
            kept.append((store, message))
        else:
            take(store, message)

    def poll() -> None:
        while kept:
            take(*kept.popleft())

    def schedule_or_poll() -> Any:
        if over.is_set():  # By the loop's own thread, with the answers that it owes.
            del desk.take, scheduler.schedule, scheduler.retire
            desk.finder._find_s = find_s
            poll()
            return schedule()
        step = schedule()
        idle = step is None and not scheduler.steps.unretired
        return scheduler.steps.emit([]) if idle and scheduler.queues.aside else step

    def retire_and_poll(*args: Any) -> Any:
        retirement = retire(*args)
        poll()
        return retirement

    _replace(desk, "take", keep)
    _replace(scheduler, "retire", retire_and_poll)
    _replace(scheduler, "schedule", schedule_or_poll)
    desk.finder._find_s = _NO_DEADLINE_S
    desk.finder.wake()
    return over.set


def _replace(part: Any, name: str, function: Callable[..., Any]) -> None:
    """Replace a method of one object. Raises FaultError if it was replaced before."""
    if name in vars(part):
        raise FaultError("the fault is on")
    setattr(part, name, function)


def _desk(parts: CoreParts, name: str) -> Any:
    """Return the store desk. Raises FaultError if nothing would be looked for."""
    desk = parts.engine.tiers
    if not desk.ready or parts.engine.health.serving is None:
        raise FaultError(f"{name} needs a backend of KV tiers, and an engine that serves")
    return desk
