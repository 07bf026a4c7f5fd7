"""Passes of one program over one row of logits, a tile of BLOCK at a time.

Weights are exp(scaled) as integers, in units of 2**-43 of the best token's. Sums of integers are
the same in any order, so a row gives the same token in any batch, and a sum is exactly the total of
its parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

MAX_VOCABULARY = 2**20
"""Largest vocabulary: the weights of a row must fit an int64."""

UNIT = tl.constexpr(2.0**43)
"""Weight of the best token."""


@triton.jit
def best_of(values, vocabulary, BLOCK: tl.constexpr):
    """Return the best logit of each of BLOCK lanes and of all, and the lowest id of the best."""
    lanes = tl.arange(0, BLOCK)
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    ids = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, vocabulary, BLOCK):
        x = tile_of(values, first + lanes, vocabulary)
        ids = tl.where(x > highest, first + lanes, ids)
        highest = tl.maximum(highest, x)
    best = tl.max(highest)
    return highest, best, tl.min(tl.where(highest == best, ids, vocabulary - 1))


@triton.jit
def gather(values, vocabulary, best, temperature, edge, last, candidates, ids, capacity, BLOCK: tl.constexpr):
    """Write the logits above `edge`, a scaled one, and those that equal it up to the id `last`, with their ids, in
    order. Return their number; the first `capacity` are written.
    """
    lanes = tl.arange(0, BLOCK)
    found = vocabulary * 0
    for first in range(0, vocabulary, BLOCK):
        x = tile_of(values, first + lanes, vocabulary)
        scaled = scaled_logits(x, best, temperature)
        taken = ((scaled > edge) | ((scaled == edge) & (first + lanes <= last))) & (first + lanes < vocabulary)
        number = tl.sum(taken.to(tl.int32))
        if number > 0:
            place = found + tl.cumsum(taken.to(tl.int32), 0) - 1
            fits = taken & (place < capacity)
            tl.store(candidates + place, x.to(values.dtype.element_ty), mask=fits)
            tl.store(ids + place, first + lanes, mask=fits)
        found += number
    return found


@triton.jit
def measure_above(values, vocabulary, best, temperature, edge, BLOCK: tl.constexpr):
    """Return weight and number of the tokens above `edge`, scaled, and how many equal it."""
    lanes = tl.arange(0, BLOCK)
    weight = tl.zeros((BLOCK,), tl.int64)
    above = tl.zeros((BLOCK,), tl.int32)
    equal = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, vocabulary, BLOCK):
        scaled = scaled_logits(tile_of(values, first + lanes, vocabulary), best, temperature)
        weight += tl.where(scaled > edge, weight_of(scaled), 0)
        above += (scaled > edge).to(tl.int32)
        equal += ((scaled == edge) & (first + lanes < vocabulary)).to(tl.int32)
    return tl.sum(weight), tl.sum(above).to(tl.int64), tl.sum(equal).to(tl.int64)


@triton.jit
def cut_at(values, vocabulary, best, temperature, start, end, goal, WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """Return the last order in [start, end) at which weight or number of the logits from it upwards
    reach `goal`.
    """
    lanes = tl.arange(0, BLOCK)
    low, high = start.to(tl.int64), end.to(tl.int64)
    while high - low > 1:
        span = high - low
        one, two, three = low + (span + 3) // 4, low + (span + 1) // 2, low + span * 3 // 4
        from_one = tl.zeros((BLOCK,), tl.int64 if WEIGHT else tl.int32)
        from_two, from_three = from_one, from_one
        for first in range(0, vocabulary, BLOCK):
            x = tile_of(values, first + lanes, vocabulary)
            order = tl.where(first + lanes < vocabulary, order_of(x, values), start - 1)
            measure = from_one * 0 + 1
            if WEIGHT:
                measure = weight_of(scaled_logits(x, best, temperature))
            from_one += tl.where(order >= one.to(tl.int32), measure, 0)
            from_two += tl.where(order >= two.to(tl.int32), measure, 0)
            from_three += tl.where(order >= three.to(tl.int32), measure, 0)
        at_one, at_two, at_three = tl.sum(from_one) >= goal, tl.sum(from_two) >= goal, tl.sum(from_three) >= goal
        high = tl.where(at_three, high, tl.where(at_two, three, tl.where(at_one, two, one)))
        low = tl.where(at_three, three, tl.where(at_two, two, tl.where(at_one, one, low)))
    return low.to(tl.int32)


@triton.jit
def place_of(values, vocabulary, best, temperature, edge, last, target, TIES: tl.constexpr, BLOCK: tl.constexpr):
    """Return the first id at which the cumulative weight of kept tokens (or number of TIES) exceeds
    `target`.
    """
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
def _kept(values, first, vocabulary, best, temperature, edge, last, TIES: tl.constexpr, BLOCK: tl.constexpr):
    """Return the weights [BLOCK] of the tokens from `first` on, 0 if cut off; with TIES, 1 for
    those at the edge.
    """
    ids = first + tl.arange(0, BLOCK)
    scaled = scaled_logits(tile_of(values, ids, vocabulary), best, temperature)
    at_edge = (scaled == edge) & (ids <= last) & (ids < vocabulary)
    if TIES:
        measures = at_edge.to(tl.int64)
    else:
        measures = tl.where((scaled > edge) | at_edge, weight_of(scaled), 0)
    return measures


@triton.jit
def tile_of(values, ids, vocabulary):
    """Return the logits of `ids` in float32, -inf beyond the vocabulary."""
    return tl.load(values + ids, mask=ids < vocabulary, other=float("-inf")).to(tl.float32)


@triton.jit
def scaled_logits(x, best, temperature):
    """Return the logits over the temperature, the best one at 0, rounded as in the reference."""
    return tl.div_rn(x - best, temperature + tl.zeros_like(x))


@triton.jit
def weight_of(scaled):
    """Return the integer weights of scaled logits, 0 for NaN."""
    return tl.where(scaled <= 0, tl.exp(scaled) * UNIT, 0.0).to(tl.int64)


@triton.jit
def order_of(x, values):
    """Return int32 in the order of `x`; neighbours in the type of `values` are consecutive."""
    if values.dtype.element_ty == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
        order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    else:
        half = x.to(values.dtype.element_ty).to(tl.int16, bitcast=True).to(tl.int32)
        order = half ^ ((half >> 31) & 0x7FFF)
    return order


@triton.jit
def logit_of(order, values):
    """Return the float32 whose `order_of` is `order`."""
    if values.dtype.element_ty == tl.float32:
        x = (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    else:
        half = (order ^ ((order >> 31) & 0x7FFF)).to(tl.int16)
        x = half.to(values.dtype.element_ty, bitcast=True).to(tl.float32)
    return x
