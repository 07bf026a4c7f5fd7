"""Outputs of requests, kept until they are fetched, so that a slow reader loses no token."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ppengine.checkpoint.tokenizer import DetokStream, Tokenizer
from ppengine.core.stop_text import find_stop, may_begin
from ppengine.protocol.control import Failed, Fetch, Fetched, Logprob
from ppengine.protocol.inspection import RequestDetail
from ppengine.protocol.offline import Collect, Collected, RequestOutput, SampleOutput
from ppengine.protocol.sampling import SamplingParams

MAX_WAITING = 10_000
"""Most waiting questions; later ones are answered at once with the present output."""
KEEP_FINISHED = 10_000
"""Most finished outputs; beyond that the oldest one that a reader has read to the end is dropped."""


class Ending(NamedTuple):
    """The detail of a request at its end, and that time of the clock."""

    at: float
    detail: RequestDetail


@dataclass(slots=True)
class Sample:
    """One continuation as it grows."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: str | None = None
    stream: DetokStream | None = None
    held_back: int = 0
    """Trailing characters, not shown yet, that may begin a stop text."""
    ending: Ending | None = None
    stopped: bool = False
    """The text was cut at a stop text."""

    @property
    def shown(self) -> int:
        """Number of characters that a reader may have, because they will not change."""
        return len(self.text) - self.held_back


@dataclass(slots=True)
class Output:
    """All continuations of one request."""

    request: str
    session: str
    prompt_ids: list[int]
    sampling: SamplingParams
    samples: list[Sample]
    changed: int = 0
    read_to_end: bool = False

    @property
    def finished(self) -> bool:
        """Whether every continuation has ended."""
        return all(sample.finish_reason is not None for sample in self.samples)


_Topic = tuple[Literal["more of", "news of", "end in"], str]
"""Condition of a waiting question: more of a request, news of a session, or an end in a session."""


@dataclass(slots=True)
class _Waiter:
    client: bytes
    question: Fetch | Collect
    deadline: float


class OutputHub:
    """Takes tokens in, finds stop texts, answers fetches at once or when there is more."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        reply: Callable[[bytes, Fetched | Collected | Failed], None],
        clock: Callable[[], float],
        failure: Callable[[], str],
    ) -> None:
        self._tokenizer = tokenizer
        self._reply = reply
        self._outputs: OrderedDict[str, Output] = OrderedDict()
        self._sessions: dict[str, dict[str, Output]] = {}
        self._waiters: dict[_Topic, list[_Waiter]] = {}
        self._waiting = 0
        self._earliest = math.inf
        """No deadline of a waiting question is before this."""
        self._touched: set[_Topic] = set()
        self._changes = 0
        self._finished = 0
        self._clock = clock
        self._failure = failure
        """Returns why no more tokens will come, for all who wait; empty if they will."""

    def open(self, request: str, session: str, prompt_ids: list[int], sampling: SamplingParams) -> None:
        """Begin the output of a request. A request id is used once."""
        output = Output(request, session, prompt_ids, sampling, [Sample() for _ in range(sampling.n)])
        if self._tokenizer is not None and sampling.detokenize:
            for sample in output.samples:
                sample.stream = self._tokenizer.stream(prompt_ids)
        self._outputs[request] = output
        if session:
            self._sessions.setdefault(session, {})[request] = output

    def __contains__(self, request: str) -> bool:
        return request in self._outputs

    def get(self, request: str) -> Output | None:
        """Return the output of a request, if it is kept."""
        return self._outputs.get(request)

    def text_of(self, tokens: list[int]) -> str:
        """Return the text of `tokens`; empty without a tokenizer."""
        return "" if self._tokenizer is None else self._tokenizer.decode(tokens)

    def push(self, request: str, index: int, token: int, logprob: Logprob | None, ended: bool) -> bool:
        """Append one token; return whether the text now ends in a stop text. `ended`: a stop token, no text."""
        output = self._outputs[request]
        sample = output.samples[index]
        sample.tokens.append(token)
        if logprob is not None:
            sample.logprobs.append(logprob)
        self._touch(output)
        if sample.stream is None or ended:
            return False
        piece = sample.stream.push(token)
        sample.text += piece
        stops = output.sampling.stop
        if not stops or not piece:
            return False
        if len(sample.tokens) >= output.sampling.min_tokens:
            at = find_stop(sample.text, stops, len(piece))
            if at is not None:
                sample.text, sample.held_back, sample.stopped = sample.text[:at], 0, True
                return True
        sample.held_back = may_begin(sample.text, stops)
        return False

    def finish(self, request: str, index: int, reason: str, ending: Ending | None = None) -> None:
        """Close one continuation."""
        output = self._outputs.get(request)
        if output is None or output.samples[index].finish_reason is not None:
            return
        sample = output.samples[index]
        if sample.stopped:
            # Also if the stop text came with the last allowed token.
            reason = "stop"
        elif sample.stream is not None and reason != "stop":
            sample.text += sample.stream.flush()
        sample.finish_reason, sample.held_back, sample.stream, sample.ending = reason, 0, None, ending
        self._touch(output)
        if output.finished:
            self._finished += 1
            self._touched.add(("end in", output.session))
            self._trim()

    def forget(self, requests: list[str]) -> None:
        """Drop finished outputs that their reader has received."""
        for request in requests:
            output = self._outputs.get(request)
            if output is not None and output.finished:
                self._drop(output)

    def fetch(self, client: bytes, question: Fetch) -> None:
        """Answer now if there is more than `offset`, otherwise when there is."""
        if question.request not in self._outputs:
            self._reply(client, Failed(nonce=question.nonce, code="NOT_FOUND", text=f"no request {question.request}"))
        elif min(question.offset, question.text_offset) < 0:
            text = f"offset {question.offset}, text_offset {question.text_offset}; both must be 0 or more"
            self._reply(client, Failed(nonce=question.nonce, code="INVALID", text=text))
        elif not self._answer_fetch(client, question, last=self._at_once(question)):
            self._wait(client, question)

    def collect(self, client: bytes, question: Collect) -> None:
        """Answer now if outputs of the session changed after `since`, otherwise when they do."""
        if not self._answer_collect(client, question, last=self._at_once(question)):
            self._wait(client, question)

    def serve_waiters(self) -> None:
        """Answer the questions that have news or have timed out. The loop calls it once a turn."""
        now = self._clock()
        every = bool(self._failure()) or now >= self._earliest
        topics = list(self._waiters) if every else [topic for topic in self._touched if topic in self._waiters]
        self._touched.clear()
        for topic in topics:
            waiters = self._waiters.pop(topic)
            left = [waiter for waiter in waiters if not self._serve(waiter, last=now >= waiter.deadline)]
            self._waiting -= len(waiters) - len(left)
            if left:
                self._waiters[topic] = left
        if every:
            deadlines = (waiter.deadline for waiters in self._waiters.values() for waiter in waiters)
            self._earliest = min(deadlines, default=math.inf)

    def next_deadline(self) -> float | None:
        """Return a time of the clock before which no question times out; None if none waits."""
        return self._earliest if self._waiters else None

    # --- inside ---------------------------------------------------------------------------------------------

    def _touch(self, output: Output) -> None:
        self._changes += 1
        output.changed = self._changes
        self._touched.add(("more of", output.request))
        self._touched.add(("news of", output.session))

    def _wait(self, client: bytes, question: Fetch | Collect) -> None:
        deadline = self._clock() + min(question.wait_ms, 60_000) / 1e3
        self._waiters.setdefault(_topic(question), []).append(_Waiter(client, question, deadline))
        self._waiting += 1
        self._earliest = min(self._earliest, deadline)

    def _at_once(self, question: Fetch | Collect) -> bool:
        return question.wait_ms <= 0 or self._waiting >= MAX_WAITING

    def _serve(self, waiter: _Waiter, last: bool) -> bool:
        if isinstance(waiter.question, Fetch):
            return self._answer_fetch(waiter.client, waiter.question, last)
        return self._answer_collect(waiter.client, waiter.question, last)

    def _answer_fetch(self, client: bytes, question: Fetch, last: bool) -> bool:
        output = self._outputs.get(question.request)
        if output is None or not 0 <= question.sample < len(output.samples):
            have = 0 if output is None else len(output.samples)
            text = f"no sample {question.sample} of {question.request} (it has {have})"
            self._reply(client, Failed(nonce=question.nonce, code="NOT_FOUND", text=text))
            return True
        sample = output.samples[question.sample]
        tokens = sample.tokens[question.offset :]
        shown = sample.shown
        done = sample.finish_reason is not None
        nothing = not tokens and not done and question.text_offset >= shown
        if nothing and (failure := self._failure()):
            self._reply(client, Failed(nonce=question.nonce, code="FAILED", text=failure))
            return True
        if nothing and not last:
            return False
        self._reply(
            client,
            Fetched(
                nonce=question.nonce, request=output.request, sample=question.sample, offset=question.offset,
                token_ids=tokens, text_offset=question.text_offset,
                text=sample.text[question.text_offset : shown], finished=done, finish_reason=sample.finish_reason,
                logprobs=sample.logprobs[question.offset :], prompt_tokens=len(output.prompt_ids),
                samples=len(output.samples),
            ),
        )  # fmt: skip
        output.read_to_end = output.read_to_end or output.finished
        return True

    def _answer_collect(self, client: bytes, question: Collect, last: bool) -> bool:
        outputs = [
            output
            for output in self._sessions.get(question.session, {}).values()
            if output.changed > question.since and (output.finished or not question.finished_only)
        ]
        if not outputs and not last and not self._failure():
            return False
        if question.finished_only:
            for output in outputs:
                output.read_to_end = True
        answer = Collected(
            nonce=question.nonce, cursor=self._changes, outputs=[as_wire(output) for output in outputs],
            error=self._failure() if not outputs else "",
        )  # fmt: skip
        self._reply(client, answer)
        return True

    def _trim(self) -> None:
        if self._finished <= KEEP_FINISHED:
            return
        for output in list(self._outputs.values()):
            if output.finished and output.read_to_end:
                self._drop(output)
            if self._finished <= KEEP_FINISHED:
                return

    def _drop(self, output: Output) -> None:
        del self._outputs[output.request]
        self._finished -= 1
        members = self._sessions.get(output.session)
        if members is not None:
            members.pop(output.request, None)
            if not members:
                del self._sessions[output.session]


def _topic(question: Fetch | Collect) -> _Topic:
    if isinstance(question, Fetch):
        return "more of", question.request
    return ("end in" if question.finished_only else "news of"), question.session


def as_wire(output: Output) -> RequestOutput:
    """Return the output of a request in the form of the offline API."""
    return RequestOutput(
        output.request,
        output.prompt_ids,
        [
            SampleOutput(list(sample.tokens), sample.text[: sample.shown], sample.finish_reason, list(sample.logprobs))
            for sample in output.samples
        ],
        output.finished,
    )
