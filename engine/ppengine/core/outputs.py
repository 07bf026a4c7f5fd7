"""Outputs of requests, kept until they are fetched, so that a slow reader loses no token."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from ppengine.core import output_parts
from ppengine.core.followers import Followers
from ppengine.core.journal_records import Entered
from ppengine.core.long_polls import LongPolls, Waiter
from ppengine.core.output_state import Ending, Output, Sample
from ppengine.core.prompt_score_room import PromptScoreRoom
from ppengine.core.scheduler.request import Request
from ppengine.protocol.control import Failed, Fetch, Fetched, Logprob
from ppengine.protocol.offline import Follow, News
from ppengine.protocol.prompt_scores import PromptScores
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.text_messages import OutputPart, ReadOutput
from ppengine.protocol.token_ids import TokenIds

KEEP_FINISHED = 10_000
"""Most finished outputs; beyond that the oldest one that a reader has read to the end is dropped."""
KEEP_TOKENS = 16 * 1024 * 1024
"""Most tokens of finished outputs, likewise: 64 MiB."""
UNREAD = 2
"""Multiple of both above which outputs of consoles go that no reader wants; a session reads all of its own."""
KEEP_READ_S = 60.0
"""An output stays that long after its end was answered: a gateway that ends takes answers with it."""


class OutputHub:
    """Takes tokens in, and answers fetches at once or when there is more."""

    def __init__(
        self,
        reply: Callable[[bytes, Fetched | News | OutputPart | Failed], None],
        clock: Callable[[], float],
        failure: Callable[[], str],
        dropped: Callable[[list[str]], None] = lambda names: None,
    ) -> None:
        """`failure` returns why no more tokens will come, empty if they will; `dropped` takes names."""
        self._reply = reply
        self._outputs: OrderedDict[str, Output] = OrderedDict()
        self._sessions: dict[str, dict[str, Output]] = {}
        self._polls = LongPolls(clock)
        self.scores = PromptScoreRoom()
        self._followers = Followers(self.scores.drop)
        self._changes = 0
        self._finished = 0
        self._tokens = 0
        """Weight of the finished outputs."""
        self._clock = clock
        self._failure, self._dropped = failure, dropped

    def open(self, request: str, session: str, prompt_ids: TokenIds, sampling: SamplingParams, number: int) -> Output:
        """Begin the output of a request. A request id is used once."""
        samples = [Sample() for _ in range(sampling.n)]
        output = Output(request, session, prompt_ids, sampling, samples, number=number)
        self._outputs[request] = output
        self.scores.open(output)
        if output.followed:
            self._sessions.setdefault(session, {})[request] = output
        return output

    def __iter__(self) -> Iterator[Output]:
        """Return an iterator over the outputs, the oldest first; some may be dropped meanwhile."""
        return (self._outputs[name] for name in list(self._outputs) if name in self._outputs)

    def restart(self, cursor: int) -> None:
        """Count changes from `cursor` on: readers know the cursors of the core before this one."""
        self._changes = cursor

    def restore(self, entered: Entered) -> Output:
        """Go on with an output of the core before this one."""
        output = self.open(entered.name, entered.session, entered.prompt_ids, entered.sampling, entered.first)
        output.deaths = entered.deaths
        for sample, known in zip(output.samples, entered.samples, strict=True):
            sample.tokens, sample.logprobs = known.tokens, known.logprobs
            if known.finished is not None:
                sample.finish_reason = known.finished.reason
        if output.samples[0].tokens:
            self.scores.drop(output)  # They are computed before the first token alone.
        self._touch(output)
        if output.finished:
            self._count(output)
            self._follow_no_more(output)
            # What the core before this one has answered is not known.
            self._note_read(output)
        return output

    def __contains__(self, request: str) -> bool:
        return request in self._outputs

    def get(self, request: str) -> Output | None:
        """Return the output of a request, if it is kept."""
        return self._outputs.get(request)

    def push(self, tokens: Iterable[tuple[Request, int, float, list[tuple[int, float]]]]) -> None:
        """Append tokens: each with its request, its log-probability and the best alternatives."""
        outputs, changes = self._outputs, self._changes
        more, news = self._polls.changed["more of"], self._polls.changed["news of"]
        for request, token, logprob, top in tokens:
            output = outputs[request.group]
            sample = output.samples[request.sample]
            sample.tokens.append(token)
            if output.sampling.logprobs is not None:
                sample.logprobs.append(Logprob(logprob, top))
            output.deaths = 0
            changes += 1
            output.changed = changes
            more.add(output.request)
            if output.followed:
                news.add(output.session)
                self._followers.touch(output)
        self._changes = changes

    def score(self, scores: PromptScores) -> None:
        """Keep log-probabilities of a prompt."""
        if (output := self._outputs.get(scores.request)) is not None:
            self.scores.keep(output, scores)

    def drop_scores(self, requests: Iterable[str]) -> None:
        """Drop the log-probabilities of prompts that no reader wants: their room is free at once."""
        for name in requests:
            if (output := self._outputs.get(name)) is not None:
                self.scores.drop(output)

    def finish(self, request: str, index: int, reason: str, ending: Ending | None = None) -> None:
        """Close one continuation."""
        output = self._outputs.get(request)
        if output is None or output.samples[index].finish_reason is not None:
            return
        sample = output.samples[index]
        sample.finish_reason, sample.ending = reason, ending
        self._touch(output)
        if output.finished:
            self._count(output)
            if output.followed:
                self._polls.changed["end in"].add(output.session)
                self._followers.end(output)
            self._follow_no_more(output)
            self._trim()

    def forget(self, requests: list[str]) -> None:
        """Drop finished outputs that their reader has received."""
        known = (self._outputs.get(request) for request in dict.fromkeys(requests))
        self._drop([output for output in known if output is not None and output.finished])

    def fetch(self, client: bytes, question: Fetch | ReadOutput) -> None:
        """Answer now if there is more than `offset`, otherwise when there is."""
        if question.request not in self._outputs:
            self._reply(client, Failed(nonce=question.nonce, code="NOT_FOUND", text=f"no request {question.request}"))
        elif text := output_parts.wrong_offsets(question):
            self._reply(client, Failed(nonce=question.nonce, code="INVALID", text=text))
        elif not self._answer_fetch(client, question, last=not self._polls.waits(question)):
            self._polls.add(client, question)

    def follow(self, client: bytes, question: Follow) -> None:
        """Answer now if requests of the session have news, otherwise when they have."""
        self._followers.begin(question)
        self._polls.replace(client, question)
        waits = self._polls.waits(question)
        if not self._answer_follow(client, question, last=not waits) and waits:
            self._polls.add(client, question)

    def open_in(self, session: str) -> list[str]:
        """Return the requests of a session that have not ended."""
        return [name for name, output in self._sessions.get(session, {}).items() if not output.finished]

    def serve_waiters(self) -> None:
        """Answer the questions that have news or have timed out. The loop calls it once a turn."""
        self._polls.serve(self._serve, every=bool(self._failure()))

    def next_deadline(self) -> float | None:
        """Return a time of the clock before which no question times out; None if none waits."""
        return self._polls.next_deadline

    # --- inside ---------------------------------------------------------------------------------------------

    def _touch(self, output: Output) -> None:
        self._changes += 1
        output.changed = self._changes
        self._polls.changed["more of"].add(output.request)
        if output.followed:
            self._polls.changed["news of"].add(output.session)
            self._followers.touch(output)

    def _serve(self, waiter: Waiter, last: bool) -> bool:
        if not isinstance(waiter.question, Follow):
            return self._answer_fetch(waiter.client, waiter.question, last)
        before = waiter.question.answers
        over = self._answer_follow(waiter.client, waiter.question, last)
        if waiter.question.answers < before:
            waiter.deadline = self._clock() + waiter.question.wait_ms / 1e3
        return over

    def _answer_fetch(self, client: bytes, question: Fetch | ReadOutput, last: bool) -> bool:
        output = self._outputs.get(question.request)
        if output is None or not 0 <= question.sample < len(output.samples):
            have = 0 if output is None else len(output.samples)
            text = f"no sample {question.sample} of {question.request} (it has {have})"
            self._reply(client, Failed(nonce=question.nonce, code="NOT_FOUND", text=text))
            return True
        sample = output.samples[question.sample]
        done = sample.finish_reason is not None
        nothing = not done and not output_parts.news(question, output, len(sample.tokens))
        if nothing and (failure := self._failure()):
            self._reply(client, Failed(nonce=question.nonce, code="FAILED", text=failure))
            return True
        if nothing and not last:
            return False
        self._reply(client, output_parts.answer(question, output))
        if output.finished and (isinstance(question, Fetch) or question.console):
            self._note_read(output)
        return True

    def _answer_follow(self, client: bytes, question: Follow, last: bool) -> bool:
        """Answer if there is news, or `last`; return whether the question gets no further answer."""
        members = self._sessions.get(question.session, {}).values()
        outputs = self._followers.due(question, members, every=last)
        failure = "" if outputs else self._failure()
        if not outputs and not last and not failure:
            return False
        if question.session:  # Stop texts of consoles' requests are looked for, which is no reading.
            for output in self._followers.ended(question.session):
                self._note_read(output)
        self._reply(client, self._followers.news(question, outputs, self._changes, failure))
        question.since, question.answers = self._changes, question.answers - 1
        return bool(failure) or question.answers <= 0

    def _trim(self) -> None:
        surplus, tokens = self._finished - KEEP_FINISHED, self._tokens - KEEP_TOKENS
        if surplus <= 0 and tokens <= 0:
            return
        late, old, beyond = self._clock() - KEEP_READ_S, [], UNREAD - 1
        for output in self._outputs.values():
            if surplus <= 0 and tokens <= 0:
                break
            if output.read_at is None:
                unread = surplus > beyond * KEEP_FINISHED or tokens > beyond * KEEP_TOKENS
                if not unread or output.session or not output.finished:
                    continue
            elif not output.finished:
                continue
            elif output.read_at > late:
                break
            old.append(output)
            surplus, tokens = surplus - 1, tokens - output.weight
        self._drop(old)

    def _follow_no_more(self, output: Output) -> None:
        """Leave an output that has ended out of the session of consoles: no stop text is looked for any more."""
        if not output.session and (members := self._sessions.get("")) is not None:
            members.pop(output.request, None)

    def _count(self, output: Output) -> None:
        """Count an output that has finished."""
        self._finished += 1
        self._tokens += output.weigh()

    def _note_read(self, output: Output) -> None:
        if output.read_at is None:
            output.read_at = self._clock()

    def _drop(self, outputs: list[Output]) -> None:
        for output in outputs:
            del self._outputs[output.request]
            self._finished -= 1
            self._tokens -= output.weight
            self.scores.drop(output)
            self._followers.drop(output)
            members = self._sessions.get(output.session)
            if members is not None:
                members.pop(output.request, None)
                if not members and output.session:
                    del self._sessions[output.session]
                    self._followers.forget(output.session)
        if outputs:
            self._dropped([output.request for output in outputs])
