"""Block pools: order of allocation, the prefix cache, limits, and 10,000 random operations."""

import random
import struct
from collections import Counter
from hashlib import blake2b

import pytest
from ppengine.core.scheduler.block_pool import BlockPool, HostBlockPool
from ppengine.core.scheduler.request import Request
from ppengine.protocol.sampling import SamplingParams
from scheduler_invariants import check_pool


def chain_digest(parent, tokens):
    """Return the digest of a full block of `tokens` behind the prefix `parent`."""
    return blake2b(parent + struct.pack(f"={len(tokens)}q", *tokens), digest_size=16).digest()


def cache(pool, block, name):
    pool.enter(block, chain_digest(b"", [name]))
    pool.release([block])


def test_null_block_is_never_given():
    pool = BlockPool(4)
    assert [pool.allocate() for _ in range(3)] == [1, 2, 3]
    assert pool.available == 0
    with pytest.raises(IndexError):
        pool.allocate()


def test_lowest_free_block_first():
    pool = BlockPool(6)
    taken = [pool.allocate() for _ in range(5)]
    pool.release([taken[3], taken[1]])
    assert [pool.allocate(), pool.allocate()] == [2, 4]


def test_free_before_cached_and_least_recently_used_cached_first():
    pool = BlockPool(5)
    for _ in range(4):
        pool.allocate()
    for block in (3, 1, 2):
        cache(pool, block, block)
    pool.release([4])
    assert [pool.allocate() for _ in range(4)] == [4, 3, 1, 2]


def test_a_hit_makes_a_cached_block_recently_used():
    pool = BlockPool(4)
    for _ in range(3):
        pool.allocate()
    for block in (1, 2, 3):
        cache(pool, block, block)
    pool.share(1)
    pool.release([1])
    assert [pool.allocate() for _ in range(3)] == [2, 3, 1]


def test_lookup_stops_at_the_first_unknown_block_and_forgets_evicted_ones():
    pool = BlockPool(4)
    names = [chain_digest(b"", [1])]
    names += [chain_digest(names[0], [2])]
    names += [chain_digest(names[1], [3])]
    blocks = [pool.allocate() for _ in range(3)]
    for block, name in zip(blocks, names, strict=True):
        pool.enter(block, name)
    assert pool.lookup(names) == blocks
    pool.release(reversed(blocks))
    pool.allocate()
    # The end of the table was released first, so it is evicted first and the head is still found.
    assert pool.lookup(names) == blocks[:2]


@pytest.mark.parametrize("counts", [(5,), (1, 1, 3, 5), (3, 5)])
def test_digests_of_a_request_are_those_of_its_blocks_one_by_one(counts: tuple[int, ...]):
    request = Request(id="r", prompt_ids=list(range(7, 16)), sampling=SamplingParams(), seed=0)
    request.output_ids.extend([2**31, 1, 2, 70_000, 4, 5, 6, 7, 8, 9, 10, 11])
    expected: list[bytes] = []
    for start in range(0, 20, 4):
        expected.append(chain_digest(expected[-1] if expected else b"", request.tokens(start, start + 4)))
    assert [list(request.full_digests(count, 4)) for count in counts] == [expected[:count] for count in counts]
    assert request.full_digests(2, 4) == expected[:2]


def test_a_second_block_with_the_same_content_stays_private():
    pool = BlockPool(4)
    first, second = pool.allocate(), pool.allocate()
    pool.enter(first, b"same")
    pool.enter(second, b"same")
    pool.release([second])
    assert (pool.cached, pool.free) == (0, 2)
    assert pool.lookup([b"same"]) == [first]


def test_double_release_and_release_of_null_are_errors():
    pool = BlockPool(3)
    block = pool.allocate()
    pool.release([block])
    with pytest.raises(ValueError, match="block 1 is released"):
        pool.release([block])
    with pytest.raises(ValueError, match="block 0"):
        pool.release([0])


def test_limit_withholds_the_tail_and_gives_it_back():
    pool = BlockPool(8)
    taken = [pool.allocate() for _ in range(7)]
    cache(pool, 6, 99)
    pool.release([7, 1])
    assert pool.set_limit(4) == 1
    assert (pool.free, pool.cached, pool.used, pool.withheld, pool.tail_live) == (1, 0, 4, 2, 2)
    assert pool.allocate() == 1
    assert pool.available == 0
    pool.release([taken[4]])
    assert (pool.withheld, pool.tail_live) == (3, 1)
    pool.set_limit(8)
    assert (pool.free, pool.withheld, pool.tail_live) == (3, 0, 0)


def test_resize_refuses_to_lose_a_used_block_and_regrows():
    pool = BlockPool(6)
    taken = [pool.allocate() for _ in range(5)]
    with pytest.raises(ValueError, match="3 blocks at or beyond 3 are still used"):
        pool.resize(3)
    pool.release(taken[2:])
    pool.resize(3)
    assert (pool.size, pool.free, pool.used) == (3, 0, 2)
    pool.resize(9)
    assert (pool.size, pool.free) == (9, 6)
    assert pool.allocate() == 3


def test_relocate_takes_the_digest_along():
    pool = BlockPool(6)
    taken = [pool.allocate() for _ in range(5)]
    pool.enter(5, b"tail")
    pool.share(5)
    pool.release([taken[1]])
    pool.set_limit(4)
    target = pool.relocate(5, owners=2)
    assert (target, pool.references(2), pool.references(5)) == (2, 2, 1)
    assert pool.lookup([b"tail"]) == [2]


def test_ten_thousand_random_operations_lose_and_double_nothing():
    draw, pool, held = random.Random(1), BlockPool(40), Counter()
    for _ in range(10_000):
        match draw.randrange(6):
            case 0 | 1 if pool.available > 0:
                held[pool.allocate()] += 1
            case 2 if held:
                block = draw.choice(list(held))
                pool.share(block)
                held[block] += 1
            case 3 if held:
                block = draw.choice(list(held))
                pool.release([block])
                held -= Counter([block])
            case 4 if held:
                pool.enter(draw.choice(list(held)), bytes([draw.randrange(50)]) * 16)
            case 5 if draw.random() < 0.2:
                pool.set_limit(draw.randint(20, pool.size))
                if not pool.tail_live and draw.random() < 0.5:
                    pool.resize(pool.limit)
                elif draw.random() < 0.5:
                    pool.resize(draw.randint(pool.size, 60))
        check_pool(pool, dict(held))


def test_host_pool():
    pool = HostBlockPool(4)
    first = pool.allocate(3)
    assert first == [0, 1, 2]
    with pytest.raises(IndexError, match="2 host blocks are needed, 1 are free"):
        pool.allocate(2)
    pool.release([1])
    assert pool.allocate(2) == [1, 3]
    with pytest.raises(ValueError, match="host block 9"):
        pool.release([9])
    assert (pool.used, pool.free) == (4, 0)
