"""Limits of API keys, in one HTTP process and over several."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest
from http_world import ASK, HTTP, HttpWorld
from ppengine.common.config import ConfigError
from ppengine.http.api_errors import ApiError
from ppengine.http.api_keys import ApiKeys
from ppengine.http.key_limits import Grant, KeyLimits
from ppengine.http.shared_use import SharedUse
from ppengine.protocol.clients import KeyLimit
from ppengine.protocol.offline import Added

ROLES = ["http0", "http1"]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def limits(folder: Path, clock: Clock, role: str = "http0", **limit: int) -> KeyLimits:
    return KeyLimits({"ann": KeyLimit(**limit)}, SharedUse(folder, role, ROLES, ["ann"]), clock)


def enter(made: KeyLimits) -> Grant:
    grant = made.enter("ann")
    assert grant is not None
    return grant


def refused(made: KeyLimits, words: str) -> ApiError:
    with pytest.raises(ApiError, match=words) as caught:
        made.enter("ann")
    assert (caught.value.status, caught.value.body.code) == (429, "rate_limit_exceeded")
    return caught.value


def test_requests_a_minute_come_back_one_by_one(tmp_path: Path) -> None:
    clock = Clock()
    made = limits(tmp_path, clock, requests_per_minute=3)
    assert [enter(made).headers()["x-ratelimit-remaining-requests"] for _ in range(3)] == ["2", "1", "0"]
    error = refused(made, "3 requests a minute")
    assert error.headers["retry-after"] == "20" and error.headers["x-ratelimit-reset-requests"] == "60.000s"
    clock.now += 19.9
    refused(made, "3 requests a minute")
    clock.now += 0.2
    enter(made)
    refused(made, "3 requests a minute")
    clock.now += 600
    assert [enter(made).headers()["x-ratelimit-remaining-requests"] for _ in range(3)] == ["2", "1", "0"]
    assert made.enter("bob") is None, "it has no limits"


def test_tokens_may_be_overdrawn_and_are_paid_back(tmp_path: Path) -> None:
    clock = Clock()
    made = limits(tmp_path, clock, tokens_per_minute=60)
    enter(made).spend(50)
    enter(made).spend(40)
    assert refused(made, "60 tokens a minute").headers["retry-after"] == "31"
    clock.now += 31
    assert enter(made).headers()["x-ratelimit-remaining-tokens"] == "1"


def test_requests_at_once_end_once(tmp_path: Path) -> None:
    made = limits(tmp_path, Clock(), concurrent=2)
    first, _ = enter(made), enter(made)
    refused(made, "2 requests are open, 2 may be at once")
    first.leave()
    first.leave()
    enter(made)
    refused(made, "2 requests are open")


def test_processes_share_the_limits_of_a_key(tmp_path: Path) -> None:
    clock = Clock()
    one = limits(tmp_path, clock, requests_per_minute=4, tokens_per_minute=100, concurrent=3)
    two = limits(tmp_path, clock, "http1", requests_per_minute=4, tokens_per_minute=100, concurrent=3)
    enter(one)
    enter(two)
    grant = enter(one)
    refused(two, "3 requests are open")
    grant.leave()
    enter(two).spend(150)
    refused(one, "3 requests are open")
    # A killed process leaves its file; that of its successor begins at zero.
    two = limits(tmp_path, clock, "http1", requests_per_minute=4, tokens_per_minute=100, concurrent=3)
    refused(one, "4 requests a minute")
    clock.now += 15
    refused(one, "100 tokens a minute")
    clock.now += 45
    enter(one)
    assert enter(two).headers()["x-ratelimit-limit-tokens"] == "100"


async def test_clients_see_their_limits(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"ann {'k' * 20} requests_per_minute=2 tokens_per_minute=1000\n")
    file.chmod(0o600)
    keys = ApiKeys.load(str(file))
    use = SharedUse(tmp_path, "http0", ROLES, ["ann"])
    async with HttpWorld(HTTP, keys, "k" * 20, KeyLimits(keys.limits, use)) as one:
        one.model.text = "It rains."
        raw = await one.openai.chat.completions.with_raw_response.create(model="tiny", messages=ASK)
        usage = raw.parse().usage
        assert raw.headers["x-ratelimit-remaining-requests"] == "1"
        body = {"messages": ASK, "stream": True}
        answer = await one.http.post("/v1/chat/completions", json=body, headers={"x-api-key": "k" * 20})
        assert usage is not None and answer.status_code == 200
        # The headers come before the output of their own request; the bucket fills 17 a second.
        spent = 1000 - int(answer.headers["x-ratelimit-remaining-tokens"])
        assert usage.total_tokens <= spent <= usage.total_tokens + usage.prompt_tokens
        with pytest.raises(openai.RateLimitError, match="the key ann has reached its limit") as caught:
            await one.openai.responses.create(model="tiny", input="x")
        assert caught.value.code == "rate_limit_exceeded" and int(caught.value.response.headers["retry-after"]) <= 30
        assert len((await one.openai.models.list()).data) == 1, "it generates nothing"
    assert use.own("ann").open == 0, "all have ended"


async def test_a_limit_of_an_operator_has_the_same_code() -> None:
    async with HttpWorld(HTTP) as one:
        one.model.refusal = Added(nonce=0, requests=[], error="client http has 1 open requests", again_s=7)
        with pytest.raises(openai.RateLimitError, match="client http") as caught:
            await one.openai.responses.create(model="tiny", input="x")
        assert (caught.value.code, caught.value.response.headers["retry-after"]) == ("rate_limit_exceeded", "7")


@pytest.mark.parametrize(
    "words", ["rpm=5", "concurrent", "concurrent=0", "concurrent=-1", "concurrent=1 concurrent=1", "concurrent=9e9"]
)
def test_a_limit_that_is_none_is_refused(tmp_path: Path, words: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"ann {'k' * 20} {words}\n")
    file.chmod(0o600)
    with pytest.raises(ConfigError, match=r"line 1: .* is no limit; there are requests_per_minute, "):
        ApiKeys.load(str(file))


def test_keys_of_one_name_share_their_limits(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"ann {'k' * 20} concurrent=2\nann {'l' * 20} concurrent=2\nbob {'m' * 20}\n")
    file.chmod(0o600)
    assert ApiKeys.load(str(file)).limits == {"ann": KeyLimit(concurrent=2)}
    file.write_text(f"ann {'k' * 20} concurrent=2\nann {'l' * 20}\n")
    with pytest.raises(ConfigError, match="line 2: ann has other limits"):
        ApiKeys.load(str(file))
