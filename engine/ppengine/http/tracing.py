"""OpenTelemetry traces: a span a call, with child spans of its requests' times in the engine.

The core sends the times of a request with its end, and the SDK exports on a thread of the HTTP process: no step waits.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from typing_extensions import override

from ppengine.http.call_trace import CallTrace, CallTraces
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.timings import Timings

log = logging.getLogger("ppengine.http")

OPERATIONS = {
    "/v1/chat/completions": "chat", "/v1/completions": "text_completion", "/v1/responses": "chat",
    "/v1/messages": "chat",
}  # fmt: skip
"""`gen_ai.operation.name` by route; calls of other routes have no span."""
PROVIDER = "ppconsole"
EXPORT_S, LEAVE_S = 5.0, 1.0
"""Limits of one export, and of the last one when the process ends."""
EVERY_MS = 1000
"""Milliseconds between two exports, unless OpenTelemetry's variable has others."""
AGAIN_S = 60.0
"""Seconds between two lines of OpenTelemetry in the log."""
LATE_S = 5.0
"""Seconds after a call within which the core's times of its requests must come."""
_SAMPLING = ("temperature", "top_p", "seed", "max_tokens", "frequency_penalty", "presence_penalty")
"""Sampling parameters that have an attribute of the same name."""
_Value = str | int | float | bool | list[str]


@dataclass(eq=False)
class _Call(CallTrace):
    """One call and its span."""

    _traces: Traces
    _span: Span
    _began: float
    waiting: set[str] = field(default_factory=set)
    """Samples whose times have not come."""
    ended: float | None = None
    """Time of the end of the answer."""
    _reasons: dict[int, str] = field(default_factory=dict)
    _output_tokens: int = 0
    _cached: int = 0
    _preemptions: int = 0

    @override
    def submitted(self, name: str, requests: Mapping[str, int], sampling: SamplingParams, stream: bool) -> None:
        values: dict[str, _Value | None] = {key: getattr(sampling, key) for key in _SAMPLING}
        values |= {"choice.count": sampling.n if sampling.n > 1 else None, "stream": stream or None}
        values["top_k"] = sampling.top_k if sampling.top_k > 0 else None
        self._set({f"gen_ai.request.{key}": value for key, value in values.items()})
        self._set({"gen_ai.response.id": name, "gen_ai.usage.input_tokens": sum(requests.values())})
        self._traces.expect(self, requests, sampling.n)

    @override
    def refused(self) -> None:
        self._traces.forget(self)

    @override
    def part(self, choice: int, tokens: int, reason: str | None) -> None:
        if tokens and not self._output_tokens:
            self._set({"gen_ai.response.time_to_first_chunk": time.monotonic() - self._began})
        self._output_tokens += tokens
        if reason is not None:
            self._reasons[choice] = reason

    @override
    def end(self, status: int, left: bool) -> None:
        self.ended = time.monotonic()
        self._set({"http.response.status_code": status, "ppconsole.client_left": left or None})
        if self._reasons:
            self._set({"gen_ai.response.finish_reasons": [self._reasons[at] for at in sorted(self._reasons)]})
        if status >= 500:
            self._set({"error.type": str(status)})
            self._span.set_status(Status(StatusCode.ERROR))
        if not self.waiting:
            self.close()

    def took(self, sample: str, timings: Timings | None, cached_tokens: int) -> None:
        """Make the child spans of a sample, whose times may not be known."""
        self.waiting.discard(sample)
        self._cached = max(self._cached, cached_tokens)
        self._preemptions += 0 if timings is None else timings.preemptions
        for name, begin, end, text in () if timings is None else _times(timings):
            span = self._traces.span(name, self._span, begin)
            span.set_attribute("ppconsole.request.id", sample)
            if text:
                span.set_attribute("ppconsole.cause", text)
            span.end(_wall_ns(end))
        if not self.waiting and self.ended is not None:
            self.close()

    def close(self) -> None:
        """End the span, and give it to the exporter."""
        self.waiting.clear()
        self._set({
            "gen_ai.usage.output_tokens": self._output_tokens or None,
            "gen_ai.usage.cache_read.input_tokens": self._cached or None,
            "ppconsole.preemptions": self._preemptions or None,
        })  # fmt: skip
        self._span.end(_wall_ns(time.monotonic() if self.ended is None else self.ended))

    def _set(self, values: Mapping[str, _Value | None]) -> None:
        self._span.set_attributes({key: value for key, value in values.items() if value is not None})


class Traces(CallTraces):
    """The spans of one HTTP process."""

    def __init__(self, provider: TracerProvider, model: str) -> None:
        self._provider, self._model = provider, model
        self._tracer = provider.get_tracer("ppengine.http", version("ppconsole"))
        self._propagator = TraceContextTextMapPropagator()
        self._samples: dict[str, _Call] = {}
        """Calls by the samples whose times have not come."""

    @override
    def begin(self, route: str, headers: Mapping[str, str], client: str) -> CallTrace | None:
        operation = OPERATIONS.get(route)
        if operation is None:
            return None
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        began = time.monotonic()
        span = self._tracer.start_span(
            f"{operation} {self._model}", self._propagator.extract(carrier, Context()), SpanKind.SERVER,
            {
                "gen_ai.operation.name": operation, "gen_ai.provider.name": PROVIDER,
                "gen_ai.request.model": self._model, "gen_ai.response.model": self._model,
                "http.request.method": "POST", "http.route": route, "ppconsole.client": client,
            },
            start_time=_wall_ns(began),
        )  # fmt: skip
        return _Call(self, span, began) if span.is_recording() else None

    @override
    def take(self, request: str, sample: int, timings: Timings | None, cached_tokens: int) -> None:
        name = _sample_id(request, sample)
        call = self._samples.pop(name, None)
        if call is not None:
            call.took(name, timings, cached_tokens)

    @override
    async def run(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self._close_late(time.monotonic() - LATE_S)

    @override
    def close(self) -> None:
        # The SDK ignores the limit of `force_flush`: a collector that hangs would hold it up for each batch.
        flush = threading.Thread(target=self._provider.force_flush, name="last export", daemon=True)
        flush.start()
        flush.join(LEAVE_S)

    def expect(self, call: _Call, requests: Mapping[str, int], samples: int) -> None:
        """Wait for the times of the samples of `requests`."""
        names = [_sample_id(name, index) for name in requests for index in range(samples)]
        call.waiting.update(names)
        self._samples.update(dict.fromkeys(names, call))

    def forget(self, call: _Call) -> None:
        """Wait for no times of a call any more."""
        for name in call.waiting:
            self._samples.pop(name, None)
        call.waiting.clear()

    def span(self, name: str, parent: Span, begin: float) -> Span:
        """Return a child of `parent`."""
        return self._tracer.start_span(name, set_span_in_context(parent), start_time=_wall_ns(begin))

    def _close_late(self, before: float) -> None:
        """Close the calls that ended `before` and still lack times."""
        late = {call for call in self._samples.values() if call.ended is not None and call.ended < before}
        for call in late:
            self.forget(call)
            call.close()


class SeldomHandler(logging.Handler):
    """Passes on one line a minute: a collector that is away would fill the log with each export.

    It has the kind of the error and the host: texts of errors have the URL, which may contain a secret.
    """

    def __init__(self, host: str) -> None:
        super().__init__(logging.WARNING)
        self._host, self._next = host, 0.0

    @override
    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + AGAIN_S
            log.warning("OpenTelemetry: traces do not reach %s: %s", self._host, _kind(record))


def _kind(record: logging.LogRecord) -> str:
    """Return the kind of the error in a line of OpenTelemetry: an exception, a status, or the place of the line."""
    given = record.args if isinstance(record.args, tuple) else ()
    found = [one for one in (*given, record.exc_info and record.exc_info[1]) if isinstance(one, BaseException)]
    if found:
        return type(found[0]).__name__
    status = next((one for one in given if isinstance(one, int) and 100 <= one < 600), None)
    return f"{record.module}:{record.lineno}" if status is None else f"status {status}"


def traces_to(endpoint: str, model: str, instance: str) -> Traces:
    """Return traces that are exported to `endpoint` by OTLP over HTTP; `instance` names this process."""
    values = {"service.instance.id": instance, "service.version": version("ppconsole")}
    named = "OTEL_SERVICE_NAME" in os.environ or "service.name" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    resource = Resource.create(values if named else values | {"service.name": PROVIDER})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    logger = logging.getLogger("opentelemetry")
    logger.handlers, logger.propagate = [SeldomHandler(urlsplit(endpoint).hostname or "the collector")], False
    every_ms = float(os.environ.get("OTEL_BSP_SCHEDULE_DELAY") or EVERY_MS)
    exporter = OTLPSpanExporter(endpoint, timeout=EXPORT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=every_ms))
    return Traces(provider, model)


def _times(timings: Timings) -> Iterator[tuple[str, float, float, str]]:
    """Yield name, beginning, end and cause of each child span."""
    ended = timings.ended
    admitted = ended if timings.admitted is None else timings.admitted
    yield "prepare", timings.arrival, timings.queued, ""
    yield "queue", timings.queued, admitted, ""
    if timings.admitted is not None:
        first = ended if timings.first_token is None else timings.first_token
        yield "prefill", admitted, first, ""
    if timings.first_token is not None:
        yield "decode", timings.first_token, ended, ""
    for phase in timings.phases:
        yield phase.kind, phase.begin, ended if phase.end is None else phase.end, phase.text


def _sample_id(request: str, sample: int) -> str:
    return f"{request}.{sample}" if sample else request


def _wall_ns(monotonic_s: float) -> int:
    """Return a time of the monotonic clock in Unix nanoseconds."""
    return time.time_ns() - int((time.monotonic() - monotonic_s) * 1e9)
