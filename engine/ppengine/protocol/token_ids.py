"""Token ids in arrays, and their form in messages: their bytes, without a number of Python for each."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    TokenIds = array[int]
else:
    TokenIds = array

TYPE = "I"
"""Type code of the arrays, four bytes a token."""


def compact(tokens: Iterable[int] = ()) -> TokenIds:
    """Return tokens at four bytes each; in a list one takes up to 40. Such an array is returned as it is.

    Raises OverflowError for a number below 0 or of more than four bytes.
    """
    return tokens if isinstance(tokens, array) and tokens.typecode == TYPE else array(TYPE, list(tokens))


def compact_if_good(tokens: Iterable[int]) -> TokenIds:
    """Return tokens as `compact`, or none if one of them fits no array: the core names it then, if it gets the list."""
    try:
        return compact(tokens)
    except (TypeError, OverflowError):
        return compact()


def wide(tokens: TokenIds) -> bytearray:
    """Return the bytes of tokens at eight bytes each, as those of `array("q")`, without a number of Python for each."""
    content, eight = tokens.tobytes(), bytearray(8 * len(tokens))
    for place in range(4):
        eight[place::8] = content[place::4]
    return eight


def beyond(tokens: TokenIds, limit: int) -> bool:
    """Return whether a token is `limit` or more: as `max(tokens) >= limit`, in a fifth of the time.

    All tokens are one long number. To each, `2**31 - limit` is added: bit 31 is set then if it is too large.
    """
    large, more = _masks(1 << len(tokens).bit_length(), limit)
    number = int.from_bytes(tokens.tobytes(), sys.byteorder)
    return bool(number & large) or bool((number + more) & large)


@lru_cache(32)
def _masks(count: int, limit: int) -> tuple[int, int]:
    """Return numbers with bit 31 of each of `count` tokens, and with what brings `limit` there."""
    order = sys.byteorder
    each = ((1 << 31).to_bytes(4, order), ((1 << 31) - limit).to_bytes(4, order))
    large, more = (int.from_bytes(one * count, order) for one in each)
    return large, more


def to_wire(value: object) -> memoryview:
    """Return the bytes of an array: the hook of encoders. All hosts of an engine have the same order of bytes."""
    if isinstance(value, array):
        return memoryview(value).cast("B")
    raise NotImplementedError(f"no message has a {type(value).__name__}")


def from_wire(kind: type, value: Any) -> TokenIds:
    """Return the tokens of an array's bytes, or of a list: the hook of decoders. Raises ValueError for others."""
    if isinstance(value, bytes):
        return array(TYPE, value)
    if not isinstance(value, list):
        raise ValueError(f"token ids are bytes or a list, not {type(value).__name__}")
    try:
        return array(TYPE, value)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"token ids: {error}") from None
