"""Masks of tokens on a GPU: one launch for all constrained rows of a step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ppkernels.token_masks import TokenMask, entries

_BLOCK = 4096


# A number of rows of its own kind would compile the kernel again, amid requests.
@triton.jit(do_not_specialize=["count"])
def mask_rows(logits, masks, rows, count, row_stride, vocabulary, words, BLOCK: tl.constexpr):
    """Write -inf over the logits of tokens without a bit. `rows` [2, count]: rows of logits, and of `masks` int32."""
    place = tl.program_id(0)
    values = logits + tl.load(rows + place) * row_stride
    mask = tl.load(rows + count + place)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(masks + mask * words + (token >> 5), mask=(token >> 5) < words, other=0)
    banned = ((word >> (token & 31)) & 1) == 0
    tl.store(values + token, float("-inf"), mask=banned & (token < vocabulary))


def masked(logits: Tensor, masks: Mapping[int, TokenMask]) -> Tensor:
    """Return `ppkernels.token_masks.masked`, in stream order."""
    allowed, vocabulary = logits.clone(), logits.shape[1]
    words, on_card = -(-vocabulary // 32), logits.is_cuda
    distinct = {mask: number for number, mask in enumerate(dict.fromkeys(masks.values()))}
    bits = torch.zeros(len(distinct) * words, dtype=torch.int32, device=logits.device)
    parts = (*entries(distinct, words), np.array([list(masks), [distinct[each] for each in masks.values()]]))
    # torch keeps pinned memory until the copy is done.
    hosts = [torch.from_numpy(part).pin_memory() if on_card else torch.from_numpy(part) for part in parts]
    places, values, rows = (host.to(logits.device, non_blocking=True) for host in hosts)
    bits.scatter_(0, places, values)
    mask_rows[(len(masks), triton.cdiv(vocabulary, _BLOCK))](
        allowed, bits, rows, len(masks), allowed.stride(0), vocabulary, words, BLOCK=_BLOCK, num_warps=8
    )
    return allowed
