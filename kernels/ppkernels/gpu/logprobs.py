"""Kernel for the log-probabilities of the chosen token, and of the best ones in order."""

from __future__ import annotations

import triton
import triton.language as tl

from ppkernels.gpu.draw import BY_ROW, LOGPROBS
from ppkernels.gpu.row_passes import best_of


# As many as a request wants, which is not known before.
@triton.jit(do_not_specialize=["best_stride"], do_not_specialize_on_alignment=BY_ROW)
def logprob_rows(
    logits,
    table,
    slots,
    tokens,
    chosen,
    best_tokens,
    best_values,
    row_stride,
    table_stride,
    best_stride,
    vocabulary,
    BLOCK: tl.constexpr,
):
    """Write the requested values of each row alone, with one pass for each of the best."""
    row = tl.program_id(0).to(tl.int64)
    wanted = tl.load(table + tl.load(slots + row) * table_stride + LOGPROBS)
    if wanted >= 0:
        values = logits + row * row_stride
        lanes = tl.arange(0, BLOCK)
        _, best, token = best_of(values, vocabulary, BLOCK)
        mass = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, vocabulary, BLOCK):
            x = tl.load(values + first + lanes, mask=first + lanes < vocabulary, other=float("-inf")).to(tl.float32)
            mass += tl.exp(x - best)
        norm = best + tl.log(tl.sum(mass))
        tl.store(chosen + row, tl.load(values + tl.load(tokens + row)).to(tl.float32) - norm)
        value = best
        for place in range(tl.minimum(wanted, vocabulary).to(tl.int32)):
            tl.store(best_tokens + row * best_stride + place, token)
            tl.store(best_values + row * best_stride + place, value - norm)
            value, token = _next(values, vocabulary, value, token, BLOCK)


@triton.jit
def _next(values, vocabulary, value, token, BLOCK: tl.constexpr):
    """Return the next best logit after (`value`, `token`) and its id, the lower id first."""
    lanes = tl.arange(0, BLOCK)
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    ids = tl.full((BLOCK,), 2**31 - 1, tl.int32)
    for first in range(0, vocabulary, BLOCK):
        place = first + lanes
        x = tl.load(values + place, mask=place < vocabulary, other=float("-inf")).to(tl.float32)
        behind = ((x < value) | ((x == value) & (place > token))) & (place < vocabulary)
        better = behind & ((x > highest) | (ids == 2**31 - 1))
        highest = tl.where(better, x, highest)
        ids = tl.where(better, place, ids)
    best = tl.max(highest)
    return best, tl.minimum(tl.min(tl.where(highest == best, ids, 2**31 - 1)), vocabulary - 1)
