"""Messages between the gateway and the agents of all nodes, over `agent`."""

from __future__ import annotations

import msgspec

from ppengine.protocol.control import Failed, Inspect, Inspected


class ClockQuestion(msgspec.Struct, tag="clock-question", kw_only=True):
    """Which time is it on your node? `nonce` comes back."""

    nonce: int


class ClockAnswer(msgspec.Struct, tag="clock-answer", kw_only=True):
    """The monotonic clock of a node when it answered, in nanoseconds."""

    nonce: int
    mono_ns: int


ToAgent = Inspect | ClockQuestion
FromAgent = Inspected | Failed | ClockAnswer
