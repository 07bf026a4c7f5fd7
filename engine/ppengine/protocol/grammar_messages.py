"""Messages between the core and its grammar process, on the socket `grammar`."""

from __future__ import annotations

import msgspec

from ppengine.protocol.structured_outputs import Grammar
from ppengine.protocol.token_mask import TokenMask

COMPILERS = 4
"""Least threads of a process that compile; llguidance runs without Python's lock."""

LARGE = 2**14
"""Characters of a grammar from which on others do not wait behind it: its compile takes 0.1 s and more."""


def is_large(grammar: Grammar) -> bool:
    """Return whether a grammar has threads of its own, and a count of its own in the process."""
    return len(grammar.text) >= LARGE


class Question(msgspec.Struct, array_like=True):
    """Which tokens may follow an output?"""

    number: int
    matcher: int
    """Number of the output; 0: the grammar alone is compiled, and its first mask is wanted."""
    grammar: Grammar | None
    """None: this process has the matcher already."""
    tokens: list[int]
    """Tokens of the output, without those of earlier questions to this process."""
    held: list[int]
    """Tokens that are not allowed as long as others are."""
    forced_most: int = 0
    """Most tokens to take that the grammar forces; 0: the mask behind `tokens` alone is wanted."""


class Questions(msgspec.Struct, tag="questions", array_like=True):
    """Questions of one turn of the core. They are answered in any order."""

    questions: list[Question]


class Forget(msgspec.Struct, tag="forget", array_like=True):
    """Outputs that have ended."""

    matchers: list[int]


class Answers(msgspec.Struct, tag="answers", array_like=True):
    """Answers to some questions, in columns. Many outputs are inside of a text or a number, and have the same mask.

    While it compiles, the process sends some without an answer: a sign of life.
    """

    numbers: list[int]
    """The questions."""
    places: list[int]
    """Place of the mask of each of them; -1: there is none."""
    masks: list[TokenMask] = []
    forced: dict[int, list[int]] = {}
    """By question: tokens that must follow, one after another; the process has taken them, and the mask is of the token
    behind."""
    errors: dict[int, str] = {}
    """By question: the reason why it has no mask, in one line. The grammar is invalid or too large, or the tokens do
    not follow it."""


class GrammarsReady(msgspec.Struct, tag="grammars-ready", array_like=True):
    """The process has loaded the tokenizer."""


class GrammarsLeave(msgspec.Struct, tag="grammars-leave", array_like=True):
    """A compile in the process does not end, and its question is answered; another process must answer the others."""


ToGrammars = Questions | Forget
FromGrammars = Answers | GrammarsReady | GrammarsLeave
