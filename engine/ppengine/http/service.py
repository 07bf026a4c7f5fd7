"""From the body of a request to running generations: checks, tokens, ids, room."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.common.config import EngineConfig
from ppengine.common.one_line import one_line
from ppengine.http.api_errors import ApiError, invalid, unavailable
from ppengine.http.chat_renderer import ChatRenderer
from ppengine.http.client_stats import Call
from ppengine.http.front_link import FrontLink
from ppengine.http.generation import Generation
from ppengine.http.request_fields import ChatRequest, CommonFields, CompletionRequest, Message, TokenizeRequest
from ppengine.protocol.chat_messages import Chat
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.verbs import Submit

INLINE_CHARACTERS = 2000
"""Longer texts are tokenized on a thread, so that other streams go on: 1 ms here."""
CHAT_MOST = 2**22
"""Most characters of a rendered chat."""
USER_MOST = 64
"""Most characters of `user` that consoles get as the owner of a request."""
PROMPTS_MOST = 1024
"""Most prompts of one request."""
_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")


@dataclass(frozen=True)
class Caller:
    """The author of a request: the name of the key, the `x-request-id` header, and the counts of the call."""

    name: str
    request_id: str | None
    call: Call


class Service:
    """Serves one engine. `most_open`: requests that may be open at once in this process."""

    def __init__(self, config: EngineConfig, link: FrontLink, renderer: ChatRenderer, most_open: int) -> None:
        self.config, self.link = config, link
        self.tokenizer = Tokenizer.load(Path(config.model_path))
        self.model = Path(config.model_path).name
        self.created = int(config.started_wall)
        self._renderer, self._most_open = renderer, most_open
        self._longest_token = self.tokenizer.longest_token

    async def complete(self, request: CompletionRequest, caller: Caller) -> tuple[str, list[Generation]]:
        """Begin the generations of a completion; return its id and one a prompt. Raises ApiError."""
        self._check(request)
        prompts = request.prompts()
        if len(prompts) > PROMPTS_MOST:
            raise invalid(f"{len(prompts)} prompts; at most {PROMPTS_MOST} are taken", "prompt")
        special = request.add_special_tokens
        ids = [one if isinstance(one, list) else await self._encode(one, special=special) for one in prompts]
        return await self._begin("cmpl", ids, request, caller)

    async def chat(self, request: ChatRequest, caller: Caller) -> tuple[str, Generation]:
        """Begin the generation of a chat; return its id and the generation. Raises ApiError."""
        self._check(request)
        ids = await self._chat_ids(request.messages, request.add_generation_prompt, request.chat_template_kwargs)
        name, (generation,) = await self._begin("chatcmpl", [ids], request, caller)
        return name, generation

    async def tokenize(self, request: TokenizeRequest) -> list[int]:
        """Return the token ids of a prompt or chat. Raises ApiError."""
        self.check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise invalid("give either prompt or messages", "prompt")
        if request.prompt is not None:
            return await self._encode(request.prompt, special=request.add_special_tokens)
        return await self._chat_ids(request.messages or [], request.add_generation_prompt, request.chat_template_kwargs)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError for a model that is not served here."""
        if name not in (None, self.model, self.config.model_path):
            text = f"model {name[:80] if name else name} is not served here; it is {self.model}"
            raise ApiError(404, "not_found_error", text, param="model", code="model_not_found")

    def _check(self, request: CommonFields) -> None:
        self.check_model(request.model)
        state = self.link.state
        if state is None or self.link.silent:
            raise unavailable("the engine core does not answer; it may be restarting")
        if state.state in ("loading", "draining", "failed"):
            raise unavailable(f"the engine is {state.state}: {state.message}" if state.message else state.state, 5)
        if self.link.open_requests >= self._most_open:
            text = f"{self.link.open_requests} requests are open, the most that this process takes; try again"
            raise ApiError(429, "rate_limit_error", text, retry_after_s=1)

    async def _chat_ids(
        self, messages: Sequence[Message], prompt: bool, options: dict[str, object] | None
    ) -> list[int]:
        if not messages:
            raise invalid("messages is an empty list; give at least one message", "messages")
        chat = Chat(
            messages=[one.for_template() for one in messages], add_generation_prompt=prompt, options=options or {}
        )
        text = await self._renderer.render(chat, min(CHAT_MOST, self._characters))
        return await self._encode(text, special=False)

    @property
    def _characters(self) -> int:
        """Characters of a prompt that can fit."""
        return self.config.max_model_len * self._longest_token

    async def _encode(self, text: str, *, special: bool) -> list[int]:
        if len(text) > self._characters:
            limit = f"max_model_len is {self.config.max_model_len} tokens of at most {self._longest_token} characters"
            raise _too_long(f"the prompt has {len(text)} characters; {limit}", "prompt")
        encode = self.tokenizer.encode if special else self.tokenizer.encode_chat
        return encode(text) if len(text) <= INLINE_CHARACTERS else await asyncio.to_thread(encode, text)

    async def _begin(
        self, prefix: str, prompts: list[list[int]], request: CompletionRequest | ChatRequest, caller: Caller
    ) -> tuple[str, list[Generation]]:
        sampling, name = self._sampling(request), _new_id(prefix, caller.request_id)
        names = [name] if len(prompts) == 1 else [f"{name}-{index}" for index in range(len(prompts))]
        submissions = [
            Submit(prompt_token_ids=ids, sampling=sampling, request=one, priority=request.priority or 0)
            for one, ids in zip(names, prompts, strict=True)
        ]
        answer, followed = await self.link.submit(submissions, _owner(request.user) or caller.name)
        if answer.error and (answer.lost or answer.later):
            raise unavailable(answer.error, 5)
        if answer.error:
            text = answer.error.removeprefix("prompt 0: ") if len(prompts) == 1 else answer.error
            raise _too_long(text, "prompt") if "max_model_len" in text else invalid(text, "prompt")
        return name, [
            Generation(
                self.link, self.tokenizer, one, ids, index * sampling.n, request.stops(), sampling.min_tokens
            )
            for index, (one, ids) in enumerate(zip(followed, prompts, strict=True))
        ]  # fmt: skip

    def _sampling(self, request: CompletionRequest | ChatRequest) -> SamplingParams:
        """Return how the core samples, with the tokens of bad words. Raises ApiError."""
        sampling = request.sampling()
        sequences = [ids for word in sampling.bad_words for ids in self.tokenizer.encode_bad_word(word)]
        try:
            return msgspec.structs.replace(sampling, bad_words=[], bad_words_ids=sequences)
        except ValueError as error:
            raise invalid(str(error), "bad_words") from None

    def now(self) -> int:
        """Return the time of an answer, in Unix seconds."""
        return int(time.time())


def _too_long(text: str, param: str) -> ApiError:
    return ApiError(400, "invalid_request_error", text, param=param, code="context_length_exceeded")


def _owner(user: str | None) -> str:
    """Return the user of a request as consoles show it; empty without one."""
    return one_line(user or "", USER_MOST)


def _new_id(prefix: str, wanted: str | None) -> str:
    """Return an unused request id, which contains the client's own where it has one."""
    if wanted is not None and _ID.fullmatch(wanted):
        return f"{prefix}-{wanted}-{secrets.token_hex(2)}"
    return f"{prefix}-{secrets.token_hex(6)}"
