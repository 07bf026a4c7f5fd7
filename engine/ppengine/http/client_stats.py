"""Counts of the clients of one HTTP process, by API key and route."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from ppengine.common.durations import Histogram
from ppengine.http.call_trace import CallTrace
from ppengine.http.key_limits import Grant
from ppengine.protocol.clients import HTTP_EDGES_S, ClientCounts, KeyLimit

SLOW_S = 1.0
"""Seconds without reading after which a client counts as slow."""


@dataclass(eq=False, slots=True)
class Client:
    """One API key on one route."""

    requests: int = 0
    tokens: int = 0
    refused: int = 0
    errors: int = 0
    failed: int = 0
    left: int = 0
    open: set[Call] = field(default_factory=set)
    ttft: Histogram = field(default_factory=Histogram)
    itl: Histogram = field(default_factory=Histogram)
    took: list[int] = field(default_factory=lambda: [0] * (len(HTTP_EDGES_S) + 1))
    took_s: float = 0.0
    now: float = 0.0
    """Time of the newest message of the core with tokens in `between`."""
    between: dict[float, int] = field(default_factory=dict)
    """Tokens of that message that are not in the counts yet, by the time of the token before."""

    def add_later(self, before: float, count: int, now: float) -> None:
        """Count tokens of the time `now` whose tokens before came at the time `before`."""
        if self.now != now:
            self.turn(now)
        self.between[before] = self.between.get(before, 0) + count

    def turn(self, now: float) -> None:
        """Count the tokens of the newest message, and go on with that of the time `now`."""
        for before, count in self.between.items():
            self.itl.add(self.now - before, count, self.now)
            self.tokens += count
        self.between.clear()
        self.now = now


class Call:
    """One request, from its first byte to the end of its answer."""

    __slots__ = ("_grant", "_sending_since", "arrived", "began", "client", "closed", "on_close", "times", "trace")

    def __init__(self, client: Client, grant: Grant | None = None) -> None:
        self.client, self._grant = client, grant
        self.began = self.arrived = time.monotonic()
        """Times of its first byte, and of its last: the pace at which a client sends is no latency of the engine."""
        self.times: dict[int, float] = {}
        """Time of the newest event, by choice."""
        self._sending_since: float | None = None
        self.on_close: Callable[[], object] | None = None
        """Ends its answer, once that is under way."""
        self.closed = False
        """Whether it was closed by an operator: its client has not left."""
        self.trace: CallTrace | None = None
        client.requests += 1
        client.open.add(self)

    @property
    def observed(self) -> bool:
        """Whether each token is wanted as it comes, by a trace or by the limits of the key."""
        return self.trace is not None or self._grant is not None

    def complete(self) -> None:
        """Note that its body has come in full: latencies count from now."""
        self.arrived = time.monotonic()

    def prompt(self, tokens: int) -> None:
        """Count the tokens of its prompts."""
        if self._grant is not None:
            self._grant.spend(tokens)

    def part(self, choice: int, tokens: int) -> None:
        """Count the tokens of one event of a choice."""
        if self._grant is not None:
            self._grant.spend(tokens)
        if not tokens:
            return
        now, client, times = time.monotonic(), self.client, self.times
        client.tokens += tokens
        before = times.get(choice)
        if before is not None:
            client.itl.add(now - before, 1, now)
        elif not times:
            client.ttft.add(now - self.arrived, 1, now)
        times[choice] = now

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Note that an event is being sent, which takes as long as its client does not read."""
        self._sending_since = time.monotonic()
        try:
            yield
        finally:
            self._sending_since = None

    def slow(self, now: float) -> bool:
        """Return whether its client has not read for `SLOW_S`."""
        return self._sending_since is not None and now - self._sending_since > SLOW_S

    def close(self) -> None:
        """End its answer, however far it is, and its connection with it; nothing for a call that has ended."""
        if self in self.client.open and self.on_close is not None:
            self.closed = True
            self.on_close()

    def end(self, status: int, *, left: bool = False) -> None:
        """End the call with the status of its answer; `left`: its client did not wait for it. Only the first counts."""
        client = self.client
        if self not in client.open:
            return
        client.open.discard(self)
        self.on_close = None
        if self._grant is not None:
            self._grant.leave()
        if self.trace is not None:
            self.trace.end(status, left)
        took_s = time.monotonic() - self.began
        client.took[bisect_left(HTTP_EDGES_S, took_s)] += 1
        client.took_s += took_s
        client.left += left
        if left or status < 400:
            return
        if status in (429, 503):
            client.refused += 1
        elif status < 500:
            client.errors += 1
        else:
            client.failed += 1


class ClientStats:
    """The clients of this process. Their number is bounded by the keys and routes that exist."""

    def __init__(self, limits: Mapping[str, KeyLimit] | None = None) -> None:
        """`limits`: of keys by the file of keys."""
        self._limits = limits or {}
        self._clients: dict[tuple[str, str], Client] = {}

    def begin(self, key: str, route: str, grant: Grant | None = None) -> Call:
        """Begin a call; `grant`: its key has limits."""
        return Call(self._clients.setdefault((key, route), Client()), grant)

    def open_calls(self, key: str) -> list[Call]:
        """Return the calls of an API key that have not ended."""
        return [call for (name, _), one in self._clients.items() if name == key for call in one.open]

    def counts(self) -> list[ClientCounts]:
        """Return the counts of this moment."""
        now = time.monotonic()
        for one in self._clients.values():
            one.turn(now)
        return [
            ClientCounts(
                key, route, len(one.open), sum(call.slow(now) for call in one.open), one.requests, one.tokens,
                one.refused, one.errors, one.failed, one.left, one.ttft.counts(now), one.itl.counts(now),
                one.took, one.took_s, self._limits.get(key),
            )
            for (key, route), one in self._clients.items()
        ]  # fmt: skip
