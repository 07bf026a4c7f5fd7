"""A collector of traces in this process: it takes OTLP over HTTP and keeps the spans."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class TraceReceiver:
    """Listens while it is entered."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        """In the order in which they ended."""
        self.resource: dict[str, Any] = {}
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver.take(ExportTraceServiceRequest.FromString(body))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    @property
    def endpoint(self) -> str:
        """The URL for `http.otlp_traces_endpoint`."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"

    def take(self, request: ExportTraceServiceRequest) -> None:
        """Keep the spans of a request."""
        for one in request.resource_spans:
            self.resource = {each.key: _value(each.value) for each in one.resource.attributes}
            self.spans += [span for scope in one.scope_spans for span in scope.spans]

    def __enter__(self) -> TraceReceiver:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


def values(span: Span) -> dict[str, Any]:
    """Return the attributes of a span."""
    return {each.key: _value(each.value) for each in span.attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    assert kind is not None
    found = getattr(value, kind)
    return [_value(one) for one in found.values] if kind == "array_value" else found
