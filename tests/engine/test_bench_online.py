"""The online bench: its figures, its arrivals, and its client against scripted servers."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
from collections.abc import Awaitable, Callable, Sequence

import pytest
from ppengine.bench.__main__ import check_options, online_choices
from ppengine.bench.http_client import Client
from ppengine.bench.load_plan import Outcome, Plan, Planned, Seen, at_once, poisson
from ppengine.bench.online_figures import Slo, figures, parse_slo, quantile, ratios, remarks, table
from ppengine.bench.online_servers import serve_words
from ppengine.bench.server_address import Target, parse_target
from ppengine.bench.workload import Job, Sampling
from ppengine.common.config import ConfigError

JOBS = [Job([5, 6, 7], 3, Sampling(0.8, 0.95, 50)), Job([8], 3)]


def test_arrivals_have_the_rate_and_are_the_same_each_time() -> None:
    jobs = [Job([1], 1)] * 4000
    planned = poisson(jobs, 8.0, 0)
    assert planned == poisson(jobs, 8.0, 0) != poisson(jobs, 8.0, 1)
    assert planned[-1].at_s == pytest.approx(500.0)
    gaps = [b.at_s - a.at_s for a, b in itertools.pairwise(planned)]
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.1), "gaps are exponential"
    assert poisson(jobs, 4.0, 0)[9].at_s == pytest.approx(2 * planned[9].at_s), "one pattern, stretched"


def outcome(**fields: object) -> Outcome:
    made = Outcome(0.0, 0.0, 0.1, 0.5, [0.1, 0.1, 0.2], 5)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_figures_are_those_of_the_requests_that_ended_well() -> None:
    seen = Seen(
        outcomes=[outcome(), outcome(sent_s=2.0, ttft_s=0.3), outcome(error="status 503: x", tokens=0)],
        seconds=2.5, busy=0.1,
    )  # fmt: skip
    row = figures("engine", "1/s", 1.0, seen, Slo(ttft_ms=200.0))
    assert (row.requests, row.errors, row.first_error) == (3, 1, "status 503: x")
    assert (row.sent_rate, row.reached_rate, row.tokens_s, row.good_rate) == (1.5, 0.8, 4.0, 0.4)
    assert row.ttft_ms == (100.0, 300.0, 300.0) and row.itl_ms == (100.0, 200.0, 200.0)
    assert row.tpot_ms == (50.0, 100.0, 100.0) and row.tokens_an_event == 1.25
    head, line = table([row])
    assert len(head) == len(line) and "100/300/300" in line and line.split()[-2:] == ["0.40", "1"]
    assert remarks([row]) == ["engine at 1/s: 1 of 3 failed; the first: status 503: x"]
    slow = Seen(outcomes=[outcome(late_s=0.02)], seconds=1.0, busy=0.9)
    assert len(remarks([figures("engine", "all", None, slow, None)])) == 2


def test_ratios_are_ours_over_theirs() -> None:
    fast, slow = (figures("x", "all", None, Seen(outcomes=[outcome()], seconds=s, busy=0.0), None) for s in (1.0, 2.0))
    assert ratios(fast, slow)["tokens_s"] == 2.0 and ratios(fast, slow)["ttft_p50"] == 1.0


@pytest.mark.parametrize(
    ("limits", "holds"),
    [("ttft_ms=100", True), ("ttft_ms=99", False), ("itl_ms=199", False), ("tpot_ms=100,e2e_ms=500", True),
     ("tpot_ms=99.9", False), ("e2e_ms=499", False)],
)  # fmt: skip
def test_a_good_request_keeps_all_limits(limits: str, holds: bool) -> None:
    assert parse_slo(limits).holds(outcome()) is holds
    assert not parse_slo("ttft_ms=1e6").holds(outcome(error="lost"))


def test_quantiles_are_values_that_were_measured() -> None:
    assert [quantile([1.0, 2.0, 3.0, 4.0], share) for share in (0.25, 0.5, 0.9)] == [1.0, 2.0, 4.0]
    assert quantile([], 0.5) == 0.0


def options(**fields: object) -> argparse.Namespace:
    own = {
        "online": True, "rate": [], "load": [], "url": None, "slo": None, "beside": None, "workload": [],
        "scale": 1.0, "rounds": None, "seed": 0, "no_baseline": False, "beside_args": "",
        "vllm_python": "python3",
    }  # fmt: skip
    return argparse.Namespace(**{**own, **fields})


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"rate": [5.0], "load": [50.0]}, "--rate and --load exclude each other"),
        ({"url": "localhost:8000"}, "--url localhost:8000: write it as http://HOST:PORT"),
        ({"url": "http://h:70000"}, "--url http://h:70000: write it as http://HOST:PORT"),
        ({"url": "unix:a.sock"}, "--url 'unix:a.sock' is no address"),
        ({"url": "http://h:1", "beside": "vllm"}, "--url is one server by itself"),
        ({"slo": "ttft=3"}, "--slo ttft=3: write limits in ms as NAME=NUMBER"),
        ({"slo": "ttft_ms=-1"}, "--slo ttft_ms=-1: write"),
    ],
)
def test_options_are_checked(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        online_choices(options(**fields))
    assert str(refused.value).startswith(says)


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("http://localhost:80", Target("localhost", 80)), ("http://h:1/", Target("h", 1)),
        ("http://h:1/a/v1/", Target("h", 1, "/a")), ("unix:///run/a", Target("localhost", 0, file="/run/a")),
        *((f"unix:{path}", Target("localhost", 0, file=path)) for path in ("/run/v1", "/a b#c?d%20;e", "/[x")),
    ],
)  # fmt: skip
def test_the_path_of_a_socket_is_no_part_of_a_url(text: str, target: Target) -> None:
    assert parse_target(text) == target == parse_target(str(target))
    assert online_choices(options(url=text)).url == text
    client = Client(Plan(target=text, requests=[]))
    assert client._head.startswith(f"POST {target.prefix}/v1/completions HTTP/1.1\r\nhost: {target.named}\r".encode())


def test_online_options_need_online() -> None:
    with pytest.raises(ConfigError, match="--rate is for online measurements; add --online"):
        check_options(options(online=False, rate=[5.0]))
    assert online_choices(options()).loads == [50.0, 80.0, 95.0]
    assert online_choices(options(rate=[2.0])).loads == []


def test_vllm_gets_arguments_as_options() -> None:
    arguments = {"model": "/m", "tensor_parallel_size": 2, "max_model_len": None, "skip_tokenizer_init": True}
    assert serve_words(arguments) == ["serve", "/m", "--host", "127.0.0.1", "--tensor-parallel-size", "2",
                                      "--skip-tokenizer-init"]  # fmt: skip


# --- the client -------------------------------------------------------------------------------------------------

Script = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]
EVENT = b'data: {"choices": [{"index": 0, "text": "data: {}"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 3}}\n\n'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def seen_by_client(script: Script, key: str = "", requests: Sequence[Planned] = ()) -> tuple[Seen, int]:
    """Return what the client saw of a server that plays `script` for each request, and the number of connections."""
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                (length,) = (int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
                await script(head + await reader.readexactly(length), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        plan = Plan(target=f"http://127.0.0.1:{port}", requests=[*requests] or at_once(JOBS), model="m", key=key)
        return await Client(plan).run(), connections


@pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
async def test_the_client_times_each_event_with_a_choice(end: bytes) -> None:
    requests = []

    async def script(request: bytes, writer: asyncio.StreamWriter) -> None:
        requests.append(request)
        comment, event, *last = (
            text.replace(b"\n", end) for text in (b": a comment\n\n", EVENT, USAGE, b"data: [DONE]\n\n")
        )
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunk(comment))
        await asyncio.sleep(0.05)
        writer.write(chunk(event + comment + event[:-1]))
        await asyncio.sleep(0.02)
        writer.write(chunk(event[-1:] + event))
        writer.write(b"".join(map(chunk, last)) + b"0\r\n\r\n")

    seen, _ = await seen_by_client(script, key="secret")
    for one in seen.outcomes:
        assert (one.error, one.tokens, len(one.gaps_s)) == ("", 3, 2)
        # The first event may be read late, and the gap behind it is shorter then.
        assert one.ttft_s >= 0.05 and one.ttft_s + one.gaps_s[0] >= 0.07
        assert one.gaps_s[0] > one.gaps_s[1] >= 0 and one.e2e_s >= 0.07
    requests.sort(key=len, reverse=True)
    assert all(b"authorization: Bearer secret\r\n" in request for request in requests)
    sent = [json.loads(request.split(b"\r\n\r\n")[1]) for request in requests]
    assert {"prompt": [5, 6, 7], "temperature": 0.8, "top_k": 50, "seed": 0}.items() <= sent[0].items()
    assert sent[1]["prompt"] == [8] and "top_k" not in sent[1] and sent[1]["max_tokens"] == 3


async def test_no_more_requests_are_reached_than_arrive() -> None:
    """The gap before the first request is one of those that make the rate."""

    async def script(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(chunk(EVENT) + chunk(USAGE) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    for seed in range(3):
        seen, _ = await seen_by_client(script, requests=poisson(JOBS, 10.0, seed))
        row = figures("x", "10/s", 10.0, seen, Slo(ttft_ms=1e6))
        assert row.errors == 0 and row.reached_rate <= 10.0 and (row.good_rate or 0.0) <= 10.0


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 503 No\r\ncontent-length: 4\r\n\r\nbusy", "status 503: busy"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nnone", "the answer has no [DONE]"),
        (b"nonsense\r\n\r\n", "no HTTP: "),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunk(EVENT), "the server closed the connection"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunk(b'data: {"error": 1}\n\n'), '{"error": 1}'),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunk(b"data: [DONE]\n\n"),
            "the answer has no usage",
        ),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
            + chunk(EVENT + USAGE.replace(b"3}", b"2}") + b"data: [DONE]\n\n"),
            "the answer ended with 2 of 3 tokens",
        ),
    ],
)
async def test_the_client_reports_what_failed(answer: bytes, error: str) -> None:
    async def script(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    seen, connections = await seen_by_client(script)
    assert [one.error[: len(error)] for one in seen.outcomes] == [error] * 2 and connections == 2
