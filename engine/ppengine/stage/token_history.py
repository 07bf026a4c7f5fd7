"""Adjustments of logits with the tokens that they depend on. The last stage knows these before the core does."""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray
from ppkernels.sampling_inputs import Adjustment

from ppengine.protocol.steps import Register


def adjustment_of(register: Register, tokens: NDArray[np.int64]) -> Adjustment:
    """Return the adjustments of a request that has some, for the token behind `tokens`."""
    wanted = register.adjustments
    assert wanted is not None
    return Adjustment(
        prompt=tokens[: register.prompt_len],
        output=tokens[register.prompt_len :],
        min_p=wanted.min_p,
        presence_penalty=wanted.presence_penalty,
        frequency_penalty=wanted.frequency_penalty,
        repetition_penalty=wanted.repetition_penalty,
        logit_bias=wanted.logit_bias,
        bad_words=wanted.bad_words_ids,
        allowed=wanted.allowed_token_ids,
    )


class TokenHistory:
    """Prompt and outputs of requests with adjustments, by slot, on CPUs.

    A slot keeps its tokens until it is registered again.
    """

    def __init__(self) -> None:
        self._tokens: dict[int, array[int]] = {}

    def register(self, registers: list[Register]) -> None:
        """Take over the tokens of requests with adjustments."""
        for register in registers:
            self._tokens.pop(register.slot, None)
            if register.adjustments is not None:
                self._tokens[register.slot] = array("q", register.tokens)

    def before(self, slot: int, position: int) -> NDArray[np.int64]:
        """Return the tokens at positions below `position`. Raises ValueError if they are not exactly those known."""
        tokens = self._tokens[slot]
        if len(tokens) != position:
            raise ValueError(f"slot {slot}: position {position} is sampled, {len(tokens)} tokens are known")
        return np.array(tokens, np.int64)

    def append(self, slot: int, token: int) -> None:
        """Note a sampled token."""
        self._tokens[slot].append(token)
