"""The link of an HTTP process to the core: requests go out, their tokens come in, all over one socket."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from ppengine.http.call_trace import CallTraces
from ppengine.http.engine_state import EngineState
from ppengine.http.event_rows import EventRows
from ppengine.http.followed import Followed
from ppengine.http.front_socket import FrontSocket
from ppengine.http.outbox import Outbox
from ppengine.protocol.clients import HttpReport
from ppengine.protocol.frames import Codec, encode
from ppengine.protocol.metrics import CoreMetrics, MetricsQuery
from ppengine.protocol.offline import (
    AbortMany,
    Added,
    AddMany,
    EndSamples,
    Follow,
    ForgetMany,
    FromFront,
    News,
    OpenSession,
    Piece,
    StateAnswer,
    StateQuery,
)
from ppengine.protocol.token_ids import compact_if_good
from ppengine.protocol.verbs import Submit

WAIT_MS = 1000
"""Milliseconds after which the core answers `Follow` without news."""
ANSWERS = 64
"""News that may come before the core waits for a question: its queue for a process that is stopped is bounded."""
AGAIN_S = 2.5
"""Seconds after which a question without an answer is repeated: its core may have been restarted."""
_T = TypeVar("_T", Added, CoreMetrics, StateAnswer)


@dataclass(eq=False, slots=True)
class _Question:
    """A message that the core answers once. Its core may have gone before."""

    message: bytes
    answer: asyncio.Future[msgspec.Struct]
    sent_at: float


class FrontLink:
    """Submits, follows and aborts the requests of one session. `run` reads until it is cancelled."""

    def __init__(
        self, endpoint: str, session: str, on_state: Callable[[StateAnswer], None], interval: int = 1,
        traces: CallTraces | None = None, rows: EventRows | None = None,
    ) -> None:  # fmt: skip
        """`on_state` is called with each new state of the engine. `interval`: see `Followed`."""
        self.rows = rows or EventRows()
        """Streams whose events need no other work."""
        self._traces = traces
        self._left: dict[str, int] = {}
        """Samples whose times have not come, by request that was left; none without traces."""
        self.outbox = Outbox()
        """Events on their way to connections."""
        self._socket = FrontSocket(endpoint, self._read)
        self._session, self._interval = session, interval
        self._codec = Codec(FromFront)
        # A successor in the session must not repeat the numbers of this process.
        self._nonce = secrets.randbits(48)
        self._asked: dict[int, _Question] = {}
        """Questions without an answer, by number."""
        self._adding = set[int]()
        """Numbers of the questions for new requests that have no answer."""
        self._ended = ""
        """Reason why no request goes on; empty: they do."""
        self._open: dict[str, Followed] = {}
        self._cursor = -1
        self._following = 0
        """Number of the open question for news, 0 without one."""
        self._answers_left = 0
        """Answers that the core still owes to it."""
        self._heard_at = 0.0
        """Time of its newest answer, or of the question."""
        self.engine = EngineState(self._ask_state, on_state)

    @property
    def open_requests(self) -> int:
        """Number of requests that have not ended."""
        return len(self._open)

    @property
    def state(self) -> StateAnswer | None:
        """The newest state of the engine."""
        return self.engine.newest

    @property
    def silent(self) -> bool:
        """Whether the core does not answer."""
        return self.engine.silent

    async def run(self) -> None:
        """Serve the link until this is cancelled."""
        self._send(OpenSession(session=self._session))
        tasks = [asyncio.create_task(each) for each in (self._socket.run(), self.engine.watch(), self._repeat())]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def submit(
        self, submissions: list[Submit], owner: str, client: str, arrived: float
    ) -> tuple[Added, list[Followed]]:
        """Queue requests, each with an id of its own: all or none, and none if the answer has an error.

        `client`: name of the API key. `arrived`: time of the monotonic clock when their call had come.
        """
        if self._ended:
            return Added(nonce=0, requests=[], error=self._ended, later=True), []
        followed = [
            Followed(one.request or "", one.sampling.n, [0] * one.sampling.n, interval=self._interval)
            for one in submissions
        ]
        # Their first tokens may come together with the answer.
        self._open.update((one.request, one) for one in followed)
        tokens = [compact_if_good(one.prompt_token_ids or ()) for one in submissions]
        bare = [
            msgspec.structs.replace(one, prompt_token_ids=None) if ids else one
            for one, ids in zip(submissions, tokens, strict=True)
        ]
        message = AddMany(
            nonce=self._number(), session=self._session, submissions=bare, tokens=tokens, owner=owner, client=client,
            arrived=arrived,
        )  # fmt: skip
        self._adding.add(message.nonce)
        try:
            answer = await self._ask(message, message.nonce, Added)
        except BaseException:
            # The core may never take it, so no times are waited for.
            self._abort(followed)
            raise
        finally:
            self._adding.discard(message.nonce)
        if answer.error:
            for one in followed:
                self._open.pop(one.request, None)
            return answer, []
        self._follow()
        return answer, followed

    async def metrics(self) -> CoreMetrics:
        """Return the counts of the core."""
        query = MetricsQuery(nonce=self._number())
        return await self._ask(query, query.nonce, CoreMetrics)

    def end(self, why: str) -> None:
        """End all requests with `why`, also those that the core has not taken, and take no others."""
        self._ended = why
        for nonce in self._adding:
            if not (answer := self._asked[nonce].answer).done():
                answer.set_result(Added(nonce=nonce, requests=[], error=why, later=True))
        self._fail(why)

    def report(self, report: HttpReport) -> None:
        """Send the counts of this process, unless the core is away: its queue must not grow."""
        if not self.silent:
            self._send(report)

    def leave(self, followed: Iterable[Followed]) -> None:
        """Abort those of the requests that have not ended, and read none any more but their times."""
        left = self._abort(followed)
        if left and self._traces is not None:
            self._left.update((one.request, one.samples) for one in left)
            self._follow()

    def _abort(self, followed: Iterable[Followed]) -> list[Followed]:
        """Abort those of the requests that have not ended, and return them."""
        left = [one for one in followed if self._open.pop(one.request, None) is not None and one.samples]
        if left:
            self._send(AbortMany(session=self._session, requests=[one.request for one in left]))
        return left

    def end_sample(self, followed: Followed, sample: int) -> None:
        """End one continuation in the core, as its text has met a stop text; the others go on."""
        self._send(EndSamples(session=self._session, samples=[(followed.request, sample)]))

    async def _ask(self, message: msgspec.Struct, nonce: int, kind: type[_T]) -> _T:
        """Send a question; `_repeat` sends it again until it is answered."""
        question = _Question(encode(message), asyncio.get_running_loop().create_future(), time.monotonic())
        self._asked[nonce] = question
        try:
            self._socket.send(question.message)
            answer = await question.answer
        finally:
            del self._asked[nonce]
        assert isinstance(answer, kind), "an answer is known by its number"
        return answer

    def _read(self, data: bytes) -> None:
        message = self._codec.decode(data)
        if isinstance(message, News):
            self._take(message)
        elif isinstance(message, (Added, CoreMetrics, StateAnswer)):
            question = self._asked.get(message.nonce)
            if question is not None and not question.answer.done():
                question.answer.set_result(message)

    def _take(self, news: News) -> None:
        """Hand out the pieces of an answer, and ask for more."""
        ended, gap = list[str](), False
        now, open_ = time.monotonic(), self._open
        columns = news.singles
        with self.outbox:
            for at in self.rows.send(columns, now):
                request = columns.requests[at]
                one = open_.get(request)
                if one is not None:  # Otherwise its client has left.
                    gap |= not one.take(Piece(request, 0, columns.offsets[at], [columns.token_ids[at]]))
            for piece in news.pieces:
                one = open_.get(piece.request)
                if self._traces is not None and piece.finish_reason is not None:
                    self._traces.take(piece.request, piece.sample, piece.timings, piece.cached_tokens)
                    if (samples := self._left.pop(piece.request, 1)) > 1:
                        self._left[piece.request] = samples - 1
                if one is None:
                    # Its client has left; the output goes with the last sample.
                    ended += [piece.request] if piece.finish_reason is not None else []
                elif not one.take(piece):
                    gap = True
                elif not one.samples:
                    del self._open[piece.request]
                    ended.append(piece.request)
        if ended:
            self._send(ForgetMany(session=self._session, requests=ended))
        if news.error:
            self._fail(news.error)
        if news.nonce == self._following:
            self._cursor, self._heard_at = -1 if gap else news.cursor, now
            self._answers_left -= 1
            if gap or news.error or not self._answers_left:
                self._following = 0
                self._follow()
            elif self._answers_left <= ANSWERS // 2 and (self._open or self._left):
                self._ask_for_news()

    def _fail(self, error: str) -> None:
        failed, self._open, self._left = list(self._open.values()), {}, {}
        for one in failed:
            one.error = error
            # It wakes the reader.
            one.give(Piece(one.request, 0, one.counts[0], []))

    def _follow(self) -> None:
        """Ask for news, unless a question is open or nothing is followed."""
        if (self._open or self._left) and not self._following:
            self._following, self._heard_at = self._number(), time.monotonic()
            self._ask_for_news()

    def _ask_for_news(self) -> None:
        """Ask, or go on with a question before all of its answers have come."""
        self._answers_left = ANSWERS
        question = Follow(
            nonce=self._following, session=self._session, since=self._cursor, wait_ms=WAIT_MS, answers=ANSWERS,
            timings=self._traces is not None,
        )  # fmt: skip
        self._send(question)

    async def _repeat(self) -> None:
        """Send questions again whose answers did not come."""
        while True:
            await asyncio.sleep(0.25)
            now = time.monotonic()
            for one in self._asked.values():
                if now - one.sent_at > AGAIN_S:
                    one.sent_at = now
                    self._socket.send(one.message)
            if self._following and now - self._heard_at > AGAIN_S:
                self._following = 0
            self._follow()

    async def _ask_state(self, wait_ms: int) -> StateAnswer:
        query = StateQuery(nonce=self._number(), wait_ms=wait_ms)
        return await self._ask(query, query.nonce, StateAnswer)

    def _number(self) -> int:
        self._nonce += 1
        return self._nonce

    def _send(self, message: msgspec.Struct) -> None:
        self._socket.send(encode(message))
