"""Collectives that ranks launched, in words, and the error for ranks that launched different ones."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ppengine.common.groups import site_text
from ppengine.common.ring import DTYPES, Kind, shape_code, shape_text

BEST, BELOW, PIECE = 256, 257, 258
"""Kinds of calls on cards alone: best tokens, candidates of top-k, one piece of a sum. No ring has records of them."""
_NAMES = {
    Kind.ALL_REDUCE.value: "all-reduce", Kind.ALL_GATHER.value: "all-gather", BEST: "best-tokens",
    BELOW: "top-k-tokens", PIECE: "piece-of-all-reduce",
}  # fmt: skip
_CODES = {getattr(torch, name): shape_code(name, 0) for name in DTYPES}


class RanksDifferError(Exception):
    """Ranks of one stage launched different collectives; one line with both call sites."""


class Call(NamedTuple):
    """One collective of one rank."""

    number: int
    kind: int
    site: int
    step: int
    size: int
    """Bytes."""
    code: int
    """Element type and row length, see `shape_code`."""

    def __str__(self) -> str:
        """Return the call in words: `all-reduce 12 (attention of layer 3, m8, float64[4, 64] 2048 B)`."""
        where = f"{site_text(self.site)}, m{self.step}, {shape_text(self.size, self.code)}"
        return f"{_NAMES.get(self.kind, 'call')} {self.number} ({where})"


def code_of(tensor: Tensor, width: int) -> int:
    """Return the shape code of rows of `width` elements of the tensor's type."""
    return _CODES.get(tensor.dtype, 0) + width


def differ(stage: int, rank: int, mine: Call, peer: int, theirs: Call, *, launched: bool) -> RanksDifferError:
    """Return the error for the first call in which two ranks differ. `diagnosis.rank_rules` reads its text.

    `launched`: a device may have added the parts already.
    """
    text = f"stage {stage} rank {rank} launched {mine}, rank {peer} launched {theirs}: it is the first difference"
    return RanksDifferError(text + (", found behind the launch" if launched else ""))
