"""Shards: every head, column and token has its rank, and sizes that do not work are refused with those that do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ppengine.checkpoint.model_shard import UNIT, Shard, refusal, shard_of
from thread_group import make_spec

SIZES = st.builds(
    dict,
    num_heads=st.sampled_from([1, 6, 8, 12, 32]),
    num_kv_heads=st.sampled_from([1, 2, 4, 8]),
    intermediate_size=st.integers(1, 300),
    vocab_size=st.integers(1, 300),
)


def covers(spans: list[tuple[int, int]], whole: int) -> bool:
    """Return whether `spans` follow each other from 0 to `whole`, none of them empty."""
    begins, ends = [first for first, _ in spans], [end for _, end in spans]
    return begins == [0, *ends[:-1]] and ends[-1] == whole and all(first < end for first, end in spans)


@settings(deadline=None)
@given(fields=SIZES, size=st.integers(1, 16))
def test_ranks_hold_the_whole_model(fields: dict[str, int], size: int) -> None:
    if fields["num_heads"] % fields["num_kv_heads"]:
        fields["num_kv_heads"] = 1
    spec = make_spec(**fields)
    if refusal(spec, size):
        with pytest.raises(ValueError, match=f"parallel.tensor is {size}"):
            shard_of(spec, 0, size)
        return
    shards = [shard_of(spec, rank, size) for rank in range(size)]
    assert covers([shard.heads for shard in shards], spec.num_heads)
    assert covers([shard.inner for shard in shards], spec.intermediate_size)
    assert covers([shard.vocabulary for shard in shards], spec.vocab_size)
    group = spec.num_heads // spec.num_kv_heads
    for shard in shards:
        own = {head // group for head in range(*shard.heads)}
        assert own == set(range(*shard.kv_heads)), "a rank has the KV heads that its query heads read"
        assert shard.num_heads % shard.num_kv_heads == 0
        widths = [end - first for first, end in (each.vocabulary for each in shards)]
        assert shard.vocabulary_widths == widths
        assert max(widths) - min(widths) <= (UNIT if spec.vocab_size % UNIT == 0 else 1)


def test_kv_heads_are_replicated_on_neighbouring_ranks() -> None:
    spec = make_spec(num_heads=8, num_kv_heads=2)
    shards = [shard_of(spec, rank, 4) for rank in range(4)]
    assert [shard.kv_heads for shard in shards] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert [shard.heads for shard in shards] == [(0, 2), (2, 4), (4, 6), (6, 8)]


def test_spans_are_whole_vectors_where_the_width_is() -> None:
    shards = [shard_of(make_spec(intermediate_size=80, vocab_size=131), rank, 4) for rank in range(4)]
    assert [shard.inner for shard in shards] == [(0, 16), (16, 32), (32, 48), (48, 80)]
    assert [shard.vocabulary for shard in shards] == [(0, 32), (32, 65), (65, 98), (98, 131)]


def test_one_rank_has_everything() -> None:
    assert shard_of(make_spec()) == Shard(0, 1, (0, 12), (0, 4), (0, 96), (0, 48), 48)


@pytest.mark.parametrize(
    ("size", "fields", "works"),
    [
        (5, {}, "12 query heads and 4 KV heads split over 1, 2, 4, 12"),
        (8, {}, "12 query heads and 4 KV heads split over 1, 2, 4, 12"),
        (3, {"num_heads": 8, "num_kv_heads": 2}, "8 query heads and 2 KV heads split over 1, 2, 4, 8"),
        (4, {"num_heads": 6, "num_kv_heads": 3}, "6 query heads and 3 KV heads split over 1, 3, 6"),
        (4, {"vocab_size": 3}, "12 query heads and 4 KV heads split over 1, 2"),
        (12, {"intermediate_size": 4}, "12 query heads and 4 KV heads split over 1, 2, 4"),
        (0, {}, "12 query heads and 4 KV heads split over 1, 2, 4, 12"),
    ],
)
def test_sizes_that_work_are_named(size: int, fields: dict[str, int], works: str) -> None:
    assert refusal(make_spec(**fields), size) == f"parallel.tensor is {size}; {works}"
