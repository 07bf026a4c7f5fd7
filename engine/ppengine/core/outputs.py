"""Outputs of requests, kept until they are fetched: tokens are not telemetry, no slow reader loses one."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from ppengine.protocol.control import Failed, Fetch, Fetched, Logprob
from ppengine.protocol.offline import Collect, Collected, RequestOutput, SampleOutput
from ppengine.protocol.sampling import SamplingParams
from ppengine.tokenizer import DetokStream, Tokenizer

KEEP_FINISHED = 10_000
"""Finished outputs that are kept; beyond that the oldest one that somebody has read to the end goes first."""


@dataclass(slots=True)
class Sample:
    """One continuation as it grows."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: str | None = None
    stream: DetokStream | None = None
    held_back: int = 0
    """Trailing characters that may be the beginning of a stop text and are not shown yet."""


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


@dataclass(slots=True)
class _Waiter:
    client: bytes
    question: Fetch | Collect
    deadline: float


class OutputHub:
    """Takes tokens in, finds stop texts, answers fetches at once or when there is more."""

    def __init__(
        self, tokenizer: Tokenizer | None, reply: Callable[[bytes, Fetched | Collected | Failed], None]
    ) -> None:
        self._tokenizer = tokenizer
        self._reply = reply
        self._outputs: OrderedDict[str, Output] = OrderedDict()
        self._sessions: dict[str, dict[str, Output]] = {}
        self._waiters: list[_Waiter] = []
        self._clock = 0
        self._finished = 0
        self._touched = False
        self.failure = ""
        """Why nothing more will come (a stage is lost); whoever waits is told."""

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

    def push(self, request: str, index: int, token: int, logprob: Logprob | None, ended: bool) -> bool:
        """Append one token; return True when the text now ends in a stop text. `ended`: a stop token, no text."""
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
        if not stops or not piece or len(sample.tokens) < output.sampling.min_tokens:
            return False
        return self._cut_at_stop(sample, stops, len(piece))

    def finish(self, request: str, index: int, reason: str) -> None:
        """Close one continuation."""
        output = self._outputs.get(request)
        if output is None or output.samples[index].finish_reason is not None:
            return
        sample = output.samples[index]
        if sample.stream is not None and reason != "stop":
            sample.text += sample.stream.flush()
        sample.finish_reason, sample.held_back, sample.stream = reason, 0, None
        self._touch(output)
        if output.finished:
            self._finished += 1
            self._trim()

    def forget(self, requests: list[str]) -> None:
        """Drop finished outputs that their reader has."""
        for request in requests:
            output = self._outputs.get(request)
            if output is not None and output.finished:
                self._drop(output)

    def fetch(self, client: bytes, question: Fetch) -> None:
        """Answer now if there is more than `offset`, else when there is."""
        if question.request not in self._outputs:
            self._reply(client, Failed(nonce=question.nonce, code="NOT_FOUND", text=f"no request {question.request}"))
        elif min(question.offset, question.text_offset) < 0:
            text = f"offset {question.offset}, text_offset {question.text_offset}; both must be 0 or more"
            self._reply(client, Failed(nonce=question.nonce, code="INVALID", text=text))
        elif not self._answer_fetch(client, question, last=question.wait_ms <= 0):
            self._wait(client, question)

    def collect(self, client: bytes, question: Collect) -> None:
        """Answer now if outputs of the session changed after `since`, else when they do."""
        if not self._answer_collect(client, question, last=question.wait_ms <= 0):
            self._wait(client, question)

    def serve_waiters(self) -> None:
        """Answer the questions that have news or whose time is up. Called once a turn of the loop."""
        if not self._waiters:
            return
        now = time.monotonic()
        if not self._touched and now < min(waiter.deadline for waiter in self._waiters) and not self.failure:
            return
        self._touched = False
        self._waiters = [waiter for waiter in self._waiters if not self._serve(waiter, last=now >= waiter.deadline)]

    def next_deadline(self) -> float | None:
        """Return the monotonic time at which a waiting question must be answered."""
        return min((waiter.deadline for waiter in self._waiters), default=None)

    # --- inside ---------------------------------------------------------------------------------------------

    def _touch(self, output: Output) -> None:
        self._clock += 1
        output.changed = self._clock
        self._touched = True

    def _wait(self, client: bytes, question: Fetch | Collect) -> None:
        self._waiters.append(_Waiter(client, question, time.monotonic() + min(question.wait_ms, 60_000) / 1e3))

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
        shown = len(sample.text) - sample.held_back
        done = sample.finish_reason is not None
        nothing = not tokens and not done and question.text_offset >= shown
        if nothing and self.failure:
            self._reply(client, Failed(nonce=question.nonce, code="FAILED", text=self.failure))
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
        if not outputs and not last and not self.failure:
            return False
        if question.finished_only:
            for output in outputs:
                output.read_to_end = True
        answer = Collected(
            nonce=question.nonce, cursor=self._clock, outputs=[as_wire(output) for output in outputs],
            error=self.failure if not outputs else "",
        )  # fmt: skip
        self._reply(client, answer)
        return True

    @staticmethod
    def _cut_at_stop(sample: Sample, stops: list[str], grown: int) -> bool:
        longest = max(map(len, stops))
        begin = max(0, len(sample.text) - grown - longest + 1)
        found = [at for stop in stops if (at := sample.text.find(stop, begin)) >= 0]
        if found:
            sample.text, sample.held_back = sample.text[: min(found)], 0
            return True
        sample.held_back = max(
            (size for stop in stops for size in range(1, len(stop)) if sample.text.endswith(stop[:size])), default=0
        )
        return False

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


def as_wire(output: Output) -> RequestOutput:
    """Return a request's output as the offline API gets it."""
    return RequestOutput(
        output.request,
        output.prompt_ids,
        [
            SampleOutput(list(sample.tokens), sample.text, sample.finish_reason, list(sample.logprobs))
            for sample in output.samples
        ],
        output.finished,
    )
