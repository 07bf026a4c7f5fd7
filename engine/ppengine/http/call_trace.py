"""Traces of calls as the HTTP process sees them, with or without OpenTelemetry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.timings import Timings


class CallTrace(Protocol):
    """The trace of one call."""

    def submitted(self, name: str, requests: Mapping[str, int], sampling: SamplingParams, stream: bool) -> None:
        """Note its id, and its requests with the number of their prompt tokens, before the core has them."""
        ...

    def refused(self) -> None:
        """Note that the core has taken none of the requests."""
        ...

    def part(self, choice: int, tokens: int, reason: str | None) -> None:
        """Note tokens of a choice, and its finish reason."""
        ...

    def end(self, status: int, left: bool) -> None:
        """Note the end of the answer; `left`: its client did not wait for it."""
        ...


class CallTraces(Protocol):
    """The traces of all calls."""

    def begin(self, route: str, headers: Mapping[str, str], client: str) -> CallTrace | None:
        """Begin the trace of a call; None: it has none."""
        ...

    def take(self, request: str, sample: int, timings: Timings | None, cached_tokens: int) -> None:
        """Take the times of a sample that has ended."""
        ...

    async def run(self) -> None:
        """Close late traces, until this is cancelled."""
        ...

    def close(self) -> None:
        """Export the last traces, in a second at most."""
        ...
