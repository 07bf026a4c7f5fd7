"""The host cache: slots found by digest, the least recently used evicted, and pins; swaps come first."""

import random
from collections import Counter

import pytest
from ppengine.core.scheduler.block_pool import HostBlockPool
from ppengine.core.scheduler.host_cache import HostCache
from scheduler_invariants import check_host_cache

NAMES = [bytes([index]) * 16 for index in range(20)]


def filled(size, count):
    """Return a cache whose first `count` slots hold the prefix NAMES[:count], its end to be evicted first."""
    cache = HostCache(HostBlockPool(size))
    for name in NAMES[:count]:
        cache.enter(cache.reserve(1)[0], name)
    cache.touch(NAMES[:count])
    return cache


def test_the_longest_known_prefix_is_found():
    cache = filled(6, 3)
    assert cache.lookup(NAMES) == [0, 1, 2]
    assert cache.lookup([NAMES[0], NAMES[9], NAMES[1]]) == [0]
    assert cache.lookup(NAMES[5:]) == []


def test_empty_slots_are_reserved_first_then_the_end_of_the_oldest_prefix():
    cache, evicted = filled(4, 3), []
    cache.on_evict = lambda slot, digest: evicted.append((slot, digest))
    assert cache.oldest(2) == [(2, NAMES[2]), (1, NAMES[1])]
    assert cache.reserve(2) == [3, 2]
    assert evicted == [(2, NAMES[2])]
    assert (cache.cached, cache.moving, cache.evicted_total) == (2, 2, 1)
    assert cache.lookup(NAMES) == [0, 1]


def test_pinned_slots_are_never_evicted():
    cache = filled(3, 3)
    cache.pin([0, 1])
    cache.pin([1])
    assert cache.reserve(2) is None
    assert cache.lookup(NAMES) == [0, 1, 2], "a refused reservation evicts nothing"
    cache.unpin([0, 1])
    assert cache.reserve(2) == [2, 0]
    assert cache.reserve(1) is None
    cache.unpin([1])
    assert cache.reserve(1) == [1]


def test_a_digest_that_is_known_frees_the_second_slot():
    cache = filled(3, 1)
    (slot,) = cache.reserve(1)
    assert not cache.enter(slot, NAMES[0])
    assert (cache.cached, cache.moving, cache.lookup(NAMES)) == (1, 0, [0])


def test_a_swap_takes_cached_slots_and_no_others():
    pool = HostBlockPool(4)
    cache = HostCache(pool)
    first, second = cache.reserve(2)
    cache.enter(first, NAMES[0])
    assert pool.free == 3
    assert pool.allocate(3) == [2, 3, first]
    assert (pool.free, pool.used, cache.cached, cache.moving) == (0, 3, 0, 1)
    with pytest.raises(IndexError, match="1 host blocks are needed, 0 are free"):
        pool.allocate(1)
    cache.release([second])
    assert pool.free == 1


def test_slots_that_something_writes_or_reads_stay_out_of_use_over_a_generation():
    cache = filled(5, 3)
    cache.pin([0])
    late, answered = cache.reserve(2)
    cache.quarantine([late])
    cache.forget_all()
    assert (cache.cached, cache.moving, cache.quarantined) == (0, 3, 2)
    assert sorted(cache.reserve(2)) == [1, 2]
    assert cache.reserve(1) is None
    assert not cache.enter(answered, NAMES[5]), "bytes of an older generation"
    cache.release([late])
    cache.unpin([0])
    assert (cache.quarantined, sorted(cache.reserve(3))) == (0, sorted([0, late, answered]))
    check_host_cache(cache)


def test_misuse_is_an_error():
    cache = filled(3, 1)
    for call in (cache.release, cache.quarantine):
        with pytest.raises(ValueError, match="host slot 0 is not reserved"):
            call([0])
    with pytest.raises(ValueError, match="host slot 1 is not cached"):
        cache.pin([1])
    with pytest.raises(ValueError, match="host slot 0 is not pinned"):
        cache.unpin([0])
    with pytest.raises(ValueError, match="host slot 2 is not reserved"):
        cache.enter(2, NAMES[2])


def test_ten_thousand_random_operations_lose_and_double_nothing():
    draw, pool = random.Random(2), HostBlockPool(16)
    cache, reserved, swapped, pins = HostCache(pool), [], [], Counter()
    for _ in range(10_000):
        match draw.randrange(8):
            case 0:
                taken = cache.reserve(draw.randint(1, 4))
                reserved += taken or []
            case 1 | 2 if reserved:
                cache.enter(reserved.pop(draw.randrange(len(reserved))), draw.choice(NAMES))
            case 3 if reserved:
                cache.release([reserved.pop()])
            case 4 if pool.free > 2:
                swapped += pool.allocate(2)
            case 5 if swapped:
                pool.release([swapped.pop(draw.randrange(len(swapped)))])
            case 6 if cache.cached:
                slots = cache.lookup([draw.choice(NAMES)])
                cache.pin(slots)
                pins.update(slots)
            case 7 if pins:
                slot = draw.choice(list(pins))
                cache.unpin([slot])
                pins -= Counter([slot])
        if draw.random() < 0.01:
            cache.forget_all()
        check_host_cache(cache)
        assert cache._reserved == set(reserved)
        assert cache._pins == pins
