"""Clients of the HTTP port: counts by API key and route, from HTTP processes to the gateway and to consoles."""

from __future__ import annotations

import msgspec

from ppengine.protocol.quantiles import Quantiles

HTTP_EDGES_S = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper edges of the durations of calls, in seconds; the first three are those of vLLM's server."""
ROUTES = {
    "cmpl-": "/v1/completions", "chatcmpl-": "/v1/chat/completions", "resp_": "/v1/responses", "msg_": "/v1/messages",
}  # fmt: skip
"""Routes of the HTTP port by the beginning of the ids that requests get there."""


def route_of(request: str, client: str) -> str:
    """Return the route on which a request came, by its id; empty without a `client`, so that it came otherwise."""
    return next((route for begin, route in ROUTES.items() if client and request.startswith(begin)), "")


class KeyLimit(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one API key by its line in the file of keys; null: none."""

    requests_per_minute: int | None = None
    """Requests that may begin in a minute."""
    tokens_per_minute: int | None = None
    """Tokens of prompts and outputs."""
    concurrent: int | None = None
    """Requests that may be open at once."""


class ClientInfo(msgspec.Struct, kw_only=True):
    """One API key on one route, over all HTTP processes. Totals are since the start of those processes."""

    key: str
    """Name of the API key; `http` without keys."""
    route: str
    """Path of the API, as `/v1/chat/completions`; empty: a rule of a key that has not called yet."""
    open: int = 0
    """Requests whose answer is under way."""
    slow: int = 0
    """Those of them whose client has not read for a second."""
    requests_total: int = 0
    """Requests, refused ones too."""
    tokens_total: int = 0
    """Output tokens."""
    refused_total: int = 0
    """Answers of status 429 and 503: the engine was full or did not serve."""
    errors_total: int = 0
    """Answers of any other status from 400 to 499."""
    failed_total: int = 0
    """Answers of any other status from 500 on."""
    left_total: int = 0
    """Requests whose client left before the end."""
    most_open: int | None = None
    """Most open requests of the key, by `limit`; null: no limit."""
    per_minute: int | None = None
    """Most requests a minute of the key, by `limit`; null: no limit."""
    draining: bool = False
    """The key is drained: new requests are refused."""
    key_limit: KeyLimit | None = None
    """Limits of the key by the file of keys, which count beside those; null: it has none there."""
    requests_s: float | None = None
    """Requests a second over the last ten seconds; null at first."""
    tokens_s: float | None = None
    """Output tokens a second over the last ten seconds; null at first."""
    ttft_ms: Quantiles = msgspec.field(default_factory=Quantiles)
    """Milliseconds from the request to its first token, over the last five minutes."""
    itl_ms: Quantiles = msgspec.field(default_factory=Quantiles)
    """Milliseconds between two events of a stream, over the last five minutes."""


class ClientRule(msgspec.Struct, frozen=True, kw_only=True):
    """The rule of one API key, by the verbs `limit`, `drain-client` and `kick`."""

    client: str
    """Name of the API key."""
    most_open: int | None = None
    """Most open requests; null: no limit."""
    per_minute: int | None = None
    """Most requests a minute; null: no limit."""
    draining: bool = False
    """Its open requests end, new ones are refused."""
    kick: int = 0
    """Number of its kick of the last half minute, which grows over all clients; 0: none."""

    @property
    def text(self) -> str:
        """The rule in words, as `8 60/min drain`; empty: none."""
        return limits_text(self.most_open, self.per_minute, draining=self.draining)


def limits_text(most_open: int | None, per_minute: int | None, *, draining: bool) -> str:
    """Return limits in words, each as `limit` takes it."""
    words = ["" if most_open is None else str(most_open), "" if per_minute is None else f"{per_minute}/min"]
    return " ".join(filter(None, [*words, "drain" if draining else ""]))


class ClientCounts(msgspec.Struct, array_like=True):
    """One API key on one route, in one HTTP process."""

    key: str
    route: str
    open: int
    slow: int
    requests: int
    tokens: int
    refused: int
    errors: int
    failed: int
    left: int
    ttft: dict[int, int]
    """Durations of the last five minutes by bucket."""
    itl: dict[int, int]
    took: list[int] = []
    """Calls that ended, by `HTTP_EDGES_S` and above; since the start of the process."""
    took_s: float = 0.0
    """Their seconds in total."""
    limit: KeyLimit | None = None
    """Limits of the key by the file of keys; None: none."""


class ProcessFigures(msgspec.Struct, array_like=True):
    """A process as `prometheus_client` describes one."""

    start_time: float
    """Unix seconds."""
    cpu_s: float
    resident_bytes: int
    open_fds: int
    max_fds: int


class HttpReport(msgspec.Struct, tag="http-report", kw_only=True):
    """Counts of one HTTP process, each second."""

    role: str
    mono_ns: int
    clients: list[ClientCounts]
    process: ProcessFigures | None = None
