"""The grammar process as the core sees it: its start, questions, deadlines, and what follows its end.

The core never waits for it. It is started at the first question and replaced when it ends or does not answer. A new one
gets every open question again, with all tokens of the output. Questions that were open at an end are suspects: the next
process gets them one at a time, so that a grammar which ends two processes is known, and no other is refused.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from ppengine.common.helper_child import HelperChild
from ppengine.common.one_line import one_line
from ppengine.core.grammar_asks import Ask, Masked, Taken, fits
from ppengine.protocol.frames import encode
from ppengine.protocol.grammar_messages import (
    COMPILERS,
    Answers,
    Forget,
    GrammarsLeave,
    GrammarsReady,
    Question,
    Questions,
    is_large,
)
from ppengine.protocol.reports import Unanswered
from ppengine.protocol.structured_outputs import Grammar

log = logging.getLogger("ppengine.core")

MODULE = "ppengine.grammar"
ANSWER_S = 10.0
"""Seconds for a mask, which takes a millisecond, and between messages of a process that compiles: it sends one each
second, and has a time limit of its own for each compile."""
START_S = 30.0
"""Seconds for the start of the process, which reads the tokenizer."""
AGAIN_S = 1.0
"""Seconds between two starts, if the first has failed."""
OWED_S = 1.0
"""Seconds for an answer from which reports have it."""
STARTS_MOST = 3
"""Starts that fail in a row before grammars that wait are refused."""
COMPILES_A_THREAD = 16
"""Grammars that the process may have to compile, for each of its threads, and as many large ones: others wait here.

A compile takes 1 ms, and up to 1 s for the largest schemas. With two a thread, threads waited for the core between
their grammars.
"""
EXPECTED_MOST = 128
"""Grammars that are compiled before a question: the process keeps 256 without an output."""
WAITING_MOST = 1024
"""Grammars that wait to be compiled; later ones are refused."""
ENDS_MOST = 2
"""Processes that end with one question alone, until the question is to blame."""
_NONE: Sequence[int] = ()


@dataclass(eq=False)
class GrammarProcess:
    """Answers questions in the child, each once."""

    _run_dir: Path
    _vocabulary: int
    """Number of the model's logits, a bit each in a mask."""
    _send: Callable[[bytes, bytes], None]
    """Sends a message to the routing id of a process."""
    _clock: Callable[[], float]
    _event: Callable[[str, str], None]
    """Reports an event: its kind and text."""
    _task: str
    """Task of the process: `checks`, `masks`, or `masks 1` and so on. Routing ids begin with it."""
    _threads: int = 1
    """Threads of the process that compute masks, and at least `COMPILERS` that compile."""
    child: HelperChild = field(init=False)
    _wanted: bool = field(init=False, default=False)
    """Whether it runs without a question, too."""
    _start_by: float = field(init=False, default=0.0)
    _start_at: float = field(init=False, default=0.0)
    """Time before which no process is started."""
    _heard_at: float = field(init=False, default=0.0)
    """Time of the newest message of the child."""
    _failed_starts: int = field(init=False, default=0)
    _waiting: deque[Ask] = field(init=False, default_factory=deque)
    _given: dict[int, Ask] = field(init=False, default_factory=dict)
    """Open questions of the child by number, the oldest first."""
    _matchers: dict[int, Ask] = field(init=False, default_factory=dict)
    """Questions of the outputs whose matchers the child has."""
    _gone: set[int] = field(init=False, default_factory=set)
    """Matchers of outputs that have ended, with an open question."""
    _compiled: OrderedDict[Grammar, None] = field(init=False, default_factory=OrderedDict)
    """Grammars that the child has probably compiled."""
    _expected: set[Grammar] = field(init=False, default_factory=set)
    """Grammars that are compiled, or wait for it, before a question about them."""
    _count: int = field(init=False, default=0)
    """Number of the newest question."""

    def __post_init__(self) -> None:
        self.child = HelperChild(self._run_dir / "grammar.log", self._send)

    @property
    def unanswered(self) -> Unanswered | None:
        """How long an output has waited for this child; None: none does, or not for long."""
        if (process := self.child.process) is None:
            return None
        asks: Iterable[Ask] = self._given.values() if self.child.ready else self._waiting
        since = min((ask.given_at for ask in asks if ask.matcher), default=None)
        if since is not None and not self.child.ready:
            since = max(since, self._start_by - START_S)
        for_s = 0.0 if since is None else self._clock() - since
        return Unanswered(pid=process.pid, for_s=for_s) if for_s >= OWED_S else None

    @property
    def full(self) -> bool:
        """Whether no further grammar may wait."""
        return sum(not ask.matcher for ask in self._waiting) >= WAITING_MOST

    def prepare(self) -> None:
        """Let the process start before its first question."""
        self._wanted = True

    def ask(self, asks: list[Ask]) -> None:
        """Queue questions; `give` sends them."""
        if not self.child.ready:
            now = self._clock()
            for ask in asks:
                ask.given_at = now
        self._waiting += asks

    def expect(self, grammar: Grammar) -> None:
        """Have a grammar compiled before the first question about it, unless it probably is."""
        if grammar not in self._compiled and len(self._expected) < EXPECTED_MOST and grammar not in self._expected:
            self._expected.add(grammar)
            self.ask([Ask(0, grammar, [], [], lambda _: self._expected.discard(grammar))])

    def has(self, grammar: Grammar) -> bool:
        """Return whether the child has probably compiled a grammar."""
        return grammar in self._compiled

    def forget(self, matchers: list[int]) -> None:
        """Drop the matchers of outputs that have ended. Their open questions still get an answer, others none."""
        gone = set(matchers)
        dropped = [ask for ask in self._waiting if ask.matcher in gone]
        self._waiting = deque(ask for ask in self._waiting if ask.matcher not in gone)
        for ask in dropped:
            ask.end(Masked(error="its output has ended", later=True))
        # A child that compiles the grammar has no matcher yet, and makes one behind this.
        self._gone |= gone & {ask.matcher for ask in self._given.values()}
        known = [number for number in matchers if self._matchers.pop(number, None) is not None]
        if known and self.child.ready:
            self.child.send(encode(Forget(known)))

    def take(self, name: bytes, message: object) -> list[Taken]:
        """Take a message of the child; those of earlier children are dropped. A bad one ends the child.

        Return the masks of outputs.
        """
        if not self.child.is_sender(name):
            return []
        self._heard_at = self._clock()
        if isinstance(message, GrammarsReady):
            self.child.ready, self._failed_starts = True, 0
        elif isinstance(message, Answers):
            if fits(message, self._given, self._vocabulary):
                return self._end(message)
            self._lose("has sent a bad answer")
        elif isinstance(message, GrammarsLeave):
            self._lose("has a compile that does not end", suspects=False)
        return []

    def take_malformed(self, name: bytes, fault: str) -> None:
        """End the child if it has sent a message that cannot be decoded."""
        if self.child.is_sender(name):
            self._lose(f"has sent a malformed message, {one_line(fault)}")

    def advance(self) -> None:
        """Replace a child that has ended or is past a deadline, and send what waits."""
        self.child.reap()
        process = self.child.process
        if process is not None and process.poll() is not None:
            why = one_line(process.info("grammar").detail or "exit code 0")
            self._lose(f"has ended, {why}")
        elif process is not None and self._late:
            self._lose("did not answer in time")
        if self.child.process is None and (self._waiting or self._wanted) and self._clock() >= self._start_at:
            self._start()
        self.give()

    def give(self) -> None:
        """Send what waits, if the child is ready."""
        if self._waiting and self.child.ready:
            self._give()

    def close(self) -> None:
        """End the child, and all questions without an answer."""
        self._drop()
        left = [*self._given.values(), *self._waiting]
        self._given.clear()
        self._waiting.clear()
        for ask in left:
            ask.end(Masked(error="the engine stops", later=True))

    # --- questions ------------------------------------------------------------------------------------------

    def _give(self) -> None:
        """Send the questions that wait: all of them, but not too many new grammars, and suspects alone."""
        if any(ask.suspect for ask in islice(self._given.values(), 1)):
            return  # It is alone.
        now, waiting, left = self._clock(), self._waiting, deque[Ask]()
        self._waiting = left
        questions: list[Question] = []
        room: list[int] | None = None
        while waiting:
            ask = waiting.popleft()
            if ask.suspect:
                # Suspects are in front. The first goes alone, as soon as nothing else is open.
                if self._given or questions:
                    left.append(ask)
                else:
                    questions.append(self._question(ask, now))
                break
            if ask.known < 0:
                ask.compiles = ask.grammar not in self._compiled
                if ask.compiles:
                    room = room or self._room()
                    large = is_large(ask.grammar)
                    if not room[large]:
                        left.append(ask)
                        continue
                    room[large] -= 1
            questions.append(self._question(ask, now))
        left.extend(waiting)
        if questions:
            self.child.send(encode(Questions(questions)))

    def _room(self) -> list[int]:
        """Return how many more new grammars the child may have, small ones and large ones."""
        large = [is_large(ask.grammar) for ask in self._given.values() if ask.compiles]
        most = COMPILES_A_THREAD * max(COMPILERS, self._threads)
        return [most - large.count(False), most - large.count(True)]

    def _question(self, ask: Ask, now: float) -> Question:
        self._count = number = self._count + 1
        self._given[number] = ask
        ask.given_at = now
        matcher, known, grammar = ask.matcher, ask.known, None
        if known < 0:
            known, grammar = 0, ask.grammar
        if matcher:
            if grammar is not None:
                self._matchers[matcher] = ask
            ask.known = len(ask.tokens)
        return Question(number, matcher, grammar, ask.tokens[known:], ask.held, ask.forced_most)

    def _end(self, message: Answers) -> list[Taken]:
        """End the questions of a message; return the masks of outputs that have not ended."""
        given, forced, masks, gone = self._given, message.forced, message.masks, self._gone
        taken: list[Taken] = []
        for number, place in zip(message.numbers, message.places, strict=True):
            ask = given.pop(number, None)
            if ask is None:
                continue
            if ask.compiles and place >= 0:
                self._note_compiled(ask)
            if ask.suspect:
                ask.suspect, ask.ends = False, 0
            tokens = forced.get(number, _NONE) if forced else _NONE
            ended = ask.matcher in gone
            if ended:
                self._drop_matcher(ask)
            elif tokens:
                ask.known += len(tokens)
            if place < 0:
                ask.end(Masked(error=one_line(message.errors[number])))
            elif ask.request is None:
                ask.end(Masked(masks[place], forced=tuple(tokens)))
            elif not ended:
                taken.append((ask.request, masks[place], tokens))
        return taken

    def _note_compiled(self, ask: Ask) -> None:
        """Note that the child has compiled a grammar."""
        ask.compiles = False
        self._compiled[ask.grammar] = None
        self._compiled.move_to_end(ask.grammar)
        if len(self._compiled) > WAITING_MOST:
            self._compiled.popitem(last=False)

    def _drop_matcher(self, ask: Ask) -> None:
        """Have the child drop the matcher of an output that has ended, behind its last answer."""
        self._gone.discard(ask.matcher)
        self._matchers.pop(ask.matcher, None)
        self.child.send(encode(Forget([ask.matcher])))

    # --- the child ------------------------------------------------------------------------------------------

    @property
    def _late(self) -> bool:
        if not self.child.ready:
            return self._clock() > self._start_by
        due = self._clock() - ANSWER_S
        first = next(iter(self._given.values()), None)
        if first is None or first.given_at >= due:
            return False
        # Questions about new grammars wait behind each other's compiles, for as long as the child works.
        return self._heard_at < due or any(ask.given_at < due and not ask.compiles for ask in self._given.values())

    def _start(self) -> None:
        arguments = ["--engine", str(self._run_dir / "engine.json"), "--threads", str(self._threads)]
        self._start_at = self._clock() + AGAIN_S
        try:
            self.child.start(MODULE, self._task.replace(" ", ""), arguments)
        except OSError as error:  # No process or descriptor is left.
            self._fail_start(str(error))
            return
        self._start_by = self._clock() + START_S

    def _lose(self, what: str, *, suspects: bool = True) -> None:
        """Give up the child, of which `what` is said; its questions wait for the next one.

        `suspects`: one of them may be the reason.
        """
        process = self.child.process
        assert process is not None
        why = f"the grammar process for {self._task} (pid {process.pid}) {what}"
        log.warning("%s", why)
        self._event("grammar.ended", f"{why}; another one gets its questions")
        started = self.child.ready
        gone = [ask for ask in self._given.values() if ask.matcher in self._gone]
        given = [ask for ask in self._given.values() if ask.matcher not in self._gone]
        self._drop()
        self._given.clear()
        for ask in gone:
            # The next child would make a matcher for it, which nothing would drop.
            ask.end(Masked(error="its output has ended", later=True))
        if not started:
            self._fail_start(why)
        if suspects and len(given) == 1 and given[0].suspect:
            given[0].ends += 1
            if given[0].ends >= ENDS_MOST:
                given.pop().end(Masked(error=f"it has ended {ENDS_MOST} processes: {why}"))
        for ask in given if suspects else ():
            ask.suspect = True
        self._waiting.extendleft(reversed(given))

    def _fail_start(self, why: str) -> None:
        self._failed_starts += 1
        if self._failed_starts >= STARTS_MOST:
            refused = [ask for ask in self._waiting if not ask.matcher]
            self._waiting = deque(ask for ask in self._waiting if ask.matcher)
            for ask in refused:
                ask.end(Masked(error=why, later=True))

    def _drop(self) -> None:
        """End the child without waiting for its exit status."""
        for ask in self._matchers.values():
            ask.known = -1
        self._matchers.clear()
        self._gone.clear()
        self._compiled.clear()
        self.child.drop()
