"""The figures of a request that has ended: in the list of the newest ones, and in the event of its end."""

from __future__ import annotations

import msgspec

from ppengine.protocol.clients import route_of
from ppengine.protocol.tiers import PromptSources

FINISHED_MOST = 1000
"""Requests that have ended and are kept for a look."""


class FinishedInfo(msgspec.Struct, kw_only=True):
    """One request, or one sample of it, that has ended; no text."""

    id: str
    """Id of the request, or of the sample."""
    owner: str
    """User or session that submitted it."""
    wall: float
    """End in Unix seconds."""
    ended_s: float
    """Seconds since the end; 0 in an event."""
    took_s: float
    """Seconds from arrival to the end."""
    prompt_tokens: int
    """Number of prompt tokens."""
    output_tokens: int
    """Number of output tokens."""
    reason: str
    """Finish reason: `stop`, `length`, `abort`, `lost`, ..."""
    by: str = ""
    """Author of its abort; empty: not aborted, or by no operator."""
    prepare_s: float = 0.0
    """Seconds from arrival to the queue: the HTTP process or the gateway, chat template, tokens, grammar."""
    queue_s: float | None = None
    """Seconds in the queue until it first got blocks; None: it never did."""
    ttft_s: float | None = None
    """Seconds from arrival to its first token; None: it had none."""
    itl_ms: float | None = None
    """Mean milliseconds between its tokens; None with fewer than two."""
    itl_p50_ms: float | None = None
    """Median of the milliseconds between its tokens, at most 2.2 % off; None with fewer than two."""
    itl_p99_ms: float | None = None
    """99th percentile of the milliseconds between its tokens; None with fewer than two."""
    preemptions: int = 0
    """Times that its blocks were taken."""
    model_limit: int | None = None
    """Tokens of prompt and output that the model allows, if this ended it; None: something else did."""
    client: str = ""
    """Name of the API key of the HTTP port with which it came; empty: it came otherwise."""
    loss: str = ""
    """Why it is lost, in one line; empty: it is not."""
    sources: PromptSources | None = None
    """Sources of the tokens of its last start; None without KV tiers."""

    @property
    def route(self) -> str:
        """The route of the HTTP port on which it came; empty: it came otherwise."""
        return route_of(self.id, self.client)

    @property
    def ending(self) -> str:
        """The finish reason in words."""
        return ending_text(self.reason, self.model_limit, self.by, self.loss)


def ending_text(reason: str, model_limit: int | None, by: str = "", loss: str = "") -> str:
    """Return a finish reason in words.

    An abort has its author, a loss its reason, and a length the limit if it is the model's.
    """
    if loss:
        return f"{reason}: {loss}"
    if by:
        return f"{reason} by {by}"
    return reason if model_limit is None else f"{reason}: the model's limit of {model_limit} tokens"
