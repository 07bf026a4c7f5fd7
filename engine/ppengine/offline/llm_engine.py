"""`LLMEngine`: an engine that a program drives step by step, with the names that vLLM users know."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.common.config import Profile
from ppengine.offline.arguments import profile_of, with_arguments
from ppengine.offline.conversations import ConversationRenderer
from ppengine.offline.launch import EngineError, LocalEngine
from ppengine.offline.open_requests import OpenRequest, OpenRequests
from ppengine.offline.program_texts import ProgramTexts
from ppengine.offline.prompts import Prompt, Submission, TokensPrompt, check_params, portions, submissions_of
from ppengine.offline.request_output import RequestOutput
from ppengine.offline.request_seeds import checked_seed, seeded
from ppengine.protocol import offline as wire
from ppengine.protocol.chat_messages import Chat
from ppengine.protocol.kinds import check_kind
from ppengine.protocol.sampling import SamplingParams

NEWS_MS = 1000
"""Milliseconds after which the core answers without an end: then text is made of the tokens so far."""
STOPS_LEAST_MS, STOPS_MOST_MS, REQUESTS_A_MS = 4, 24, 8
"""The same while stop texts are looked for: least, most, and the open requests for one more.

A message with single tokens of many requests costs more than the tokens that are computed behind a stop text.
"""


class LLMEngine:
    """An engine driven step by step: `add_request`, `step`, `abort_request`. Close it, or use it in a `with`.

    `seed`: requests without a seed of their own get one that follows from it and from their number.
    """

    _renderer: ConversationRenderer | None = None
    """Made by the first chat."""
    _seed: int | None = None
    _count = 0
    """Requests so far."""
    _adding: int | None = None
    """Number of the newest message with requests, until they are open here."""

    def __init__(self, model: str | Profile, *, seed: int | None = None, **arguments: Any) -> None:
        profile = profile_of(model, arguments)
        self._seed = checked_seed(seed)
        try:
            self._engine = LocalEngine(profile)
        except EngineError as error:
            if isinstance(model, Profile):
                raise
            raise EngineError(with_arguments(str(error))) from None
        self._texts = ProgramTexts(
            Path(profile.model.path).resolve(), self._engine.state.max_model_len, absent=profile.model.skip_tokenizer
        )  # fmt: skip
        self._session = f"offline-{secrets.token_hex(4)}"
        self._cursor = -1
        self._open = OpenRequests(lambda: self._texts.tokenizer)

    @property
    def engine_id(self) -> str:
        """Id by which `ppconsole attach` finds this engine."""
        return self._engine.id

    @property
    def run_dir(self) -> str:
        """Folder of the engine's sockets, logs and `engine.json`, gone with it."""
        return self._engine.run_dir

    @property
    def supervisor_pid(self) -> int:
        """Process id of the engine's supervisor, the parent of all its processes."""
        return self._engine.pid

    @property
    def num_blocks(self) -> int:
        """KV blocks that all stages agreed on at start, the null block included."""
        return self._engine.state.num_blocks

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int = 0) -> None:
        """Queue one request. Raises ValueError if it can never fit or its id is in use."""
        self.add_many([prompt], [params], [request_id], [priority])

    def add_many(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], ids: Sequence[str] = (),
        priority: Sequence[int] | None = None,
    ) -> list[str]:  # fmt: skip
        """Queue several requests, all or none, and return their ids. Raises ValueError or EngineError.

        If a large batch is refused, part of it may have been queued already; those ids are in use until they end.
        """
        count = len(prompts)
        if len(params) != count or len(ids) not in (0, count):
            raise ValueError(f"{count} prompts, {len(params)} sampling params and {len(ids)} request ids")
        check_params(params)
        first = self._count
        submissions = submissions_of(prompts, seeded(params, self._seed, first), ids, priority)
        opened: dict[str, OpenRequest] = {}
        try:
            for more in self._send(submissions):
                opened |= more
        except BaseException:
            # The newest message may have reached the core: its answer was not waited for.
            sent = [] if self._adding is None else [self._adding]
            if opened or sent:
                self._engine.send(wire.AbortMany(session=self._session, requests=list(opened), messages=sent))
            raise
        self._open.add(opened)
        self._adding, self._count = None, first + count
        return list(opened)

    def check_many(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], priority: Sequence[int] | None = None
    ) -> None:
        """Queue nothing, but raise ValueError for the first prompt that `add_many` would refuse, or EngineError."""
        for _ in self._send(submissions_of(prompts, params, (), priority), check=True):
            pass

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the checkpoint: `encode` and `decode`. Raises ValueError if the engine has none."""
        if (tokenizer := self._texts.tokenizer) is None:
            raise ValueError("this engine was started without a tokenizer")
        return tokenizer

    def chat_prompts(self, chats: Sequence[Chat]) -> list[TokensPrompt]:
        """Return chats as prompts, by the checkpoint's template. Raises ValueError for one that fails, EngineError."""
        self._engine.check_alive()
        if self._texts.absent:
            raise ValueError("a chat needs a tokenizer; this engine was started without one: give prompt_token_ids")
        if self._renderer is None:
            self._renderer = ConversationRenderer(self.run_dir)
        return list(map(self._texts.chat_prompt, self._renderer.texts(chats)))

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End a request or several; one that has ended already is fine. Raises ValueError for an id that is no text."""
        names = [request_id] if isinstance(request_id, str) else list(request_id)
        check_kind("request_id", names, list[str])
        if names:
            self._engine.send(wire.AbortMany(session=self._session, requests=names))

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to wait for."""
        return bool(self._open)

    def step(self, *, finished_only: bool = False) -> list[RequestOutput]:
        """Wait for news (at most a second) and return the requests that changed. Raises EngineError.

        `finished_only`: wait for ends, and return those that have ended.
        """
        news = self._engine.ask(self._question(finished_only=finished_only), wire.News)
        if news.error and self._open:
            raise EngineError(news.error)
        taken = self._open.take(news)
        self._cursor = -1 if taken.gap else news.cursor
        if taken.stopped:
            self._engine.send(wire.EndSamples(session=self._session, samples=taken.stopped))
        if taken.ended:
            self._engine.send(wire.ForgetMany(session=self._session, requests=taken.ended))
        return [one.output(name) for name, one in taken.changed.items() if not (finished_only and one.left)]

    def close(self) -> None:
        """Stop the engine; repeated calls are fine."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None
        self._engine.close()

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _question(self, *, finished_only: bool) -> wire.Follow:
        """Return a question for news, or with `finished_only` for ends and, after a time, for all news."""
        wait_ms = NEWS_MS
        if finished_only and self._open.have_stops:
            wait_ms = min(STOPS_LEAST_MS + len(self._open) // REQUESTS_A_MS, STOPS_MOST_MS)
        return wire.Follow(
            nonce=self._engine.nonce(), session=self._session, since=self._cursor, wait_ms=wait_ms,
            timings=True, finished_only=finished_only,
        )  # fmt: skip

    def _send(self, submissions: list[Submission], *, check: bool = False) -> Iterator[dict[str, OpenRequest]]:
        """Send submissions in portions, with the tokens of their texts; yield the requests of each.

        Raises ValueError with the first prompt that is refused, or EngineError.
        """
        for begin, end in portions(submissions):
            encoded: list[Submission] = []
            for number in range(begin, end):
                try:
                    encoded.append(self._texts.encoded(submissions[number]))
                except ValueError as error:
                    if encoded:
                        # The core may refuse an earlier one.
                        self._ask(encoded, begin, check=True)
                    raise ValueError(f"prompt {number}: {error}") from None
            names = self._ask(encoded, begin, check=check)
            # One whose tokens fit no array is refused.
            yield {
                name: OpenRequest(given.text, one.tokens, given.verb.sampling)
                for name, one, given in zip(names, encoded, submissions[begin:end], strict=not check)
            }

    def _ask(self, encoded: list[Submission], first: int, *, check: bool) -> list[str]:
        """Send submissions, of which the first has this number; return their ids. Raises ValueError or EngineError."""
        tokens, nonce = [one.tokens for one in encoded], self._engine.nonce()
        message = wire.AddMany(
            nonce=nonce, session=self._session, submissions=[one.verb for one in encoded], first=first,
            check=check, tokens=tokens if any(tokens) else [],
        )  # fmt: skip
        self._adding = None if check else nonce
        answer = self._engine.ask(message, wire.Added)
        if answer.error:
            self._adding = None
            raise EngineError(answer.error) if answer.lost else ValueError(answer.error)
        return answer.requests
