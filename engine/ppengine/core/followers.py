"""Sessions that follow their requests: each token is sent once, and again only if an answer was lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from ppengine.core.output_state import Output
from ppengine.protocol.offline import Follow, News, Piece, Singles
from ppengine.protocol.prompt_scores import PromptLogprob

_NONE = -2
"""Cursor of a session that has no answer yet; no question has it."""
_ENDED = -1
"""In place of the count of a sample whose end was sent."""


@dataclass(slots=True)
class _Follower:
    """Progress of one session: the cursor of the newest answer, and the tokens sent by request and sample."""

    cursor: int = _NONE
    nonce: int = 0
    """Number of the newest question."""
    due: dict[str, Output] = field(default_factory=dict)
    """Outputs with more than was sent, by request."""
    ended: dict[str, Output] = field(default_factory=dict)
    """Those of them that have ended."""
    sent: dict[str, list[int]] = field(default_factory=dict)
    scored: deque[tuple[int, Output]] = field(default_factory=deque)
    """Outputs whose log-probabilities of the prompt were sent, with the cursor of that answer."""


class Followers:
    """Makes the answers to `Follow`. It keeps only counts, of requests that have not ended."""

    def __init__(self, drop_scores: Callable[[Output], None]) -> None:
        """`drop_scores` is called once a reader has the log-probabilities of a prompt."""
        self._sessions: dict[str, _Follower] = {}
        self._drop_scores = drop_scores

    def begin(self, question: Follow) -> None:
        """Take a question; one that goes on has the cursor of the newest answer, which may be on its way."""
        follower = self._sessions.setdefault(question.session, _Follower())
        while follower.scored and follower.scored[0][0] <= question.since:
            self._drop_scores(follower.scored.popleft()[1])
        if question.nonce == follower.nonce:
            question.since = follower.cursor
        follower.nonce = question.nonce

    def touch(self, output: Output) -> None:
        """Note that an output has changed."""
        follower = self._sessions.get(output.session)
        if follower is not None:
            follower.due[output.request] = output

    def end(self, output: Output) -> None:
        """Note that an output has ended."""
        follower = self._sessions.get(output.session)
        if follower is not None:
            follower.due[output.request] = follower.ended[output.request] = output

    def drop(self, output: Output) -> None:
        """Forget an output."""
        follower = self._sessions.get(output.session)
        if follower is not None:
            for known in (follower.due, follower.ended, follower.sent):
                known.pop(output.request, None)

    def forget(self, session: str) -> None:
        """Forget a session without outputs; its next question is like one after a lost answer."""
        self._sessions.pop(session, None)

    def due(self, question: Follow, members: Iterable[Output], *, every: bool) -> list[Output]:
        """Return the outputs to answer with; `members` are those of the session.

        `every`: also those that have not ended, if the question waits for ends alone.
        """
        follower = self._sessions.setdefault(question.session, _Follower(nonce=question.nonce))
        if question.since != follower.cursor:
            # It is the first, or an answer was lost on its way, or this core follows another one.
            more = [output for output in members if output.changed > max(question.since, 0)]
            follower.due.update((output.request, output) for output in more)
            follower.ended.update((output.request, output) for output in more if output.finished)
        return list((follower.due if every or not question.finished_only else follower.ended).values())

    def ended(self, session: str) -> Iterable[Output]:
        """Return the due outputs of a session that have ended."""
        return self._sessions[session].ended.values()

    def news(self, question: Follow, outputs: Iterable[Output], cursor: int, error: str) -> News:
        """Return what the due `outputs` have beyond the newest answer; `cursor` is the present number of changes."""
        follower = self._sessions[question.session]
        if question.since != follower.cursor:
            follower.sent.clear()
            follower.scored.clear()
        follower.cursor = cursor
        singles, pieces = Singles(), list[Piece]()
        for output in outputs:
            if _is_single(follower, output, singles):
                del follower.due[output.request]
                continue
            more = list(_pieces(follower, output, question.timings))
            if output.prompt_logprobs and any(piece.prompt_logprobs for piece in more):
                follower.scored.append((cursor, output))
            pieces += more
            del follower.due[output.request]
            follower.ended.pop(output.request, None)
        return News(nonce=question.nonce, cursor=cursor, singles=singles, pieces=pieces, error=error)


def _is_single(follower: _Follower, output: Output, singles: Singles) -> bool:
    """Return whether there is one token more of an output and nothing else, which is then added to `singles`."""
    samples, counts = output.samples, follower.sent.get(output.request)
    if counts is None or len(samples) > 1 or not output.session:
        return False
    sample, known = samples[0], counts[0]
    # The first token may come with log-probabilities of the prompt.
    if known <= 0 or sample.finish_reason is not None or sample.logprobs or len(sample.tokens) != known + 1:
        return False
    singles.requests.append(output.request)
    singles.offsets.append(known)
    singles.token_ids.append(sample.tokens[known])
    counts[0] = known + 1
    return True


def _pieces(follower: _Follower, output: Output, timings: bool) -> Iterator[Piece]:
    counts = follower.sent.setdefault(output.request, [0] * len(output.samples))
    for index, sample in enumerate(output.samples):
        known, ended = counts[index], sample.finish_reason is not None
        if known != _ENDED and (ended or len(sample.tokens) > known):
            prompt = output.prompt_logprobs if not index and not known else []
            yield _piece(output, index, known, prompt, timings)
            counts[index] = _ENDED if ended else len(sample.tokens)
    if output.finished:
        del follower.sent[output.request]


def _piece(output: Output, index: int, offset: int, prompt: list[PromptLogprob | None], timings: bool) -> Piece:
    sample = output.samples[index]
    ending = sample.ending
    # A stop text is looked for in tokens alone: each log-probability has as many bytes as a hundred of them.
    logprobs = sample.logprobs[offset:] if output.session else []
    return Piece(
        output.request, index, offset, sample.tokens[offset:].tolist(), logprobs, sample.finish_reason,
        "" if ending is None else ending.info.loss, 0 if ending is None else ending.detail.cached_tokens,
        prompt, ending.timings if timings and ending is not None else None, 0 if output.session else output.number,
    )  # fmt: skip
