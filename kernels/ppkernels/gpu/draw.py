"""Kernels that choose one token a row: greedy, or at random below top-k and top-p, without sorting.

One program reads one row, several times over; a row of 128,256 logits stays in the L2 cache between the passes.
Weights are exp(scaled) as integers, in units of 2**-43 of the best token's: sums of integers are the same in any
order, so a row gives the same token in any batch, and what is compared with a sum really adds up to it.

The cut. Kept are the tokens above some logit, and of those equal to it the ones with the lowest ids. That logit is the
largest one at which a measure (the count for top-k, the weight for top-p) of all logits from it upwards reaches a
goal. It is searched among the integers that order as the logits do, a quarter of the interval a pass. First among the
best of each lane, which gives a bound; what is above the bound is mostly little, and all that follows reads only that.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAX_VOCABULARY = 2**20
"""So that the weights of a row fit an int64."""

TEMPERATURE, TOP_P, TOP_K, SEED, SAMPLE, LOGPROBS, BANNED_UNTIL, BANNED = (tl.constexpr(i) for i in range(8))
"""Columns of the table of parameters; floats are the bits of a float32."""

_UNIT = tl.constexpr(2.0**43)
_TINY = tl.constexpr(1.1754943508222875e-38)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def sample_rows(
    logits: tl.tensor,
    table: tl.tensor,
    slots: tl.tensor,
    positions: tl.tensor,
    tokens: tl.tensor,
    newest: tl.tensor,
    candidates: tl.tensor,
    ids: tl.tensor,
    row_stride: tl.tensor,
    table_stride: tl.tensor,
    vocabulary: tl.tensor,
    NEWEST: tl.constexpr,
    RANDOM: tl.constexpr,
    BANNED_WIDTH: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the token of each row. Without RANDOM all rows are greedy, whatever their temperature.

    `candidates` (of the type of `logits`) and `ids` (int32) are room for CAPACITY >= BLOCK tokens a row.
    """
    row = tl.program_id(0).to(tl.int64)
    values = logits + row * row_stride
    slot = tl.load(slots + row)
    own = table + slot * table_stride
    position = tl.load(positions + row).to(tl.int64)
    banned = tl.load(own + BANNED + tl.arange(0, BANNED_WIDTH))
    bans = (position < tl.load(own + BANNED_UNTIL)) & (banned >= 0) & (banned < vocabulary)
    # Banned tokens leave the row while it is read here, and come back for who reads it next.
    saved = tl.load(values + banned, mask=bans, other=0.0)
    tl.debug_barrier()
    tl.store(values + banned, float("-inf"), mask=bans)
    tl.debug_barrier()
    highest, best, token = best_of(values, vocabulary, BLOCK)
    if RANDOM:
        temperature = _float(tl.load(own + TEMPERATURE))
        if temperature > 0:
            number = _number(tl.load(own + SEED), tl.load(own + SAMPLE), position)
            temperature = tl.maximum(temperature, _TINY)
            top_k, top_p = tl.load(own + TOP_K), _float(tl.load(own + TOP_P))
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
    tl.store(values + banned, saved, mask=bans)


@triton.jit
def _draw(
    values: tl.tensor,
    vocabulary: tl.tensor,
    highest: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    number: tl.tensor,
    candidates: tl.tensor,
    ids: tl.tensor,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return the first token whose cumulative weight, in id order, exceeds `number` / 2**64 of what is kept."""
    end = _order(best, values) + 1
    lowest = best * 0 + float("-inf")
    edge, ties, last = lowest, (number * 0).to(tl.int64), vocabulary
    limited = (top_k > 0) & (top_k < vocabulary)
    row, count, start, gathered = values, vocabulary, _order(lowest, values), vocabulary < 0
    total, above, equal = ties, ties, ties
    if not limited:
        total, above, equal = _above(values, vocabulary, best, temperature, lowest, BLOCK)
    if limited | (top_p < 1):
        # What the best of each lane reach alone, all logits reach: the cut is not below theirs.
        tl.store(candidates + tl.arange(0, BLOCK), highest.to(values.dtype.element_ty))
        tl.debug_barrier()
        worth = limited
        if limited:
            start = _cut(candidates, BLOCK, best, temperature, start, end, top_k, False, BLOCK)
        else:
            # All tokens below `least` weigh less together than what top-p leaves out; a step more for rounding.
            share = (1 - top_p) * (total.to(tl.float32) / (_UNIT * vocabulary))
            least = _order(best + temperature * (tl.log(share) - 1), values) - 1
            start = _cut(candidates, BLOCK, best, temperature, least, end, _share(top_p, total), True, BLOCK)
            # In a flat row they do not reach it, and too many tokens are left to be worth moving.
            worth = start > least
        tl.debug_barrier()
        found = vocabulary * 0
        if worth:
            lower = _scaled(_logit(start, values), best, temperature)
            found = _gather(values, vocabulary, best, temperature, lower, candidates, ids, CAPACITY, BLOCK)
            tl.debug_barrier()
        gathered = (found > 0) & (found <= CAPACITY)
        if gathered:
            row, count = candidates, found
    if limited:
        cut = _cut(row, count, best, temperature, start, end, top_k, False, BLOCK)
        edge = _scaled(_logit(cut, values), best, temperature)
        total, above, equal = _above(row, count, best, temperature, edge, BLOCK)
        ties = top_k - above
        total += ties * _weight(edge)
    if top_p < 1:
        goal = _share(top_p, total)
        cut = _cut(row, count, best, temperature, start, end, goal, True, BLOCK)
        lower = _scaled(_logit(cut, values), best, temperature)
        total, above, equal = _above(row, count, best, temperature, lower, BLOCK)
        weight = tl.maximum(_weight(lower), 1)
        ties = tl.minimum((goal - total + weight - 1) // weight, tl.where(lower == edge, ties, equal))
        total += ties * weight
        edge = lower
    if (ties > 0) & (ties < equal):
        last = _place(row, count, best, temperature, edge, count, ties - 1, True, BLOCK)
    target = tl.umulhi(number, total.to(tl.uint64)).to(tl.int64)
    token = _place(row, count, best, temperature, edge, last, target, False, BLOCK)
    if gathered:
        token = tl.load(ids + token)
    return token


@triton.jit
def _share(top_p: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Return the weight that top-p asks for, 1 at least."""
    return tl.maximum(tl.ceil(tl.maximum(top_p, _TINY).to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _gather(
    values: tl.tensor,
    vocabulary: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    edge: tl.tensor,
    candidates: tl.tensor,
    ids: tl.tensor,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Write the first CAPACITY logits not below `edge` (a scaled one), and their ids, in order; return their number."""
    lanes = tl.arange(0, BLOCK)
    found = vocabulary * 0
    for first in range(0, vocabulary, BLOCK):
        x = _tile(values, first + lanes, vocabulary)
        taken = (_scaled(x, best, temperature) >= edge) & (first + lanes < vocabulary)
        number = tl.sum(taken.to(tl.int32))
        if number > 0:
            place = found + tl.cumsum(taken.to(tl.int32), 0) - 1
            fits = taken & (place < CAPACITY)
            tl.store(candidates + place, x.to(values.dtype.element_ty), mask=fits)
            tl.store(ids + place, first + lanes, mask=fits)
        found += number
    return found


@triton.jit
def best_of(values: tl.tensor, vocabulary: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Return the best logit of each of BLOCK lanes and of all, and the lowest id of the best."""
    lanes = tl.arange(0, BLOCK)
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    ids = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, vocabulary, BLOCK):
        x = _tile(values, first + lanes, vocabulary)
        ids = tl.where(x > highest, first + lanes, ids)
        highest = tl.maximum(highest, x)
    best = tl.max(highest)
    return highest, best, tl.min(tl.where(highest == best, ids, vocabulary - 1))


@triton.jit
def _above(
    values: tl.tensor,
    vocabulary: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    edge: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return weight and number of the tokens above `edge` (a scaled logit), and how many are equal to it."""
    lanes = tl.arange(0, BLOCK)
    weight = tl.zeros((BLOCK,), tl.int64)
    above = tl.zeros((BLOCK,), tl.int32)
    equal = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, vocabulary, BLOCK):
        scaled = _scaled(_tile(values, first + lanes, vocabulary), best, temperature)
        weight += tl.where(scaled > edge, _weight(scaled), 0)
        above += (scaled > edge).to(tl.int32)
        equal += ((scaled == edge) & (first + lanes < vocabulary)).to(tl.int32)
    return tl.sum(weight), tl.sum(above).to(tl.int64), tl.sum(equal).to(tl.int64)


@triton.jit
def _cut(
    values: tl.tensor,
    vocabulary: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    goal: tl.tensor,
    WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return the last integer in [start, end) at which weight or number of the logits from it upwards reach `goal`."""
    lanes = tl.arange(0, BLOCK)
    low, high = start.to(tl.int64), end.to(tl.int64)
    while high - low > 1:
        span = high - low
        one, two, three = low + (span + 3) // 4, low + (span + 1) // 2, low + span * 3 // 4
        from_one = tl.zeros((BLOCK,), tl.int64 if WEIGHT else tl.int32)
        from_two, from_three = from_one, from_one
        for first in range(0, vocabulary, BLOCK):
            x = _tile(values, first + lanes, vocabulary)
            order = tl.where(first + lanes < vocabulary, _order(x, values), start - 1)
            measure = from_one * 0 + 1
            if WEIGHT:
                measure = _weight(_scaled(x, best, temperature))
            from_one += tl.where(order >= one.to(tl.int32), measure, 0)
            from_two += tl.where(order >= two.to(tl.int32), measure, 0)
            from_three += tl.where(order >= three.to(tl.int32), measure, 0)
        at_one, at_two, at_three = tl.sum(from_one) >= goal, tl.sum(from_two) >= goal, tl.sum(from_three) >= goal
        high = tl.where(at_three, high, tl.where(at_two, three, tl.where(at_one, two, one)))
        low = tl.where(at_three, three, tl.where(at_two, two, tl.where(at_one, one, low)))
    return low.to(tl.int32)


@triton.jit
def _place(
    values: tl.tensor,
    vocabulary: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    edge: tl.tensor,
    last: tl.tensor,
    target: tl.tensor,
    TIES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return the first id at which the cumulative weight of what is kept (or number of TIES) exceeds `target`."""
    first, before = vocabulary * 0, target * 0
    measures = _kept(values, first, vocabulary, best, temperature, edge, last, TIES, BLOCK)
    mass = tl.sum(measures)
    while (before + mass <= target) & (first + BLOCK < vocabulary):
        before += mass
        first += BLOCK
        measures = _kept(values, first, vocabulary, best, temperature, edge, last, TIES, BLOCK)
        mass = tl.sum(measures)
    passed = (before + tl.cumsum(measures, 0) <= target).to(tl.int32)
    return tl.minimum(first + tl.sum(passed), vocabulary - 1)


@triton.jit
def _kept(
    values: tl.tensor,
    first: tl.tensor,
    vocabulary: tl.tensor,
    best: tl.tensor,
    temperature: tl.tensor,
    edge: tl.tensor,
    last: tl.tensor,
    TIES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return the weights [BLOCK] of the tokens from `first` on, 0 for what is cut off; or 1 for those at the edge."""
    ids = first + tl.arange(0, BLOCK)
    scaled = _scaled(_tile(values, ids, vocabulary), best, temperature)
    at_edge = (scaled == edge) & (ids <= last) & (ids < vocabulary)
    if TIES:
        measures = at_edge.to(tl.int64)
    else:
        measures = tl.where((scaled > edge) | at_edge, _weight(scaled), 0)
    return measures


@triton.jit
def _tile(values: tl.tensor, ids: tl.tensor, vocabulary: tl.tensor) -> tl.tensor:
    return tl.load(values + ids, mask=ids < vocabulary, other=float("-inf")).to(tl.float32)


@triton.jit
def _scaled(x: tl.tensor, best: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Return the logits at this temperature, the best one at 0, rounded as by the reference."""
    return tl.div_rn(x - best, temperature + tl.zeros_like(x))


@triton.jit
def _weight(scaled: tl.tensor) -> tl.tensor:
    # What is not a number weighs nothing.
    return tl.where(scaled <= 0, tl.exp(scaled) * _UNIT, 0.0).to(tl.int64)


@triton.jit
def _order(x: tl.tensor, values: tl.tensor) -> tl.tensor:
    """Return int32 that order as the float32 `x` do; neighbours in the type of `values` are consecutive."""
    if values.dtype.element_ty == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
        order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    else:
        half = x.to(values.dtype.element_ty).to(tl.int16, bitcast=True).to(tl.int32)
        order = half ^ ((half >> 31) & 0x7FFF)
    return order


@triton.jit
def _logit(order: tl.tensor, values: tl.tensor) -> tl.tensor:
    """Return the float32 of which `_order` made `order`."""
    if values.dtype.element_ty == tl.float32:
        x = (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    else:
        half = (order ^ ((order >> 31) & 0x7FFF)).to(tl.int16)
        x = half.to(values.dtype.element_ty, bitcast=True).to(tl.float32)
    return x


@triton.jit
def _float(bits: tl.tensor) -> tl.tensor:
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _number(seed: tl.tensor, sample: tl.tensor, position: tl.tensor) -> tl.tensor:
    """Return `ppkernels.sampling.uniform` of the keys, times 2**64."""
    state = _mixed(_mixed(_mixed((seed * 0).to(tl.uint64), seed), sample), position)
    return state >> 12 << 12


@triton.jit
def _mixed(state: tl.tensor, key: tl.tensor) -> tl.tensor:
    """Return splitmix64 of a state and one more key."""
    state = (state ^ key.to(tl.uint64)) + _GOLDEN
    state = (state ^ (state >> 30)) * _FIRST
    state = (state ^ (state >> 27)) * _SECOND
    return state ^ (state >> 31)
