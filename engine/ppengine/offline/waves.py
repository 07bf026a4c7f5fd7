"""Prompts of one call in waves, so that the log-probabilities of their prompts have room in the engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Sized

from ppengine.offline.prompts import content_of
from ppengine.protocol.prompt_scores import HELD_MOST, values_of
from ppengine.protocol.sampling import SamplingParams

SPECIAL_TOKENS = 8
"""Tokens that a tokenizer may add to a text; its own are at most the text's bytes."""


def most_values(prompt: object, params: SamplingParams) -> int:
    """Return how many log-probabilities a prompt has at most; 0 for one that is no prompt, which is refused later."""
    if params.prompt_logprobs is None:
        return 0
    text, ids = content_of(prompt)
    if ids is None and isinstance(text, str):
        tokens = len(text.encode(errors="replace")) + SPECIAL_TOKENS
    else:
        tokens = len(ids) if isinstance(ids, Sized) else 0  # an array is no sequence
    return values_of(tokens, params.prompt_logprobs)


class Waves:
    """The indices of prompts in the order of their starts. A prompt begins once those before it left room.

    Prompts without log-probabilities need none, so a call without any is one wave.
    """

    def __init__(self, values: Sequence[int], priority: Sequence[int] | None) -> None:
        """`values` has the log-probabilities of each prompt, at most."""
        self._values = values
        self._left = deque(range(len(values)))
        self.several = sum(values) > HELD_MOST
        """Whether some prompts wait for others."""
        if priority is not None and self.several:
            self._left = deque(sorted(self._left, key=priority.__getitem__))
        self._held = 0

    def next(self) -> list[int]:
        """Return the prompts that may begin now, and count them as begun; a prompt that is too large begins alone."""
        begun: list[int] = []
        while self._left:
            values = self._values[self._left[0]]
            if self._held and self._held + values > HELD_MOST:
                break
            self._held += values
            begun.append(self._left.popleft())
        return begun

    def end(self, index: int) -> None:
        """Give back the room of a prompt that has ended."""
        self._held -= self._values[index]
