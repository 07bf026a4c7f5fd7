"""Grammars compiled by llguidance, and the matcher of each output."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray

from ppengine.common.one_line import one_line
from ppengine.grammar.first_masks import DEAD_END, error_of, first_masks
from ppengine.grammar.mask_folding import Bytes, fold
from ppengine.protocol.grammar_messages import Answers, Question
from ppengine.protocol.structured_outputs import Grammar
from ppengine.protocol.token_mask import TokenMask

KEPT_MOST, OLD_MOST = 256, 256
"""Compiled grammars that are kept for the next output, and older ones that nothing has dropped yet."""
TEXT_MOST = 16 * 2**20
"""Most characters of all grammars that are kept: one of 120,000 may take 28 MiB, a small one has 0.1."""
DROPPED_MOST = 8
"""Grammars dropped at once. Each takes some 0.1 ms, in which no thread of Python goes on."""
WHITESPACE = r"[ \t\n]{1,24}"
"""White space between the parts of JSON, which may also be absent: a model may otherwise write it for ever."""
_JSON, _LETTERS = r'[^"\\\x00-\x1F\x7F]', "[a-zA-Z ]"
SLICES = [*(_JSON + length for length in ("{1,10}", "{1,15}", "{1,30}", "+")),
          *(_LETTERS + length for length in ("{1,15}", "{1,30}"))]  # fmt: skip
"""Classes of tokens: if a grammar allows all of one, llguidance takes its mask and does not walk these tokens.

A class costs some 0.3 µs of a mask that it does not help. Masks are the same with any list.
"""
FREE_SHARE = 64
"""A choice is free if its mask allows more than one token in 64. Such a mask is often slow."""
FIRST_MOST, FIRST_BEHIND = 16, 64
"""Masks of first free choices that are kept with a grammar, 16 kB each with 128k tokens; tokens in front of one."""
FIRSTS_A_THREAD = 4
"""Grammars whose first masks are made in one call, for each thread: two masks of one take up to some 0.2 s."""
LIMITS, REGEX_LIMITS = (
    LLParserLimits(
        initial_lexer_fuel=fuel, step_lexer_fuel=100_000, step_max_items=50_000, max_lexer_states=50_000,
        max_grammar_size=200_000, verbose_errors=False,
    )
    for fuel in (1_000_000, 100_000)
)  # fmt: skip
"""Work of a compile and of a mask, and states of 1 to 2 kB; those of an expression alone are small.

The masks of other outputs wait for a slow one: with the smaller fuel it takes some 10 ms, with the other up to 0.1 s.
"""


class GrammarError(ValueError):
    """A grammar that cannot be compiled; one line."""


@dataclass(slots=True)
class _Compiled:
    """A grammar that is compiled."""

    matcher: LLMatcher
    """At the beginning of a text."""
    start: Bytes | str | None = None
    """Mask of the first token, or why there is none; None until it is asked for."""
    first: dict[tuple[int, ...], NDArray[np.int32]] = field(default_factory=dict)
    """Masks of first free choices by the tokens in front of them."""


class _Beginning(NamedTuple):
    """The grammar and all tokens of an output that has had no free choice. Outputs that share both share a mask."""

    compiled: _Compiled
    tokens: list[int]


class _Output(NamedTuple):
    """A question, and its matcher behind the tokens that must follow."""

    question: Question
    matcher: LLMatcher
    forced: list[int]
    beginning: _Beginning | None


class Matchers:
    """All matchers of one checkpoint. `vocabulary` is the number of the model's logits; `threads` compute masks."""

    def __init__(self, folder: Path, vocabulary: int, eos: list[int], threads: int = 1) -> None:
        file = str(folder / "tokenizer.json")
        self._tokenizer = LLTokenizer(file, n_vocab=vocabulary, eos_token=eos, slices=SLICES)
        self._vocabulary, self._eos = vocabulary, eos
        self._executor = LLExecutor(threads)
        self.firsts_most = FIRSTS_A_THREAD * threads
        """Grammars to keep before their first masks are asked for."""
        self._grammars: OrderedDict[Grammar, _Compiled] = OrderedDict()
        self._characters = 0
        """Those of all grammars."""
        self._refused: list[Grammar] = []
        """Grammars that have no first mask."""
        self._matchers: dict[int, LLMatcher] = {}
        self._beginnings: dict[int, _Beginning] = {}

    def compile(self, grammar: Grammar) -> LLMatcher:
        """Return the matcher of a grammar at the beginning of a text; any thread may call it. Raises GrammarError."""
        try:
            limits = REGEX_LIMITS if grammar.kind == "regex" else LIMITS
            matcher = LLMatcher(self._tokenizer, _lark_or_schema(grammar), log_level=0, limits=limits)
        except (ValueError, RecursionError) as error:
            raise GrammarError(one_line(str(error))) from None
        if fault := error_of(matcher):
            raise GrammarError(fault)
        return matcher

    def keep(self, grammar: Grammar, matcher: LLMatcher) -> None:
        """Keep a compiled grammar."""
        self._grammars[grammar] = _Compiled(matcher)
        self._characters += len(grammar.text)
        while len(self._grammars) > KEPT_MOST + OLD_MOST or self._characters > TEXT_MOST:
            self._drop_oldest()

    @property
    def has_old(self) -> bool:
        """Whether there are grammars to drop."""
        return len(self._grammars) > KEPT_MOST

    def drop_old(self) -> None:
        """Drop the grammars that were used longest ago, a few at once."""
        for _ in range(min(DROPPED_MOST, len(self._grammars) - KEPT_MOST)):
            self._drop_oldest()

    def drop_refused(self) -> None:
        """Drop the grammars that had no first mask, once all questions about them are answered.

        A small one may have made as many states as there may be, and the core knows why it was refused.
        """
        for grammar in self._refused:
            self._characters -= len(grammar.text)
            del self._grammars[grammar]
        self._refused.clear()

    def _drop_oldest(self) -> None:
        grammar, _ = self._grammars.popitem(last=False)
        self._characters -= len(grammar.text)

    def lacks(self, grammar: Grammar) -> bool:
        """Return whether a grammar must be compiled first."""
        return grammar not in self._grammars

    def answers(self, questions: list[Question]) -> Answers:
        """Return masks: of outputs, behind tokens that must follow, and first ones. All grammars are compiled."""
        message, distinct = Answers([], []), dict[Bytes, int]()
        if firsts := [question for question in questions if not question.matcher]:
            self._answer_firsts(firsts, message, distinct)
        outputs = [self._advanced(question) for question in questions if question.matcher]
        if outputs:
            masks: NDArray[np.int32] = allocate_token_bitmask(len(outputs), self._vocabulary)
            self._fill(outputs, masks)
            counts, folded = fold(masks)
            self._keep_first(outputs, masks, counts)
            for row, output in enumerate(outputs):
                self._answer(output, masks[row], counts[row], folded[row], message, distinct)
        message.masks = [TokenMask(*mask) for mask in distinct]
        return message

    def _fill(self, outputs: list[_Output], masks: NDArray[np.int32]) -> None:
        """Write the mask of each output that has no error, kept or computed."""
        good: list[tuple[LLMatcher, int]] = []
        for row, (_, matcher, _, beginning) in enumerate(outputs):
            if matcher.is_error():
                continue
            if beginning and (kept := beginning.compiled.first.get(tuple(beginning.tokens))) is not None:
                masks[row] = kept
            else:
                good.append((matcher, row))
        if good:
            fill_next_token_bitmask_par(self._executor, good, masks)

    def _keep_first(self, outputs: list[_Output], masks: NDArray[np.int32], counts: list[int]) -> None:
        """Keep masks that are the first free choice of an output; behind it, outputs differ."""
        for row, (question, matcher, _, beginning) in enumerate(outputs):
            if beginning is None:
                continue
            free = counts[row] * FREE_SHARE > self._vocabulary
            if free and not matcher.is_error():
                first, tokens = beginning.compiled.first, tuple(beginning.tokens)
                if tokens not in first:
                    first[tokens] = masks[row].copy()
                    if len(first) > FIRST_MOST:
                        del first[next(iter(first))]
            if free or len(beginning.tokens) > FIRST_BEHIND:
                self._beginnings.pop(question.matcher, None)

    def forget(self, numbers: list[int]) -> None:
        """Drop the matchers of outputs that have ended."""
        for number in numbers:
            self._matchers.pop(number, None)
            self._beginnings.pop(number, None)

    def _advanced(self, question: Question) -> _Output:
        """Return the matcher of a question behind its tokens, and behind those that must follow."""
        beginning: _Beginning | None
        if question.grammar is not None:
            self._grammars.move_to_end(question.grammar)
            compiled = self._grammars[question.grammar]
            matcher, beginning = compiled.matcher.deep_copy(), _Beginning(compiled, [])
            self._matchers[question.matcher], self._beginnings[question.matcher] = matcher, beginning
        else:
            matcher, beginning = self._matchers[question.matcher], self._beginnings.get(question.matcher)
        if question.tokens:
            matcher.consume_tokens(question.tokens)
        forced: list[int] = []
        if question.forced_most and (forced := matcher.compute_ff_tokens()[: question.forced_most]):
            matcher.consume_tokens(forced)
        if beginning:
            beginning.tokens.extend([*question.tokens, *forced])
        return _Output(question, matcher, forced, beginning)

    def _answer_firsts(self, questions: list[Question], message: Answers, distinct: dict[Bytes, int]) -> None:
        """Add the first masks of grammars to a message; they are made where they were not asked for before."""
        wanted: list[tuple[int, _Compiled]] = []
        new: dict[Grammar, _Compiled] = {}
        for question in questions:
            assert question.grammar is not None, "a question without a matcher is about a grammar"
            self._grammars.move_to_end(question.grammar)
            compiled = self._grammars[question.grammar]
            wanted.append((question.number, compiled))
            if compiled.start is None:
                new[question.grammar] = compiled
        if new:
            matchers = [compiled.matcher for compiled in new.values()]
            starts = first_masks(self._executor, matchers, self._vocabulary, self._eos)
            for (grammar, compiled), start in zip(new.items(), starts, strict=True):
                compiled.start = start
                if isinstance(start, str):
                    self._refused.append(grammar)
        for number, compiled in wanted:
            place = -1
            if isinstance(compiled.start, str):
                message.errors[number] = compiled.start
            elif compiled.start is not None:
                place = distinct.setdefault(compiled.start, len(distinct))
            message.numbers.append(number)
            message.places.append(place)

    def _answer(
        self,
        output: _Output,
        mask: NDArray[np.int32],
        count: int,
        folded: Bytes,
        message: Answers,
        distinct: dict[Bytes, int],
    ) -> None:
        """Add the answer with a mask of `count` tokens to a message, and the `folded` mask to the distinct ones."""
        question, matcher, forced, _ = output
        number, place = question.number, -1
        if matcher.is_error():
            message.errors[number] = error_of(matcher) or "no match"
        elif not count:
            message.errors[number] = DEAD_END
        else:
            if question.held:
                kept = mask.copy()
                for token in question.held:
                    kept[token // 32] &= ~np.uint32(1 << token % 32).view(np.int32)
                folded = fold(kept[None])[1][0] if kept.any() else folded
            elif count == 1 and len(forced) < question.forced_most and (last := self._end_of(mask)) is not None:
                forced.append(last)
            place = distinct.setdefault(folded, len(distinct))
            if forced:
                message.forced[number] = forced
        message.numbers.append(number)
        message.places.append(place)

    def _end_of(self, mask: NDArray[np.int32]) -> int | None:
        """Return the end-of-sequence token that is allowed; None if there is none."""
        return next((token for token in self._eos if mask[token // 32] >> token % 32 & 1), None)


def _lark_or_schema(grammar: Grammar) -> str:
    """Return a grammar in llguidance's own form. Raises ValueError."""
    if grammar.kind != "json":
        return grammar_from(grammar.kind, grammar.text)
    if grammar.whitespace == "":
        return LLMatcher.grammar_from_json_schema(grammar.text, {"whitespace_flexible": False})
    return LLMatcher.grammar_from_json_schema(grammar.text, {"whitespace_pattern": grammar.whitespace or WHITESPACE})
