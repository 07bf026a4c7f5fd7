"""The HTTP service of an engine that was started without a tokenizer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ppengine.checkpoint.absent_tokenizer import AbsentTokenizer
from ppengine.checkpoint.growing_text import GrowingText
from ppengine.common.config import EngineConfig, Profile
from ppengine.common.profile_sections import HttpConfig, ModelConfig
from ppengine.http.api_errors import ApiError
from ppengine.http.chat_fields import ChatRequest, Message, TokenizeRequest
from ppengine.http.client_limits import ClientLimits
from ppengine.http.client_stats import ClientStats
from ppengine.http.request_fields import CompletionRequest
from ppengine.http.service import Caller, Service
from ppengine.supervisor.http_port import check_http

MESSAGES = [Message(role="user", content="x")]


@pytest.fixture
def service(tmp_path: Path) -> Service:
    """A service whose core would take anything."""
    profile = Profile(name="x", model=ModelConfig(path=str(tmp_path), skip_tokenizer=True))
    config = EngineConfig(
        id="abcdef", name="x", epoch="e", profile=profile, model_path=str(tmp_path), model_type="llama",
        layers=[(0, 1)], max_model_len=64, run_dir=str(tmp_path), ring_dir=str(tmp_path), started_wall=0.0,
    )  # fmt: skip

    async def submit(submissions: list[Any], owner: str, client: str, arrived: float) -> tuple[Any, list[Any]]:
        return SimpleNamespace(error="", again_s=0), [
            SimpleNamespace(counts=[0], request=one.request) for one in submissions
        ]

    async def confirm() -> None:
        """The state is the newest."""

    link: Any = SimpleNamespace(
        state=SimpleNamespace(state="serving"), silent=False, open_requests=0, submit=submit,
        engine=SimpleNamespace(confirm=confirm),
    )  # fmt: skip
    renderer: Any = None
    return Service(config, link, renderer, ClientLimits(ClientStats()), 10)


def caller() -> Caller:
    return Caller("http", None, ClientStats().begin("http", "/v1/completions"))


async def test_token_ids_are_served(service: Service) -> None:
    request = CompletionRequest(prompt=[3, 4], logprobs=1)
    _, (generation,) = await service.complete(request, caller())
    assert generation.prompt_ids == [3, 4] and service.tokenizer.token_text(7) == "token_id:7"


Call = Callable[[Service], Awaitable[object]]
REFUSED: list[tuple[str, Call]] = [
    ("prompt", lambda to: to.complete(CompletionRequest(prompt="x"), caller())),
    ("prompt", lambda to: to.complete(CompletionRequest(prompt=["x", "y"]), caller())),
    ("stop", lambda to: to.complete(CompletionRequest(prompt=[1], stop="x"), caller())),
    ("bad_words", lambda to: to.complete(CompletionRequest(prompt=[1], bad_words=["x"]), caller())),
    ("messages", lambda to: to.chat(ChatRequest(messages=MESSAGES), caller())),
    ("prompt", lambda to: to.tokenize(TokenizeRequest(prompt="x"))),
    ("messages", lambda to: to.tokenize(TokenizeRequest(messages=MESSAGES))),
]


@pytest.mark.parametrize(("param", "call"), REFUSED)
async def test_texts_are_refused_by_one_line(service: Service, param: str, call: Call) -> None:
    with pytest.raises(ApiError) as refused:
        await call(service)
    error = refused.value
    assert (error.status, error.body.param) == (400, param)
    assert error.body.message.startswith(f"{param} needs a tokenizer; this engine was started without one: ")


def test_outputs_are_empty_texts() -> None:
    growing = GrowingText(AbsentTokenizer().stream([1, 2]))
    assert not any(growing.push(token) for token in range(100))
    growing.end()
    assert (growing.text, growing.count) == ("", 100)


def test_the_port_needs_no_tokenizer() -> None:
    model = ModelConfig(path="x", skip_tokenizer=True)
    check_http(Profile(name="x", model=model, http=HttpConfig(listen="127.0.0.1:0")))
