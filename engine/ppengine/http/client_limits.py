"""Rules of clients as an HTTP process takes them from the core: a drain refuses, a kick closes streams.

The core counts open requests and requests a minute, over all HTTP processes: its answer refuses those.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from ppengine.http.api_errors import unavailable
from ppengine.http.client_stats import Call, ClientStats
from ppengine.protocol.clients import ClientRule

GRACE_S = 1.0
"""Seconds in which the streams of a kicked client end by the end of their requests; then they are cut."""
_AGAIN_S = 5


class ClientLimits:
    """The newest rules, by client."""

    def __init__(self, stats: ClientStats) -> None:
        self._stats = stats
        self._rules: dict[str, ClientRule] = {}
        self._kick: int | None = None
        """The newest kick that was carried out; None: kicks before the start of this process are not its own."""
        self._taken_at = 0.0
        """Time of the newest answer."""

    def take(self, rules: Sequence[ClientRule]) -> None:
        """Take the rules of an answer of the core, and close the streams of clients that were kicked since."""
        newest, before, self._taken_at = max((rule.kick for rule in rules), default=0), self._taken_at, time.monotonic()
        if self._kick is not None:
            for rule in rules:
                if rule.kick > self._kick:
                    # A call that began since the last answer may be the client's next try, behind the kick.
                    calls = [call for call in self._stats.open_calls(rule.client) if call.began <= before]
                    asyncio.get_running_loop().call_later(GRACE_S, _close, calls)
        self._kick = max(newest, self._kick or 0)
        self._rules = {rule.client: rule for rule in rules}

    def check(self, client: str) -> None:
        """Raise ApiError for a client that is drained: its prompt need not be tokenized."""
        rule = self._rules.get(client)
        if rule is not None and rule.draining:
            raise unavailable(f"client {client} is drained and gets no new requests", _AGAIN_S)


def _close(calls: Sequence[Call]) -> None:
    for call in calls:
        call.close()
