"""Kernels that choose one token a row: greedy, or at random below top-k and top-p, without sorting.

One program reads one row, several times; a row of 128,256 logits stays in the L2 cache between the
passes.

Top-k and top-p keep the tokens above a cut, a logit, and of those equal to it the ones with the
lowest ids. The cut is the largest logit at which a measure of all logits from it upwards reaches a
goal; top-k counts them, top-p sums their weights. The search runs over integers that order as the
logits do, and each pass quarters the interval.

The first search reads only the best logit of each lane and gives a lower bound of the cut. Few
logits are mostly above this bound. They are gathered, and all later passes read only them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ppkernels.gpu.row_passes import (
    UNIT,
    best_of,
    cut_at,
    gather,
    logit_of,
    measure_above,
    order_of,
    place_of,
    scaled_logits,
    weight_of,
)

TEMPERATURE, TOP_P, TOP_K, SEED, SAMPLE, LOGPROBS, BANNED_UNTIL, BANNED = (tl.constexpr(i) for i in range(8))
"""Columns of the table of parameters; floats are the bits of a float32."""

BY_ROW = ("slots", "positions", "tokens")
"""Arguments with a number a row, which begin anywhere: an address of its own kind would compile the kernel again, amid
requests.
"""
TINY = tl.constexpr(1.1754943508222875e-38)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)


@triton.jit(do_not_specialize_on_alignment=BY_ROW)
def sample_rows(
    logits,
    table,
    slots,
    positions,
    tokens,
    newest,
    candidates,
    ids,
    row_stride,
    table_stride,
    vocabulary,
    NEWEST: tl.constexpr,
    RANDOM: tl.constexpr,
    BANNED_WIDTH: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the token of each row. Without RANDOM all rows are greedy; their temperature is
    ignored.

    `candidates` (of the type of `logits`) and `ids` (int32) are room for CAPACITY >= BLOCK tokens a
    row.
    """
    row = tl.program_id(0).to(tl.int64)
    values = logits + row * row_stride
    slot = tl.load(slots + row)
    own = table + slot * table_stride
    position = tl.load(positions + row).to(tl.int64)
    places, bans, saved = ban(values, own, position, 0, vocabulary, BANNED_WIDTH)
    highest, best, token = best_of(values, vocabulary, BLOCK)
    if RANDOM:
        temperature = float_of(tl.load(own + TEMPERATURE))
        if temperature > 0:
            number = random_number(tl.load(own + SEED), tl.load(own + SAMPLE), position)
            temperature = tl.maximum(temperature, TINY)
            top_k, top_p = tl.load(own + TOP_K), float_of(tl.load(own + TOP_P))
            candidates += row * CAPACITY
            ids += row * CAPACITY
            token = _draw(
                values, vocabulary, highest, best, temperature, top_k, top_p, number, candidates, ids, CAPACITY, BLOCK
            )
            token = tl.minimum(tl.maximum(token, 0), vocabulary - 1)
    tl.store(tokens + row, token.to(tl.int64))
    if NEWEST:
        tl.store(newest + slot, token.to(newest.dtype.element_ty))
    tl.debug_barrier()
    tl.store(values + places, saved, mask=bans)


@triton.jit
def ban(values, own, position, first, width, BANNED_WIDTH: tl.constexpr):
    """Write -inf over logits of banned tokens, while a program reads a row: `width` logits, of the tokens from `first`
    on, with the parameters `own`. Return places, whether each is in the row, and the logits to restore.
    """
    banned = tl.load(own + BANNED + tl.arange(0, BANNED_WIDTH))
    places = banned - first
    bans = (position < tl.load(own + BANNED_UNTIL)) & (banned >= 0) & (places >= 0) & (places < width)
    saved = tl.load(values + places, mask=bans, other=0.0)
    tl.debug_barrier()
    tl.store(values + places, float("-inf"), mask=bans)
    tl.debug_barrier()
    return places, bans, saved


@triton.jit
def _draw(
    values,
    vocabulary,
    highest,
    best,
    temperature,
    top_k,
    top_p,
    number,
    candidates,
    ids,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the first token whose cumulative weight, in id order, exceeds `number` / 2**64 of the
    kept weight.
    """
    end = order_of(best, values) + 1
    lowest = best * 0 + float("-inf")
    limited = (top_k > 0) & (top_k < vocabulary)
    row, count, start, gathered = values, vocabulary, order_of(lowest, values), vocabulary < 0
    total = (number * 0).to(tl.int64)
    if not limited:
        total, _, _ = measure_above(values, vocabulary, best, temperature, lowest, BLOCK)
    if limited | (top_p < 1):
        # A goal that the best of each lane reach, all logits reach: the cut is not below theirs.
        tl.store(candidates + tl.arange(0, BLOCK), highest.to(values.dtype.element_ty))
        tl.debug_barrier()
        worth = limited
        if limited:
            start = cut_at(candidates, BLOCK, best, temperature, start, end, top_k, False, BLOCK)
        else:
            # All tokens below `least` together weigh less than top-p leaves out; one step more allows for rounding.
            share = (1 - top_p) * (total.to(tl.float32) / (UNIT * vocabulary))
            least = order_of(best + temperature * (tl.log(share) - 1), values) - 1
            start = cut_at(candidates, BLOCK, best, temperature, least, end, _share(top_p, total), True, BLOCK)
            # In a flat row the best do not reach the goal, and too many tokens remain to gather.
            worth = start > least
        tl.debug_barrier()
        if worth:
            row, count, gathered = gather_from(
                start, values, vocabulary, best, temperature, candidates, ids, CAPACITY, BLOCK
            )
    token = draw_from(row, count, best, temperature, start, end, limited, top_k, top_p, total, number, BLOCK)
    if gathered:
        token = tl.load(ids + token)
    return token


@triton.jit
def gather_from(
    start, values, vocabulary, best, temperature, candidates, ids, CAPACITY: tl.constexpr, BLOCK: tl.constexpr
):
    """Gather the logits from the order `start` upwards. Return the row that later passes read, its width, and whether
    it is `candidates`: with none, or more than there is room for, it is the whole row.
    """
    row, count = values, vocabulary
    lower = scaled_logits(logit_of(start, values), best, temperature)
    found = gather(values, vocabulary, best, temperature, lower, vocabulary, candidates, ids, CAPACITY, BLOCK)
    tl.debug_barrier()
    gathered = (found > 0) & (found <= CAPACITY)
    if gathered:
        row, count = candidates, found
    return row, count, gathered


@triton.jit
def draw_from(row, count, best, temperature, start, end, limited, top_k, top_p, total, number, BLOCK: tl.constexpr):
    """Return the first place in `row`, of `count` logits, whose cumulative weight exceeds `number` / 2**64 of the kept
    weight. Cuts are in the orders [start, end); unless `limited` by top-k, `total` is the weight of the row.
    """
    edge, ties, last = best * 0 + float("-inf"), (number * 0).to(tl.int64), count
    equal = ties
    if limited:
        edge, total, ties, equal = cut_to_number(row, count, best, temperature, start, end, top_k, BLOCK)
    if top_p < 1:
        goal = _share(top_p, total)
        cut = cut_at(row, count, best, temperature, start, end, goal, True, BLOCK)
        lower = scaled_logits(logit_of(cut, row), best, temperature)
        total, _, equal = measure_above(row, count, best, temperature, lower, BLOCK)
        weight = tl.maximum(weight_of(lower), 1)
        ties = tl.minimum((goal - total + weight - 1) // weight, tl.where(lower == edge, ties, equal))
        total += ties * weight
        edge = lower
    if (ties > 0) & (ties < equal):
        last = place_of(row, count, best, temperature, edge, count, ties - 1, True, BLOCK)
    target = tl.umulhi(number, total.to(tl.uint64)).to(tl.int64)
    return place_of(row, count, best, temperature, edge, last, target, False, BLOCK)


@triton.jit
def cut_to_number(row, count, best, temperature, start, end, top_k, BLOCK: tl.constexpr):
    """Return the last scaled logit that top-k keeps, the kept weight, and how many equals are kept, and are there."""
    cut = cut_at(row, count, best, temperature, start, end, top_k, False, BLOCK)
    edge = scaled_logits(logit_of(cut, row), best, temperature)
    total, above, equal = measure_above(row, count, best, temperature, edge, BLOCK)
    ties = top_k - above
    return edge, total + ties * weight_of(edge), ties, equal


@triton.jit
def _share(top_p, total):
    """Return the weight that top-p keeps, at least 1."""
    return tl.maximum(tl.ceil(tl.maximum(top_p, TINY).to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def float_of(bits):
    """Return the float32 with these bits."""
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def random_number(seed, sample, position):
    """Return `ppkernels.sampling.uniform` of the keys, times 2**64."""
    state = _mixed(_mixed(_mixed((seed * 0).to(tl.uint64), seed), sample), position)
    return state >> 12 << 12


@triton.jit
def _mixed(state, key):
    """Return the state of splitmix64 after one more key."""
    state = (state ^ key.to(tl.uint64)) + _GOLDEN
    state = (state ^ (state >> 30)) * _FIRST
    state = (state ^ (state >> 27)) * _SECOND
    return state ^ (state >> 31)
