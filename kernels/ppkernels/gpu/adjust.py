"""Kernels that change rows of logits by what a request asks for and has written, without sorting.

One program writes one row, in float32. Meaning and order are those of `ppkernels.adjust`. A request
with adjustments has a record of int32, whose address is in a table by slot: a head, its lists, and
its tokens by position. The program counts tokens in a row of scratch as wide as the vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ppkernels.gpu.draw import BANNED, BANNED_UNTIL, BY_ROW, TEMPERATURE, TINY, float_of
from ppkernels.gpu.row_passes import best_of, scaled_logits, tile_of

HEAD = 16
"""Words of a record's head."""
(PRESENCE, FREQUENCY, REPETITION, LEAST, PROMPT, BIASES, ALLOWED, WORDS, LONGEST, AT_ALLOWED, AT_WORDS, AT_TOKENS) = (
    tl.constexpr(i) for i in range(12)
)
"""Words of the head: bits of float32, numbers of tokens and words, and where lists begin.

`LEAST` is the logarithm of min-p. Biases are behind the head: their ids, then their bits. Bad words
are their first places, then their lengths, then the tokens of all.
"""
MOST_WORDS = 256
"""Most bad words of a request."""

_HEAD = tl.constexpr(HEAD)
_IN_PROMPT = tl.constexpr(1 << 30)
"""Count of a token of the prompt; outputs add 1 each."""


@triton.jit(do_not_specialize_on_alignment=BY_ROW)
def adjust_rows(
    logits,
    out,
    counts,
    table,
    records,
    slots,
    positions,
    row_stride,
    table_stride,
    vocabulary,
    BANNED_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write each row to `out` [R, V] float32, changed if its slot has a record.

    `counts` [R, V] int32 is scratch. `WIDTH` is at least the number of bad words of a request.
    """
    row = tl.program_id(0).to(tl.int64)
    values, changed = logits + row * row_stride, out + row * vocabulary
    slot = tl.load(slots + row)
    address = tl.load(records + slot)
    if address == 0:
        _copy(values, changed, vocabulary, BLOCK)
    else:
        record = address.to(tl.pointer_type(tl.int32))
        own = table + slot * table_stride
        position = tl.load(positions + row).to(tl.int32)
        _allow(record, values, changed, vocabulary, BLOCK)
        tl.debug_barrier()
        _add_bias(record, changed, vocabulary, BLOCK)
        tl.debug_barrier()
        _penalize(record, changed, counts + row * vocabulary, position, vocabulary, BLOCK)
        tl.debug_barrier()
        banned = tl.load(own + BANNED + tl.arange(0, BANNED_WIDTH))
        bans = (position < tl.load(own + BANNED_UNTIL)) & (banned >= 0) & (banned < vocabulary)
        tl.store(changed + banned, float("-inf"), mask=bans)
        _ban_words(record, changed, position, vocabulary, WIDTH)
        tl.debug_barrier()
        _cut_unlikely(record, changed, float_of(tl.load(own + TEMPERATURE)), vocabulary, BLOCK)


@triton.jit(do_not_specialize_on_alignment=BY_ROW)
def append_tokens(tokens, records, slots, positions, longest):
    """Write each row's new token into its record of `longest` tokens, if its slot has one."""
    row = tl.program_id(0)
    address = tl.load(records + tl.load(slots + row))
    position = tl.load(positions + row).to(tl.int64)
    if (address != 0) & (position < longest):
        record = address.to(tl.pointer_type(tl.int32))
        tl.store(record + tl.load(record + AT_TOKENS) + position, tl.load(tokens + row).to(tl.int32))


@triton.jit
def _known(token, vocabulary):
    """Return whether tokens are in the vocabulary; nothing else may be an index."""
    return (token >= 0) & (token < vocabulary)


@triton.jit
def _copy(values, changed, vocabulary, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    for first in range(0, vocabulary, BLOCK):
        x = tile_of(values, first + lanes, vocabulary)
        tl.store(changed + first + lanes, x, mask=first + lanes < vocabulary)


@triton.jit
def _allow(record, values, changed, vocabulary, BLOCK: tl.constexpr):
    """Copy the allowed logits; the others become -inf."""
    lanes = tl.arange(0, BLOCK)
    number = tl.load(record + ALLOWED)
    if number == 0:
        _copy(values, changed, vocabulary, BLOCK)
    else:
        allowed = record + tl.load(record + AT_ALLOWED)
        for first in range(0, vocabulary, BLOCK):
            tl.store(changed + first + lanes, float("-inf"), mask=first + lanes < vocabulary)
        tl.debug_barrier()
        for first in range(0, number, BLOCK):
            token = tl.load(allowed + first + lanes, mask=first + lanes < number, other=vocabulary)
            x = tl.load(values + token, mask=_known(token, vocabulary), other=0.0).to(tl.float32)
            tl.store(changed + token, x, mask=_known(token, vocabulary))


@triton.jit
def _add_bias(record, changed, vocabulary, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    number = tl.load(record + BIASES)
    for first in range(0, number, BLOCK):
        inside = first + lanes < number
        token = tl.load(record + _HEAD + first + lanes, mask=inside, other=vocabulary)
        bias = float_of(tl.load(record + _HEAD + number + first + lanes, mask=inside, other=0))
        x = tl.load(changed + token, mask=_known(token, vocabulary), other=0.0)
        tl.store(changed + token, x + bias, mask=_known(token, vocabulary))


@triton.jit
def _penalize(record, changed, counts, position, vocabulary, BLOCK: tl.constexpr):
    """Count the tokens of prompt and output, and change their logits."""
    lanes = tl.arange(0, BLOCK)
    presence, frequency = float_of(tl.load(record + PRESENCE)), float_of(tl.load(record + FREQUENCY))
    repetition = float_of(tl.load(record + REPETITION))
    if (presence != 0) | (frequency != 0) | (repetition != 1):
        tokens, prompt = record + tl.load(record + AT_TOKENS), tl.load(record + PROMPT)
        for first in range(0, vocabulary, BLOCK):
            tl.store(counts + first + lanes, 0, mask=first + lanes < vocabulary)
        tl.debug_barrier()
        for first in range(0, prompt, BLOCK):
            token = tl.load(tokens + first + lanes, mask=first + lanes < prompt, other=vocabulary)
            tl.store(counts + token, _IN_PROMPT, mask=_known(token, vocabulary))
        tl.debug_barrier()
        for first in range(prompt, position, BLOCK):
            token = tl.load(tokens + first + lanes, mask=first + lanes < position, other=vocabulary)
            tl.atomic_add(counts + token, 1, mask=_known(token, vocabulary), sem="relaxed")
        tl.debug_barrier()
        for first in range(0, vocabulary, BLOCK):
            inside = first + lanes < vocabulary
            x = tile_of(changed, first + lanes, vocabulary)
            found = tl.load(counts + first + lanes, mask=inside, other=0)
            divided = tl.where(x > 0, tl.div_rn(x, repetition + tl.zeros_like(x)), x * repetition)
            x = tl.where(found > 0, divided, x)
            times = (found & (_IN_PROMPT - 1)).to(tl.float32)
            x = tl.where(times > 0, x - times * frequency - presence, x)
            tl.store(changed + first + lanes, x, mask=inside)


@triton.jit
def _ban_words(record, changed, position, vocabulary, WIDTH: tl.constexpr):
    """Ban the last token of each bad word whose other tokens are the newest of the output."""
    number = tl.load(record + WORDS)
    if number > 0:
        lanes = tl.arange(0, WIDTH)
        tokens, words = record + tl.load(record + AT_TOKENS), record + tl.load(record + AT_WORDS)
        start = tl.load(words + lanes, mask=lanes < number, other=0)
        length = tl.load(words + number + lanes, mask=lanes < number, other=1)
        last = words + 2 * number + start + length - 1
        met = (lanes < number) & (length - 1 <= position - tl.load(record + PROMPT))
        for back in range(1, tl.load(record + LONGEST)):
            newest = tl.load(tokens + tl.maximum(position - back, 0))
            token = tl.load(last - back, mask=met & (length > back), other=0)
            met = met & ((length <= back) | (token == newest))
        token = tl.load(last, mask=met, other=vocabulary)
        tl.store(changed + token, float("-inf"), mask=_known(token, vocabulary))


@triton.jit
def _cut_unlikely(record, changed, temperature, vocabulary, BLOCK: tl.constexpr):
    """Ban the tokens below min-p; greedy rows have none."""
    least = float_of(tl.load(record + LEAST))
    if (temperature > 0) & (least > float("-inf")):
        temperature = tl.maximum(temperature, TINY)
        lanes = tl.arange(0, BLOCK)
        _, best, _ = best_of(changed, vocabulary, BLOCK)
        tl.debug_barrier()
        for first in range(0, vocabulary, BLOCK):
            x = tile_of(changed, first + lanes, vocabulary)
            unlikely = scaled_logits(x, best, temperature) < least
            tl.store(changed + first + lanes, tl.where(unlikely, float("-inf"), x), mask=first + lanes < vocabulary)
