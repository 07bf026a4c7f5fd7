"""Masks of tokens: which ones may be chosen in a row, a bit a token.

Token `t` is at bit `t % 32` of the little-endian word `t // 32`. Tokens behind the last word may not be chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def masked(logits: Tensor, masks: Mapping[int, bytes]) -> Tensor:
    """Return new logits [R, V]: in the rows of `masks`, those of tokens without a bit are -inf.

    All masks must have the same length.
    """
    distinct = {bits: number for number, bits in enumerate(dict.fromkeys(masks.values()))}
    words = np.frombuffer(b"".join(distinct), np.uint8).reshape(len(distinct), -1)
    bits = np.unpackbits(~words, axis=1, count=logits.shape[1], bitorder="little")
    bits[:, 8 * words.shape[1] :] = 1
    which = torch.tensor([distinct[each] for each in masks.values()])
    banned = torch.from_numpy(bits.view(np.bool_))[which].to(logits.device)
    if len(masks) == len(logits) and list(masks) == list(range(len(logits))):
        return logits.masked_fill(banned, -math.inf)
    allowed, rows = logits.clone(), torch.tensor(list(masks), device=logits.device)
    allowed[rows] = logits[rows].masked_fill(banned, -math.inf)
    return allowed
