"""Masks of tokens: which ones may be chosen in a row, a bit a token.

Token `t` is at bit `t % 32` of the little-endian word `t // 32`. Tokens behind the last word may not be chosen.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class TokenMask(Hashable, Protocol):
    """One mask: all of its words, or those that are not zero and their numbers. Equal ones are computed once."""

    @property
    def words(self) -> bytes:
        """Words in order."""

    @property
    def places(self) -> bytes:
        """Their numbers, int32 little-endian; empty: `words` are the first ones."""


def masked(logits: Tensor, masks: Mapping[int, TokenMask]) -> Tensor:
    """Return new logits [R, V]: in the rows of `masks`, those of tokens without a bit are -inf."""
    distinct = {mask: number for number, mask in enumerate(dict.fromkeys(masks.values()))}
    count = -(-logits.shape[1] // 32)
    words = np.zeros(len(distinct) * count, "<i4")
    places, values = entries(distinct, count)
    words[places] = values
    bits = np.unpackbits(~words.reshape(-1, count).view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    which = torch.tensor([distinct[each] for each in masks.values()])
    banned = torch.from_numpy(bits.view(np.bool_))[which].to(logits.device)
    if len(masks) == len(logits) and list(masks) == list(range(len(logits))):
        return logits.masked_fill(banned, -math.inf)
    allowed, rows = logits.clone(), torch.tensor(list(masks), device=logits.device)
    allowed[rows] = logits[rows].masked_fill(banned, -math.inf)
    return allowed


def entries(masks: Collection[TokenMask], count: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return the words of masks that a table [len(masks), count] of zeros gets: flat places, and values.

    Places outside of a mask are left out.
    """
    values = [np.frombuffer(mask.words, "<i4") for mask in masks]
    places = [
        np.frombuffer(mask.places, "<i4") if mask.places else np.arange(len(words), dtype=np.int32)
        for mask, words in zip(masks, values, strict=True)
    ]
    place = np.concatenate(places).astype(np.int64)
    row = np.repeat(np.arange(len(places)), [len(each) for each in places])
    good = (place >= 0) & (place < count)
    return (row * count + place)[good], np.concatenate(values)[good]
