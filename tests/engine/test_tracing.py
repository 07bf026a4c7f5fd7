"""Spans of calls, as a collector gets them by OTLP over HTTP."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from engines import wait_until
from http_world import HTTP, HttpWorld
from ppengine.common.config import ConfigError, EngineConfig, Profile
from ppengine.common.profile_sections import HttpConfig, ModelConfig
from ppengine.gateway.questions import LocalAnswers
from ppengine.http import tracing
from ppengine.http.api_keys import ApiKeys
from ppengine.http.tracing import Traces, traces_to
from ppengine.protocol.control import Inspect, Inspected
from ppengine.protocol.inspection import AboutDetail
from ppengine.protocol.offline import Added
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.timings import Phase, Timings
from ppengine.supervisor import http_port
from trace_receiver import TraceReceiver, values

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CHATS = "/v1/chat/completions"


@pytest.fixture
def receiver() -> Iterator[TraceReceiver]:
    with TraceReceiver() as made:
        yield made


@pytest.fixture
def traces(receiver: TraceReceiver) -> Traces:
    return traces_to(receiver.endpoint, "tiny", "abc/http0")


def headers(sampled: bool = True) -> dict[str, str]:
    return {"traceparent": f"00-{TRACE}-{PARENT}-0{int(sampled)}"}


def flush(traces: Traces) -> None:
    assert traces._provider.force_flush(10_000)


def test_a_call_has_its_parent_its_children_and_the_names_of_the_conventions(
    receiver: TraceReceiver, traces: Traces
) -> None:
    now = time.monotonic()
    call = traces.begin(CHATS, headers(), "ann")
    assert call is not None
    call.submitted("chatcmpl-1", {"chatcmpl-1": 7}, SamplingParams(max_tokens=9, temperature=0.5, top_k=4), True)
    call.part(0, 1, None)
    call.part(0, 2, "length")
    phases = [
        Phase("swap-out", now - 3, now - 2.5, "swap-out by eve"),
        Phase("restart", now - 2, None, "stage 1 is lost"),
    ]
    traces.take("chatcmpl-1", 0, Timings(now - 9, now - 8, now - 6, now - 1, phases, 2, now - 8.5), 5)
    call.end(200, False)
    flush(traces)
    spans = {span.name: span for span in receiver.spans}
    assert set(spans) == {"chat tiny", "prepare", "queue", "prefill", "decode", "swap-out", "restart"}
    root = spans.pop("chat tiny")
    assert (root.trace_id.hex(), root.parent_span_id.hex(), root.kind) == (TRACE, PARENT, root.SPAN_KIND_SERVER)
    took = {name: (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 for name, span in spans.items()}
    assert took == pytest.approx(
        {"prepare": 0.5, "queue": 0.5, "prefill": 2, "decode": 5, "swap-out": 0.5, "restart": 1}, abs=1e-3
    )  # fmt: skip
    for span in spans.values():
        assert (span.trace_id, span.parent_span_id) == (root.trace_id, root.span_id)
    assert values(spans["restart"]) == {"ppconsole.request.id": "chatcmpl-1", "ppconsole.cause": "stage 1 is lost"}
    attributes = values(root)
    assert attributes.pop("gen_ai.response.time_to_first_chunk") >= 0
    assert attributes == {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "ppconsole", "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny", "gen_ai.request.max_tokens": 9, "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_k": 4, "gen_ai.request.top_p": 1.0, "gen_ai.request.stream": True,
        "gen_ai.request.frequency_penalty": 0.0, "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.response.id": "chatcmpl-1", "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 7, "gen_ai.usage.output_tokens": 3, "gen_ai.usage.cache_read.input_tokens": 5,
        "http.request.method": "POST", "http.response.status_code": 200, "http.route": CHATS,
        "ppconsole.client": "ann", "ppconsole.preemptions": 2,
    }  # fmt: skip
    assert receiver.resource["service.name"] == "ppconsole" and receiver.resource["service.instance.id"] == "abc/http0"


def test_a_call_ends_with_the_last_of_its_answer_and_its_samples(receiver: TraceReceiver, traces: Traces) -> None:
    call = traces.begin("/v1/completions", {}, "http")
    assert call is not None
    call.submitted("cmpl-1", {"cmpl-1-0": 3, "cmpl-1-1": 4}, SamplingParams(n=2), False)
    now = time.monotonic()
    timings = Timings(now, None, None, now, [], 0, now)
    traces.take("cmpl-1-0", 0, timings, 0)
    traces.take("cmpl-1-0", 1, timings, 0)
    call.end(200, True)
    traces.take("cmpl-1-1", 1, None, 0)
    flush(traces)
    assert [span.name for span in receiver.spans] == ["prepare", "queue"] * 2, "a sample is open"
    traces.take("cmpl-1-1", 0, timings, 0)
    traces.take("cmpl-1-1", 0, timings, 0)
    flush(traces)
    root = receiver.spans[-1]
    assert (root.name, root.parent_span_id, values(root)["ppconsole.client_left"]) == (
        "text_completion tiny",
        b"",
        True,
    )
    samples = ["cmpl-1-0", "cmpl-1-0.1", "cmpl-1-1"]
    assert [(values(span)["ppconsole.request.id"], span.name) for span in receiver.spans[:-1]] == [
        (sample, name) for sample in samples for name in ("prepare", "queue")
    ], "each sample has its times once"
    assert not traces._samples


def test_a_call_without_the_times_of_the_core_is_closed_late(receiver: TraceReceiver, traces: Traces) -> None:
    call = traces.begin(CHATS, {}, "http")
    assert call is not None
    call.submitted("c", {"c": 1}, SamplingParams(), False)
    call.end(503, False)
    traces._close_late(time.monotonic() - 60)
    assert traces._samples
    traces._close_late(time.monotonic())
    flush(traces)
    (span,) = receiver.spans
    assert values(span)["error.type"] == "503" and span.status.code == span.status.STATUS_CODE_ERROR
    assert not traces._samples


def test_other_routes_and_parents_that_are_not_sampled_have_no_span(receiver: TraceReceiver, traces: Traces) -> None:
    assert traces.begin("/tokenize", headers(), "http") is None
    assert traces.begin(CHATS, headers(sampled=False), "http") is None
    flush(traces)
    assert not receiver.spans


def test_a_collector_that_is_away_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture, traces: Traces) -> None:
    for code in (503, 502):
        logging.getLogger("opentelemetry.exporter").warning("no answer from http://x/?key=SECRET: %d", code)
    ours = [record.getMessage() for record in caplog.records if record.name == "ppengine.http"]
    assert ours == ["OpenTelemetry: traces do not reach 127.0.0.1: status 503"]
    assert not logging.getLogger("opentelemetry").propagate


def test_a_line_in_the_log_has_no_part_of_the_url_but_the_host(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    traces = traces_to(f"http://127.0.0.1:{port}/TOPSECRET", "tiny", "abc/http0")
    call = traces.begin(CHATS, {}, "ann")
    assert call is not None
    call.end(200, False)
    threading.Thread(target=traces._provider.force_flush, daemon=True).start()
    wait_until(lambda: any("traces do not reach" in line for line in caplog.messages), "a line")
    (line,) = [line for line in caplog.messages if "traces do not reach" in line]
    assert "127.0.0.1: " in line and "Error" in line and "TOPSECRET" not in caplog.text


def test_the_last_export_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "LEAVE_S", 0.01)
    answered, exporting = threading.Event(), threading.Event()

    def force_flush() -> None:
        exporting.set()
        answered.wait(60)

    provider: Any = SimpleNamespace(get_tracer=lambda *names: None, force_flush=force_flush)
    Traces(provider, "tiny").close()
    assert exporting.wait(30)
    answered.set()


def test_the_last_export_has_the_last_spans(receiver: TraceReceiver, traces: Traces) -> None:
    call = traces.begin(CHATS, {}, "ann")
    assert call is not None
    call.end(200, False)
    traces.close()
    wait_until(lambda: len(receiver.spans) == 1, "the span")


def test_requests_that_the_core_refuses_have_no_times_to_wait_for(receiver: TraceReceiver, traces: Traces) -> None:
    call = traces.begin(CHATS, {}, "ann")
    assert call is not None
    call.submitted("c", {"c": 1}, SamplingParams(n=2), False)
    call.refused()
    call.end(429, False)
    assert not traces._samples
    flush(traces)
    assert len(receiver.spans) == 1


def test_an_endpoint_needs_a_port_and_is_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    def profile(listen: str | None) -> Profile:
        http = HttpConfig(listen=listen, otlp_traces_endpoint="http://127.0.0.1:4318/v1/traces")
        return Profile(name="x", model=ModelConfig(path="/x"), http=http)

    http_port.check_http(profile("127.0.0.1:0"))
    with pytest.raises(ConfigError, match="traces are of calls over HTTP"):
        http_port.check_http(profile(None))
    for url in ("http://ann:pw@h/v1/traces", "http://pw@h/v1/traces", "http://h/v1/traces?api-key=pw"):
        http = HttpConfig(listen="127.0.0.1:0", otlp_traces_endpoint=url)
        with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS"):
            http_port.check_http(Profile(name="x", model=ModelConfig(path="/x"), http=http))
    monkeypatch.setattr(http_port, "_has_otel", lambda: False)
    with pytest.raises(ConfigError, match="needs opentelemetry-sdk"):
        http_port.check_http(profile("127.0.0.1:0"))
    with pytest.raises(ValueError, match="otlp_traces_endpoint"):
        Profile(name="x", model=ModelConfig(path="/x"), http=HttpConfig(otlp_traces_endpoint="localhost:4317"))


def test_a_viewer_gets_no_secret_of_the_endpoint() -> None:
    http = HttpConfig(otlp_traces_endpoint="http://ann:pw@h/v1/traces?api-key=pw")
    config = EngineConfig(
        id="e", name="t", epoch="epoch", profile=Profile(name="t", model=ModelConfig(path="m"), http=http),
        model_path="m", model_type="opt", layers=[(0, 1)], max_model_len=64, run_dir="/r", ring_dir="/d",
        started_wall=0.0,
    )  # fmt: skip
    answer = LocalAnswers(config, lambda: None, list).answer(Inspect(nonce=1, what="about"))
    assert isinstance(answer, Inspected)
    about = msgspec.msgpack.decode(answer.data, type=AboutDetail)
    assert about.profile["http"]["otlp_traces_endpoint"] == "http://ann@h/v1/traces"


class Noted:
    """Traces, and the trace of each call: it notes what it hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def begin(self, route: str, headers: object, client: str) -> Noted:
        self.heard.append(f"begin {client}")
        return self

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.heard.append(name)


async def test_a_trace_begins_behind_the_key_and_waits_for_times_before_the_core_has_the_requests() -> None:
    noted: Any = Noted()
    async with HttpWorld(HTTP, ApiKeys({b"k" * 16: "ann"}), traces=noted) as one:
        body, headers = {"prompt": "x"}, {"authorization": f"Bearer {'k' * 16}"}
        assert (await one.post("/v1/completions", body))[0] == 401 and not noted.heard
        submit = one.model.submit

        async def submitting(*given: Any) -> Any:
            noted.heard.append("submit")
            return await submit(*given)

        one.model.submit = submitting  # type: ignore[method-assign]
        assert (await one.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
        assert noted.heard[:3] == ["begin ann", "submitted", "submit"] and "refused" not in noted.heard
        noted.heard.clear()
        one.model.refusal = Added(nonce=0, requests=[], error="too many", again_s=1)
        assert (await one.http.post("/v1/completions", json=body, headers=headers)).status_code == 429
        assert noted.heard == ["begin ann", "submitted", "submit", "refused", "end"]
