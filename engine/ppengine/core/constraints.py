"""Constrained outputs: their grammars are compiled before admission, and each token waits for its mask.

One process compiles grammars for the first time, and the others have those that were compiled there. So a grammar that
does not end takes no masks from other requests.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from ppengine.core.grammar_asks import Ask, Masked, Taken
from ppengine.core.grammar_process import WAITING_MOST, GrammarProcess
from ppengine.core.live_requests import LiveRequests
from ppengine.core.mask_processes import MaskProcesses
from ppengine.core.scheduler import Retirement, Scheduler
from ppengine.core.scheduler.request import FORCED_MOST, Request
from ppengine.core.scheduler.request_queues import RequestQueues
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.structured_outputs import Grammar
from ppengine.protocol.token_mask import TokenMask

LATE_S = 0.1
"""Seconds after which a step no longer waits for a mask: several times what most take."""
FREE_LATE_S = 0.03
"""The same while there are requests without masks, which wait as well.

A heavy grammar with 128,000 tokens takes 4 to 30 ms a mask, and the other requests would have its pace.
"""
SLOW_S = 10.0
"""Seconds for which outputs that begin are not scheduled ahead, behind a mask of their grammar that came too late."""
WATCH_S = 0.02
"""Seconds between two looks at the processes, which ask the system: turns come hundreds of times a second."""
GATHER_S = 0.002
"""Seconds for which answers of other processes are awaited, so that a step gets its masks in one turn."""
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


@dataclass(slots=True)
class _Output:
    """A live request in the process."""

    ask: Ask
    """Its question, which is asked again for each token."""
    jumps: bool
    """Whether tokens that the grammar forces need no logits of their own."""
    ahead: bool
    """Whether it is scheduled ahead of its masks, once the process has its matcher: a compile would hold up a step."""


@dataclass(eq=False)
class Constraints:
    """Owns the matchers' numbers and the first masks; the masks of outputs are in their requests."""

    checks: GrammarProcess
    """Compiles grammars before admission."""
    masks: MaskProcesses
    _requests: LiveRequests
    _eos: frozenset[int]
    _clock: Callable[[], float]
    _first: OrderedDict[Grammar, TokenMask] = field(init=False, default_factory=OrderedDict)
    """First masks of grammars that were compiled, the newest last."""
    _equal: dict[TokenMask, TokenMask] = field(init=False, default_factory=dict)
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
    """Tokens that grammars have forced since the last call of `deliver`."""
    _count: int = field(init=False, default=0)
    _scheduler: Scheduler | None = field(init=False, default=None)
    """The one whose requests have questions; the core has one as long as it lives."""
    _gather_until: float | None = field(init=False, default=None)
    """Time until which taken masks wait for others; None: none does."""
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
                self.checks.ask([Ask(0, grammar, [], [], partial(self._took, grammar))])
        return False

    def advance(self, scheduler: Scheduler | None) -> None:
        """Ask for the masks that live requests lack, forget those that have ended, and watch the processes."""
        self._gather_until = None
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
        self._scheduler = scheduler
        self._look(scheduler.queues, scheduler)
        self.masks.give()

    def take(self, name: bytes, message: object) -> bool:
        """Take a message of one of the processes; return whether it calls for a turn now."""
        self.checks.take(name, message)
        if taken := self.masks.take(name, message):
            self._hand_out(taken)
        oldest = next(iter(self._asked.values()), None)
        scheduler = self._scheduler
        if not taken or oldest is None or scheduler is None or scheduler.masks.any_complete:
            return True
        # Other processes are about to answer for the same step, each in a message of its own.
        self._gather_until = oldest + GATHER_S
        return self._clock() >= self._gather_until

    def deliver(self) -> None:
        """Hand out the tokens that grammars have forced since the last call, before clients may drop their outputs."""
        if self._forced.tokens:
            forced, self._forced = self._forced, Retirement(0)
            self._requests.forced(forced)

    def take_malformed(self, name: bytes, fault: str) -> None:
        """End the process that has sent a message which cannot be decoded."""
        self.checks.take_malformed(name, fault)
        self.masks.take_malformed(name, fault)

    @property
    def next_deadline(self) -> float | None:
        """Time of the clock at which a turn is due for the open questions; None if there is none."""
        oldest = next(iter(self._asked.values()), None)
        if oldest is None:
            return None
        late = oldest + FREE_LATE_S
        if self._clock() >= late:  # All requests need masks.
            late = oldest + LATE_S
        return min(late, self._gather_until or math.inf)

    def close(self) -> None:
        """End the processes."""
        self.checks.close()
        self.masks.close()

    def _look(self, queues: RequestQueues, scheduler: Scheduler) -> None:
        """Ask and forget."""
        if queues.unconstrained:
            ended, queues.unconstrained = queues.unconstrained, []
            gone = [self._outputs.pop(request) for request in ended if request in self._outputs]
            self.masks.forget([output.ask.matcher for output in gone])
            for request in ended:
                self._asked.pop(request, None)
        if queues.unmasked:
            lacking, queues.unmasked = queues.unmasked, {}
            now, asks = self._clock(), []
            for request in lacking:
                if (ask := self._question(scheduler, request)) is None:
                    continue
                asks.append(ask)
                if request.ahead:
                    self._asked[request] = now
            self.masks.ask(asks)

    def _give_up(self, scheduler: Scheduler) -> None:
        """Let steps go on without masks that take long: free rows wait for them, too."""
        now = self._clock()
        oldest = next(iter(self._asked.values()), now)
        if oldest > now - FREE_LATE_S:
            return
        others = any(not request.constrained for request in scheduler.queues.requests.values())
        due = now - (FREE_LATE_S if others else LATE_S)
        while (request := next(iter(self._asked), None)) is not None and self._asked[request] <= due:
            del self._asked[request]
            scheduler.masks.give_up(request)
            output = self._outputs[request]
            output.ahead = False
            self._slow[output.ask.grammar] = now
            if len(self._slow) > KEPT_MOST:
                self._slow.popitem(last=False)

    def _question(self, scheduler: Scheduler, request: Request) -> Ask | None:
        """Return the question for the next mask of a request; None if that is known."""
        output = self._outputs.get(request) or self._open(scheduler, request)
        ask, sampling, outputs = output.ask, request.sampling, len(request.output_ids)
        held = self._held(request) if outputs < sampling.min_tokens or sampling.ignore_eos else []
        if not outputs and not held and (first := self._first.get(ask.grammar)) is not None:
            scheduler.masks.take_all([(request, first, ())], self._forced)
            return None
        ask.held, ask.forced_most = held, 0
        # The first token ends the prompt; below `min_tokens`, each mask depends on the number of tokens.
        if output.jumps and outputs and outputs >= sampling.min_tokens:
            ask.forced_most = min(FORCED_MOST, request.max_tokens - outputs)
        return ask

    def _hand_out(self, taken: list[Taken]) -> None:
        """Give masks to their requests."""
        scheduler, asked = self._scheduler, self._asked
        assert scheduler is not None, "its questions come from one"
        for request, _, _ in taken:
            asked.pop(request, None)
            if not request.ahead:
                request.ahead = self._outputs[request].ahead
        scheduler.masks.take_all(taken, self._forced)

    def _fail(self, scheduler: Scheduler, request: Request, masked: Masked) -> None:
        """Take the reason why a request gets no mask, or none now."""
        self._asked.pop(request, None)
        if request.finished:
            return
        if masked.later:
            scheduler.queues.unmasked[request] = None
        else:
            request.loss = f"structured output: {masked.error}"
            scheduler.retirement.finish(request.id, "lost")
            self._requests.ended(request)

    def _open(self, scheduler: Scheduler, request: Request) -> _Output:
        """Return the output of a request that is new here."""
        grammar = _grammar(request.sampling)
        assert grammar is not None
        self._count += 1
        fail = partial(self._fail, scheduler, request)
        ask = Ask(self._count, grammar, request.output_ids, [], fail, request=request)
        slow = self._clock() - self._slow.get(grammar, -SLOW_S) < SLOW_S
        # The stage that samples counts tokens for adjustments, those that are dropped too.
        output = _Output(ask, _jumps(request.sampling), ahead=not request.sampling.adjusts and not slow)
        self._outputs[request] = output
        # It is compiled while the prompt is computed.
        request.ahead = self.masks.open(ask.matcher, grammar) and output.ahead
        return output

    def _held(self, request: Request) -> list[int]:
        """Return the stop tokens that must not be chosen as long as others may be."""
        sampling = request.sampling
        if len(request.output_ids) < sampling.min_tokens:
            return sorted(request.stops)
        return sorted(self._eos) if sampling.ignore_eos else []

    def _took(self, grammar: Grammar, masked: Masked) -> None:
        """Keep a first mask, and let those go on that wait for it."""
        if masked.mask is not None:
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
