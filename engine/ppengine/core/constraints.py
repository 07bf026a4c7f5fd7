"""Constrained outputs: their grammars are compiled before admission, and each token waits for its mask.

One process compiles grammars for the first time, and the others have those that were compiled there. So a grammar that
does not end takes no masks from other requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from ppengine.core.grammar_process import WAITING_MOST, Ask, GrammarProcess, Masked
from ppengine.core.live_requests import LiveRequests
from ppengine.core.mask_processes import MaskProcesses
from ppengine.core.scheduler import Retirement, Scheduler
from ppengine.core.scheduler.request import FORCED_MOST, Request
from ppengine.core.scheduler.request_queues import RequestQueues
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.structured_outputs import Grammar

LATE_S = 0.1
"""Seconds after which a step no longer waits for a mask: several times what most take."""
SLOW_S = 10.0
"""Seconds for which outputs that begin are not scheduled ahead, behind a mask of their grammar that came too late."""
WATCH_S = 0.02
"""Seconds between two looks at the processes, which ask the system: turns come hundreds of times a second."""
KEPT_MOST = 1000
"""Grammars whose first mask, or whose error, is kept."""
FIELD = "structured_outputs"
"""The field that errors of a grammar name."""
Then = Callable[[str, bool], None]
"""Takes an error, empty without one, and whether a later try may succeed."""


class TooManyGrammarsError(Exception):
    """As many grammars wait to be compiled as may; one line."""


class BadGrammarError(ValueError):
    """A grammar that was refused before; one line."""


class _Output(NamedTuple):
    """A live request in the process."""

    matcher: int
    grammar: Grammar
    jumps: bool
    """Whether tokens that the grammar forces need no logits of their own."""


@dataclass(eq=False)
class Constraints:
    """Owns the matchers' numbers and the first masks; the masks of outputs are in their requests."""

    checks: GrammarProcess
    """Compiles grammars before admission."""
    masks: MaskProcesses
    _requests: LiveRequests
    _eos: frozenset[int]
    _clock: Callable[[], float]
    _first: OrderedDict[Grammar, bytes] = field(init=False, default_factory=OrderedDict)
    """First masks of grammars that were compiled, the newest last."""
    _equal: dict[bytes, bytes] = field(init=False, default_factory=dict)
    """One object for equal first masks: most schemas begin alike, and a step has each object once."""
    _bad: OrderedDict[Grammar, str] = field(init=False, default_factory=OrderedDict)
    """Reasons of grammars that were refused: one that takes long is compiled once."""
    _compiling: dict[Grammar, list[Callable[[Masked], None]]] = field(init=False, default_factory=dict)
    _slow: OrderedDict[Grammar, float] = field(init=False, default_factory=OrderedDict)
    """Times at which a mask of a grammar last came too late."""
    _asked: dict[Request, float] = field(init=False, default_factory=dict)
    """Times of open questions for which a step may still wait, the oldest first."""
    _outputs: dict[Request, _Output] = field(init=False, default_factory=dict)
    _forced: Retirement = field(init=False, default_factory=partial(Retirement, 0))
    """Tokens that the message under way forces."""
    _count: int = field(init=False, default=0)
    _watch_at: float = field(init=False, default=0.0)
    """Time of the next look at the processes."""

    def compile(self, samplings: Iterable[SamplingParams], then: Then) -> bool:
        """Return True if all grammars are compiled; otherwise have them compiled, and call `then` in a later turn.

        Raises TooManyGrammarsError, and BadGrammarError for one that was refused before.
        """
        new = {grammar for grammar in map(_grammar, samplings) if grammar is not None and grammar not in self._first}
        if not new:
            return True
        if bad := next((self._bad[grammar] for grammar in new if grammar in self._bad), ""):
            raise BadGrammarError(f"{FIELD}: {bad}")
        if self.checks.full:
            raise TooManyGrammarsError(f"{WAITING_MOST} grammars wait to be compiled; submit it again later")
        self.masks.prepare()
        left, first = set(new), Masked()

        def end(grammar: Grammar, masked: Masked) -> None:
            nonlocal first
            left.discard(grammar)
            first = first if first.error else masked
            if not left:
                then(first.error, first.later)

        for grammar in new:
            waiting = self._compiling.setdefault(grammar, [])
            waiting.append(partial(end, grammar))
            if len(waiting) == 1:
                self.checks.ask(Ask(0, grammar, (), (), partial(self._took, grammar)))
        return False

    def advance(self, scheduler: Scheduler | None) -> None:
        """Ask for the masks that live requests lack, forget those that have ended, and watch the processes."""
        if scheduler is not None:
            self.ask(scheduler)
            self._give_up(scheduler)
        else:
            self._asked.clear()
        now = self._clock()
        if now >= self._watch_at:
            self._watch_at = now + WATCH_S
            self.checks.advance()
            self.masks.advance()
        else:
            self.checks.give()
            self.masks.give()

    def ask(self, scheduler: Scheduler) -> None:
        """Ask for the masks that live requests lack, and forget those that have ended."""
        self._look(scheduler.queues, scheduler)
        self.masks.give()

    def take(self, name: bytes, message: object) -> None:
        """Take a message of one of the processes."""
        self.checks.take(name, message)
        self.masks.take(name, message)
        if self._forced.tokens:
            forced, self._forced = self._forced, Retirement(0)
            self._requests.forced(forced)

    def take_malformed(self, name: bytes, fault: str) -> None:
        """End the process that has sent a message which cannot be decoded."""
        self.checks.take_malformed(name, fault)
        self.masks.take_malformed(name, fault)

    @property
    def next_deadline(self) -> float | None:
        """Time of the clock at which a step gives up a mask; None if none is open."""
        oldest = next(iter(self._asked.values()), None)
        return None if oldest is None else oldest + LATE_S

    def close(self) -> None:
        """End the processes."""
        self.checks.close()
        self.masks.close()

    def _look(self, queues: RequestQueues, scheduler: Scheduler) -> None:
        """Ask and forget."""
        if queues.unconstrained:
            ended, queues.unconstrained = queues.unconstrained, []
            gone = [self._outputs.pop(request) for request in ended if request in self._outputs]
            self.masks.forget([output.matcher for output in gone])
            for request in ended:
                self._asked.pop(request, None)
        if queues.unmasked:
            lacking, queues.unmasked = queues.unmasked, {}
            for request in lacking:
                self._want(scheduler, request)

    def _give_up(self, scheduler: Scheduler) -> None:
        """Let steps go on without masks that take long: free rows wait for them, too."""
        now = self._clock()
        due = now - LATE_S
        while (request := next(iter(self._asked), None)) is not None and self._asked[request] <= due:
            del self._asked[request]
            scheduler.masks.give_up(request)
            self._slow[self._outputs[request].grammar] = now
            if len(self._slow) > KEPT_MOST:
                self._slow.popitem(last=False)

    def _want(self, scheduler: Scheduler, request: Request) -> None:
        output, held = self._output(request), self._held(request)
        if not request.output_ids and not held and (first := self._first.get(output.grammar)) is not None:
            scheduler.masks.take(request, first, (), self._forced)
            # It is compiled while the prompt is computed.
            self.masks.expect(output.matcher, output.grammar)
            return
        outputs, most = len(request.output_ids), 0
        # The first token ends the prompt; below `min_tokens`, each mask depends on the number of tokens.
        if output.jumps and outputs and outputs >= request.sampling.min_tokens:
            most = min(FORCED_MOST, request.max_tokens - outputs)
        self._asked[request] = self._clock()
        end = partial(self._end, scheduler, request)
        self.masks.ask(Ask(output.matcher, output.grammar, request.output_ids, held, end, most))

    def _end(self, scheduler: Scheduler, request: Request, masked: Masked) -> None:
        """Take the answer to the question of a request."""
        self._asked.pop(request, None)
        if request.finished:
            return
        if masked.later:
            scheduler.queues.unmasked[request] = None
        elif masked.error:
            request.loss = f"structured output: {masked.error}"
            scheduler.retirement.finish(request.id, "lost")
            self._requests.ended(request)
        else:
            scheduler.masks.take(request, masked.mask, masked.forced, self._forced)

    def _output(self, request: Request) -> _Output:
        output = self._outputs.get(request)
        if output is None:
            grammar = _grammar(request.sampling)
            assert grammar is not None
            self._count += 1
            output = self._outputs[request] = _Output(self._count, grammar, _jumps(request.sampling))
            slow = self._clock() - self._slow.get(grammar, -SLOW_S) < SLOW_S
            # The stage that samples counts tokens for adjustments, those that are dropped too.
            request.ahead = not request.sampling.adjusts and not slow
        return output

    def _held(self, request: Request) -> Sequence[int]:
        """Return the stop tokens that must not be chosen as long as others may be."""
        sampling = request.sampling
        if len(request.output_ids) < sampling.min_tokens:
            return sorted(request.stops)
        return sorted(self._eos) if sampling.ignore_eos else ()

    def _took(self, grammar: Grammar, masked: Masked) -> None:
        """Keep a first mask, and let those go on that wait for it."""
        if masked.mask:
            self._first[grammar] = self._equal.setdefault(masked.mask, masked.mask)
            if len(self._first) > KEPT_MOST:
                self._first.popitem(last=False)
            if len(self._equal) > KEPT_MOST:
                self._equal.clear()
        elif not masked.later:
            self._bad[grammar] = masked.error
            if len(self._bad) > KEPT_MOST:
                self._bad.popitem(last=False)
        for end in self._compiling.pop(grammar):
            end(masked)


def _jumps(sampling: SamplingParams) -> bool:
    """Return whether forced tokens may follow an output at once, without a forward for each.

    Not if the logits of each token are wanted, if the stage that samples counts tokens, or if a text ends the output.
    """
    return sampling.logprobs is None and not sampling.adjusts and not sampling.stop


def _grammar(sampling: SamplingParams) -> Grammar | None:
    wanted = sampling.structured_outputs
    return None if wanted is None else wanted.compiled_form
