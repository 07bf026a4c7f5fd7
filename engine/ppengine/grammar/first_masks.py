"""The first masks of grammars that are compiled, and whether a text can begin with them."""

from __future__ import annotations

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import consume_token_par, fill_next_token_bitmask_par
from numpy.typing import NDArray

from ppengine.common.one_line import one_line
from ppengine.grammar.mask_folding import Bytes, fold

DEAD_END = "no token may follow"


def first_masks(executor: LLExecutor, matchers: list[LLMatcher], vocabulary: int, eos: list[int]) -> list[Bytes | str]:
    """Return the mask of the first token of each matcher, or in one line why it has none.

    All of them go through llguidance and numpy at once: threads of this process share Python's lock, and 256 grammars
    that each thread looked at by itself took four times as long. The first mask makes most states of the lexer, for all
    outputs of a grammar.
    """
    masks: NDArray[np.int32] = np.empty((len(matchers), -(-vocabulary // 32)), np.int32)
    fill_next_token_bitmask_par(executor, list(zip(matchers, range(len(matchers)), strict=True)), masks)
    counts, folded = fold(masks)
    found: list[Bytes | str] = [
        error_of(matcher) or (mask if count else DEAD_END)
        for matcher, count, mask in zip(matchers, counts, folded, strict=True)
    ]
    # Some limits end a grammar behind its first token alone.
    seconds = [
        (row, matchers[row].deep_copy(), token)
        for row, token in enumerate(some_tokens(masks, eos))
        if token is not None and not isinstance(found[row], str)
    ]
    if seconds:
        consume_token_par(executor, [(matcher, token) for _, matcher, token in seconds])
    if good := [(matcher, row) for row, matcher, _ in seconds if not matcher.is_error()]:
        fill_next_token_bitmask_par(executor, good, masks)
    for row, matcher, _ in seconds:
        found[row] = error_of(matcher) or found[row]
    return found


def some_tokens(masks: NDArray[np.int32], eos: list[int]) -> list[int | None]:
    """Return the last token of each mask [R, W] that does not end the text; None without one. It changes the masks."""
    words = masks.view(np.uint32)
    for token in eos:
        words[:, token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
    places = words.shape[1] - 1 - (words != 0)[:, ::-1].argmax(axis=1)
    last = words[np.arange(len(words)), places]
    return [
        place * 32 + word.bit_length() - 1 if word else None
        for place, word in zip(places.tolist(), last.tolist(), strict=True)
    ]


def error_of(matcher: LLMatcher) -> str:
    """Return why a matcher has ended, in one line; empty if it has not."""
    error = one_line(matcher.get_error().replace("<non-verbose/>", "")) if matcher.is_error() else ""
    return DEAD_END if error == "NoExtensionBias" else error
