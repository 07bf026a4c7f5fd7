"""The newest state of the engine as an HTTP process knows it: looked at twice a second, and for probes."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable

from ppengine.protocol.offline import StateAnswer

WAIT_MS = 1000
"""Milliseconds after which the core answers while it is loading."""
STATE_S = 0.5
"""Seconds between two looks."""
FRESH_S = 0.02
"""Age of a state that a probe takes. A stage may be restarted between two looks."""
LOOK_S = 0.5
"""Seconds for which a probe waits for a newer state, as the core may be busy."""
SILENT_S = 5.0
"""Seconds without a state after which the core counts as dead."""
TICK_S = 0.5
"""Seconds between two counts of the silence."""


class EngineState:
    """Asks the core for its state. `ask` takes the milliseconds that an answer may wait while the engine is loading."""

    def __init__(self, ask: Callable[[int], Awaitable[StateAnswer]], on_state: Callable[[StateAnswer], None]) -> None:
        """`on_state` is called with each new state."""
        self._ask, self._on_state = ask, on_state
        self.newest: StateAnswer | None = None
        self.served = False
        """Whether the engine has served: from then on it is loading only while its core is restarted."""
        self._at = 0.0
        """Time of the newest state."""
        self._silence_s = math.inf
        """Seconds since the newest state in which this process ran: one that was stopped reads its answers first."""
        self._look: asyncio.Future[None] | None = None
        """The look that probes wait for."""

    @property
    def silent(self) -> bool:
        """Whether the core has not answered for `SILENT_S`."""
        return self._silence_s > SILENT_S

    async def watch(self) -> None:
        """Look until this is cancelled."""
        counting = asyncio.ensure_future(self._count_silence())
        try:
            while True:
                # The core answers a question that waits as soon as it has loaded. So one always waits meanwhile.
                while self.newest is None or self.newest.state == "loading":
                    await self._take(WAIT_MS)
                await asyncio.sleep(STATE_S)
                await self._take(0)
        finally:
            counting.cancel()
            if self._look is not None:
                self._look.cancel()

    async def _count_silence(self) -> None:
        while True:
            begun = time.monotonic()
            await asyncio.sleep(TICK_S)
            self._silence_s += min(time.monotonic() - begun, 2 * TICK_S)

    async def look(self, most_s: float | None = None) -> None:
        """Have a state that is at most `FRESH_S` old, if the core answers within `most_s` (`LOOK_S`).

        Probes share one question.
        """
        if self._look is None or self._look.done():
            if time.monotonic() - self._at < FRESH_S:
                return
            self._look = asyncio.ensure_future(self._take(0))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._look), LOOK_S if most_s is None else most_s)

    async def confirm(self) -> None:
        """Look again if the engine does not seem to serve: others may have seen before this process that it does.

        The first state is waited for longer, as a port that has just opened is reported as serving.
        """
        if self.newest is None:
            await self.look(SILENT_S)
        elif self.silent or self.newest.state == "loading":
            await self.look()

    async def _take(self, wait_ms: int) -> None:
        self.newest = await self._ask(wait_ms)
        self._at = time.monotonic()
        self._silence_s = 0.0
        self.served = self.served or self.newest.state == "serving"
        self._on_state(self.newest)
