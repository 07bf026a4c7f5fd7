"""Finds stop texts in the outputs of consoles' requests, whether or not anything reads them.

It follows the session of the core that has these requests. All that it knows follows from the core's answers, so a
kill of this process or of the core loses no stop text.
"""

from __future__ import annotations

from collections.abc import Callable

from ppengine.protocol.control import Failed
from ppengine.protocol.offline import EndSamples, Follow, News, Piece
from ppengine.protocol.text_messages import OutputPart, ReadOutput
from ppengine.texts.core_questions import AGAIN_S, CoreQuestions
from ppengine.texts.text_store import TextStore

WAIT_MS = 1000
"""Milliseconds after which the core answers `Follow` without news."""
ANSWERS = 64
"""News that may come before the core waits for a question: its queue for a process that is stopped is bounded."""
PAUSE_S = 0.5
"""Seconds until the next question to a core that lacks a stage."""

Key = tuple[str, int]
"""A request and the number of a sample."""


class StopFinder:
    """Follows, and ends the samples in which it finds a stop text."""

    def __init__(self, store: TextStore, core: CoreQuestions, clock: Callable[[], float]) -> None:
        self._store, self._core, self._clock = store, core, clock
        self._cursor = -1
        self._following = 0
        """Number of the open question, 0 without one."""
        self._answers_left = 0
        self._due = 0.0
        """Time from which a question may be asked."""
        self._heard_at = 0.0
        self._known: set[Key] = set()
        """Samples whose text has all tokens of the core up to the newest piece."""
        self._reading: set[Key] = set()
        """Samples whose tokens so far were asked for."""

    def turn(self) -> None:
        """Ask for news, unless a question is open. The loop calls it each turn."""
        now = self._clock()
        if self._following and now - self._heard_at > AGAIN_S:
            # The core may have been restarted, and open questions are repeated without this.
            self._following = 0
            self._known.clear()
            self._store.unfollow()
        if not self._following and now >= self._due:
            self._following, self._heard_at = self._core.number(), now
            self._ask()

    def take(self, news: News) -> None:
        """Take tokens of samples that go on, or that have ended."""
        for piece in news.all_pieces():
            self._take(piece)
        if news.nonce != self._following:
            return
        self._cursor, self._heard_at = news.cursor, self._clock()
        self._answers_left -= 1
        if news.error:
            self._following, self._due = 0, self._clock() + PAUSE_S
        elif not self._answers_left:
            self._following = 0
            self.turn()
        elif self._answers_left <= ANSWERS // 2:
            self._ask()

    def end(self, request: str, sample: int) -> None:
        """End a sample whose text has met a stop text."""
        text = self._store.get(request)
        assert text is not None, "its tokens were just taken"
        self._core.send(EndSamples(session="", samples=[(request, sample)], numbers=[text.number]))

    def _ask(self) -> None:
        self._answers_left = ANSWERS
        self._core.send(Follow(nonce=self._following, session="", since=self._cursor, wait_ms=WAIT_MS, answers=ANSWERS))

    def _take(self, piece: Piece) -> None:
        key = piece.request, piece.sample
        if key in self._reading:
            return  # The answer has these tokens, too.
        text = self._store.get(piece.request)
        if text is not None and text.number != piece.number:
            text = None  # It is of another request, which had the name before.
        sample = None if text is None or key not in self._known else text.sample(piece.sample)
        if text is not None and sample is not None and sample.take(piece.offset, piece.token_ids, piece.finish_reason):
            self._store.weigh(text)
            self._look(*key)
            return
        self._known.discard(key)
        if piece.finish_reason is None:  # The text of one that has ended is made when it is read.
            self._read(key)

    def _read(self, key: Key, *, whole: bool = False) -> None:
        """Ask the core for the tokens of a sample that are not here, or for the `whole`."""
        request, index = key
        text = None if whole else self._store.get(request)
        sample = None if text is None else text.sample(index)
        offset, number = (0, -1) if text is None or sample is None else (sample.count, text.number)
        self._reading.add(key)
        question = ReadOutput(
            nonce=self._core.number(), request=request, sample=index, offset=offset, since=offset, number=number,
            console=False,
        )  # fmt: skip
        self._core.ask(question, lambda answer: self._took(key, answer), float("inf"))

    def _took(self, key: Key, answer: object) -> None:
        self._reading.discard(key)
        if isinstance(answer, Failed):
            return  # It is gone.
        assert isinstance(answer, OutputPart), "an answer is known by its number"
        if self._store.take(answer) is None:
            self._read(key, whole=True)
            return
        self._known.add(key)
        self._look(*key)

    def _look(self, request: str, number: int) -> None:
        text = self._store.get(request)
        assert text is not None, "its tokens were just taken"
        sample = text.samples[number]
        if sample.reason is not None:
            self._known.discard((request, number))
        elif sample.stopped:
            self.end(request, number)
        # The samples of a request are dropped together, once none of them is followed.
        text.followed = any((request, index) in self._known for index in range(len(text.samples)))
