"""Clients of the HTTP port: counts of one process, and their sums in the gateway."""

from __future__ import annotations

import time

import pytest
from ppengine.gateway.http_clients import AWAY_S, HttpClients
from ppengine.http import client_stats
from ppengine.http.client_stats import ClientStats
from ppengine.protocol.clients import ClientCounts, HttpReport, KeyLimit
from ppengine.protocol.frames import decode_as, encode

CHAT = "/v1/chat/completions"
S = 10**9


def counts(requests: int = 0, tokens: int = 0, **more: object) -> ClientCounts:
    fields = dict.fromkeys(ClientCounts.__struct_fields__, 0) | {
        "key": "ann",
        "route": CHAT,
        "ttft": {},
        "itl": {},
        "took": [],
        "limit": None,
    }
    return ClientCounts(**(fields | {"requests": requests, "tokens": tokens} | more))


def report(role: str, second: float, *clients: ClientCounts) -> HttpReport:
    return HttpReport(role=role, mono_ns=int(second * S), clients=list(clients))


def test_processes_are_added_up() -> None:
    clients = HttpClients()
    for second in range(4):
        clients.take(report("http0", second, counts(second, 100 * second, open=2, slow=1, ttft={10: 3})))
        clients.take(report("http1", second, counts(2 * second, 0, open=1, errors=1, ttft={10: 1})))
    (one,) = clients.infos(3 * S, [])
    assert (one.key, one.route, one.open, one.slow, one.errors_total) == ("ann", CHAT, 3, 1, 1)
    assert (one.requests_total, one.tokens_total, one.ttft_ms.count) == (9, 300, 4)
    assert (one.requests_s, one.tokens_s) == (pytest.approx(3.0), pytest.approx(100.0))
    assert one.itl_ms.p50 is None, "no duration, no figure"


def test_rates_are_those_of_ten_seconds_and_begin_again_with_another_process() -> None:
    clients = HttpClients()
    for second in range(31):
        clients.take(report("http0", second, counts(second if second < 20 else 20)))
    assert clients.infos(30 * S, [])[0].requests_s == 0.0
    clients.take(report("http0", 31, counts(3)))
    assert clients.infos(31 * S, [])[0].requests_s is None
    clients.take(report("http0", 33, counts(7)))
    assert clients.infos(33 * S, [])[0].requests_s == 2.0


def test_a_process_that_is_gone_is_left_out() -> None:
    clients = HttpClients()
    clients.take(report("http0", 1, counts(5)))
    assert clients.infos(int((1 + AWAY_S) * S), []) and not clients.infos(int((1.1 + AWAY_S) * S), [])


def test_the_busiest_comes_first() -> None:
    clients = HttpClients()
    clients.take(report("http0", 1, counts(9), counts(1, key="bob", open=4), counts(5, key="eve")))
    assert [one.key for one in clients.infos(1 * S, [])] == ["bob", "ann", "eve"]


def test_a_call_counts_its_end_once_and_its_tokens_by_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    stats, now = ClientStats(), [100.0]
    monkeypatch.setattr(client_stats.time, "monotonic", lambda: now[0])
    call = stats.begin("ann", CHAT)
    for choice in (0, 1, 0, 1):
        now[0] += 0.5
        call.part(choice, 2)
    (one,) = stats.counts()
    assert (one.open, one.requests, one.tokens) == (1, 1, 8)
    assert (sum(one.ttft.values()), sum(one.itl.values())) == (1, 2)
    with call.sending():
        assert not call.slow(now[0] + 0.5) and call.slow(now[0] + 1.5)
    assert not call.slow(now[0] + 1.5)
    call.end(200, left=True)
    call.end(500)
    for status in (200, 400, 401, 429, 503, 500):
        stats.begin("ann", CHAT).end(status)
    (one,) = stats.counts()
    assert (one.open, one.left, one.errors, one.refused, one.failed, one.requests) == (0, 1, 2, 2, 1, 7)


def test_counts_do_not_grow_with_time(monkeypatch: pytest.MonkeyPatch) -> None:
    stats, began = ClientStats(), time.monotonic()
    monkeypatch.setattr(client_stats.time, "monotonic", lambda: began)
    for number in range(2000):
        began += 1.0
        call = stats.begin("ann", CHAT)
        call.part(0, 1)
        call.part(0, number % 7 + 1)
        call.end(200)
    (one,) = stats.counts()
    assert sum(one.ttft.values()) <= 310, "five minutes are kept"


def test_calls_that_ended_are_counted_by_their_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    stats, now = ClientStats(), [0.0]
    monkeypatch.setattr(client_stats.time, "monotonic", lambda: now[0])
    for seconds in (0.1, 0.11, 500.0):
        began, call = now[0], stats.begin("ann", CHAT)
        now[0] = began + seconds
        call.end(200)
        call.end(500)
    stats.begin("ann", CHAT)
    (one,) = stats.counts()
    assert one.took_s == pytest.approx(500.21)
    assert (one.took[1], one.took[-1], sum(one.took)) == (1, 1, 3), "an open call is not among them"


def test_the_limits_of_the_file_of_keys_come_with_the_counts() -> None:
    limit, clients = KeyLimit(concurrent=4, tokens_per_minute=90_000), HttpClients()
    stats = ClientStats({"ann": limit})
    for key in ("ann", "bob"):
        stats.begin(key, CHAT).end(200)
    body = encode(report("http0", 1, *stats.counts()))
    clients.take(decode_as(HttpReport, body))
    found = {one.key: one.key_limit for one in clients.infos(1 * S, [])}
    assert found == {"ann": limit, "bob": None}
