"""Masks of tokens on a GPU: one launch for all rows of a step, and one copy.

The stage waits for masks while its device idles, so the host's work counts: bytes of masks are joined as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ppkernels.token_masks import TokenMask

_WORDS = 64
"""Words of a mask that a program reads: 2,048 tokens."""
_BITS = 32


# A number of its own kind would compile the kernel again, amid requests.
@triton.jit(do_not_specialize=["length", "masks"])
def keep_allowed(logits, allowed, ints, length, masks, in_stride, out_stride, vocabulary, words, WORDS: tl.constexpr):
    """Copy the logits of tokens with a bit.

    `ints`: values [length] and places [length] of the words of all masks, where each mask begins [masks + 1], and the
    mask of each row; -1: all of its tokens.
    """
    row = tl.program_id(0).to(tl.int64)  # Many rows of many tokens are more than 2**31 logits.
    mask = tl.load(ints + 2 * length + masks + 1 + row)
    free = mask < 0
    first = tl.load(ints + 2 * length + mask, mask=mask >= 0, other=0)
    end = tl.load(ints + 2 * length + mask + 1, mask=mask >= 0, other=words)
    entry = first + tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    there = entry < end
    value = tl.load(ints + entry, mask=there & (mask >= 0), other=-1)
    place = tl.where(free, entry, tl.load(ints + length + entry, mask=there & (mask >= 0), other=0))
    bit = tl.arange(0, 32)
    token = place[:, None] * 32 + bit[None, :]
    good = (there & (place >= 0) & (place < words))[:, None] & (((value[:, None] >> bit[None, :]) & 1) != 0)
    good = good & (token < vocabulary)
    kept = tl.load(logits + row * in_stride + token, mask=good)
    tl.store(allowed + row * out_stride + token, kept, mask=good)


def masked(logits: Tensor, masks: Mapping[int, TokenMask]) -> Tensor:
    """Return `ppkernels.token_masks.masked`, in stream order."""
    count, vocabulary = logits.shape
    words = -(-vocabulary // _BITS)
    numbers: dict[int, int] = {}
    distinct: list[TokenMask] = []
    which = [-1] * count
    for row, mask in masks.items():
        # Most rows share a few masks, each one object: to hash their bytes would take longer.
        number = numbers.setdefault(id(mask), len(distinct))
        if number == len(distinct):
            distinct.append(mask)
        which[row] = number
    lengths = [len(mask.words) // 4 for mask in distinct]
    begins = list(accumulate(lengths, initial=0))
    longest = words if len(masks) < count else max(lengths)
    parts = [mask.words for mask in distinct]
    parts += [mask.places or _every(length) for mask, length in zip(distinct, lengths, strict=True)]
    parts.append(np.array(begins + which, "<i4").tobytes())
    joined = np.frombuffer(b"".join(parts), np.int32)
    host = torch.empty(len(joined), dtype=torch.int32, pin_memory=logits.is_cuda)
    host.numpy()[:] = joined
    # torch keeps pinned memory until the copy is done.
    ints = host.to(logits.device, non_blocking=True)
    allowed = torch.full_like(logits, float("-inf"), memory_format=torch.contiguous_format)
    keep_allowed[(count, max(1, triton.cdiv(longest, _WORDS)))](
        logits, allowed, ints, begins[-1], len(distinct), logits.stride(0), allowed.stride(0), vocabulary, words,
        WORDS=_WORDS, num_warps=8,
    )  # fmt: skip
    return allowed


@lru_cache(8)
def _every(count: int) -> bytes:
    """Return the places of a mask with all words."""
    return np.arange(count, dtype="<i4").tobytes()
