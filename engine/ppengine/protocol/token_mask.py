"""Masks of tokens, as grammar processes, the core and the last stage exchange them."""

from __future__ import annotations

import msgspec


class TokenMask(msgspec.Struct, array_like=True, frozen=True):
    """Tokens that may be chosen: token `t` at bit `t % 32` of word `t // 32`. Words are little-endian, of 32 bits.

    With a vocabulary of 128,000 most masks allow few tokens: 1 kB in place of 16.
    """

    words: bytes
    """All words, or those that are not zero."""
    places: bytes = b""
    """Numbers of these words, in order, as words; empty: `words` has all."""
