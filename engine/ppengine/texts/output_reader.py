"""Answers consoles that read outputs: the core has the tokens, and their text is made here."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ppengine.protocol.control import Failed, Fetch, Fetched
from ppengine.protocol.text_messages import OutputPart, ReadOutput
from ppengine.texts.core_questions import CoreQuestions
from ppengine.texts.request_text import SampleText
from ppengine.texts.text_store import TextStore

PACE_S = 1 / 30
"""Least seconds between two answers about one output: an eye sees no more, and each passes through four processes."""
WAITING_MOST = 2000
"""Questions that wait; later ones are answered at once. The core lets five times as many wait, and is asked again
each second."""
OPEN_MOST = 10_000
"""Questions that have no answer, as a gateway has; later ones are refused."""
SLICE_MS = 1000
"""Most milliseconds of one question to the core: a console may wait for a minute, and a core may end."""


@dataclass(slots=True)
class _Reading:
    """A question of a console."""

    question: Fetch
    deadline: float
    """Time until which it waits for news."""


class OutputReader:
    """`answer` takes the answers. `stopped` is called with a request and sample that a stop text has ended."""

    def __init__(
        self, store: TextStore, core: CoreQuestions, answer: Callable[[Fetched | Failed], None],
        stopped: Callable[[str, int], None], clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._store, self._core, self._answer, self._stopped, self._clock = store, core, answer, stopped, clock
        self._paced: deque[tuple[float, _Reading]] = deque()
        """Questions with the times at which the core is asked, in order."""

    def fetch(self, question: Fetch) -> None:
        """Answer a question now, or when there is news."""
        if min(question.offset, question.text_offset) < 0:
            text = f"offset {question.offset}, text_offset {question.text_offset}; both must be 0 or more"
            self._answer(Failed(nonce=question.nonce, code="INVALID", text=text))
            return
        if (count := len(self._paced) + self._core.open_count) >= OPEN_MOST:
            text = f"{count} questions have no answer of the core; ask again later"
            self._answer(Failed(nonce=question.nonce, code="BUSY", text=text))
            return
        now = self._clock()
        reading = _Reading(question, now if count >= WAITING_MOST else now + question.wait_ms / 1e3)
        due = self._due(question)
        if now < due < reading.deadline:
            self._paced.append((due, reading))
        else:
            self._ask(reading)

    def turn(self) -> None:
        """Send the questions that are due. The loop calls it each turn."""
        while self._paced and self._paced[0][0] <= self._clock():
            self._ask(self._paced.popleft()[1])

    @property
    def next_due(self) -> float | None:
        """Time of the clock of the next turn; None: none is due."""
        return self._paced[0][0] if self._paced else None

    def _due(self, question: Fetch) -> float:
        """Return the time from which a question may be answered that waits for tokens of an output that grows."""
        known = self._store.get(question.request)
        sample = None if known is None else known.sample(question.sample)
        if sample is None:
            return -math.inf
        grows = sample.reason is None and not sample.stopped and not _lacks(question, sample)
        return sample.answered_at + PACE_S if grows else -math.inf

    def _ask(self, reading: _Reading, *, again: bool = False) -> None:
        """Ask the core for the tokens. `again`: from the first on, as texts of others have taken the place."""
        question = reading.question
        text = None if again else self._store.get(question.request)
        sample = None if text is None else text.sample(question.sample)
        left_ms = max(0, int(1e3 * (reading.deadline - self._clock())))
        # The core waits for further tokens: it must not if the console lacks some that are here.
        wait_ms = 0 if sample is not None and _lacks(question, sample) else min(left_ms, SLICE_MS)
        read = ReadOutput(
            nonce=self._core.number(), request=question.request, sample=question.sample,
            offset=0 if sample is None else sample.count, since=question.offset,
            number=-1 if text is None or sample is None else text.number, wait_ms=wait_ms,
        )  # fmt: skip
        until = reading.deadline + self._core.answer_s
        self._core.ask(read, lambda answer: self._take(reading, answer), until)

    def _take(self, reading: _Reading, part: object) -> None:
        question = reading.question
        if isinstance(part, Failed):
            self._answer(Failed(nonce=question.nonce, code=part.code, text=part.text))
            return
        assert isinstance(part, OutputPart), "an answer is known by its number"
        text = self._store.take(part)
        if text is None:
            self._ask(reading, again=True)
            return
        sample = text.samples[part.sample]
        if sample.stopped and sample.reason is None:
            self._stopped(part.request, part.sample)
        ended = sample.reason is not None
        if not ended and not _lacks(question, sample) and self._clock() < reading.deadline:
            self._ask(reading)
            return
        sample.answered_at = self._clock()
        tokens = part.token_ids[question.offset - part.offset : max(0, sample.kept - part.offset)].tolist()
        if 0 < len(part.logprobs) < len(tokens):  # The core answers with some of them.
            tokens, ended = tokens[: len(part.logprobs)], False
        self._answer(
            Fetched(
                nonce=question.nonce, request=part.request, sample=part.sample, offset=question.offset,
                token_ids=tokens, text_offset=question.text_offset,
                text=sample.text[question.text_offset : sample.shown], finished=ended,
                finish_reason=sample.finish_reason if ended else None, logprobs=part.logprobs[: len(tokens)],
                prompt_tokens=part.prompt_tokens, samples=len(text.samples), loss=part.loss,
            )
        )  # fmt: skip


def _lacks(question: Fetch, sample: SampleText) -> bool:
    """Return whether a sample has tokens or text that a console has not got."""
    return question.offset < sample.kept or question.text_offset < sample.shown
