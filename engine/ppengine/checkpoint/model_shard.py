"""The share of a model that one tensor rank has: heads, columns of the MLP and rows of the vocabulary.

Query heads are split evenly. With fewer KV heads than ranks, a KV head is replicated on the ranks
whose query heads read it. MLP and vocabulary may be split unevenly; that changes no result.
"""

from __future__ import annotations

from dataclasses import dataclass

from ppengine.checkpoint.model_spec import ModelSpec

UNIT = 16
"""Columns and rows are split in multiples of this, where the width is one: kernels read whole vectors."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Half-open spans of rank `rank` of `size`."""

    rank: int
    size: int
    heads: tuple[int, int]
    kv_heads: tuple[int, int]
    inner: tuple[int, int]
    """Columns of the MLP."""
    vocabulary: tuple[int, int]
    vocab_size: int
    """Rows of the whole vocabulary."""

    @property
    def num_heads(self) -> int:
        """Query heads of this rank."""
        return self.heads[1] - self.heads[0]

    @property
    def num_kv_heads(self) -> int:
        """KV heads of this rank, replicated ones among them."""
        return self.kv_heads[1] - self.kv_heads[0]

    @property
    def vocabulary_widths(self) -> list[int]:
        """Rows of the vocabulary by rank."""
        spans = (_span(self.vocab_size, rank, self.size) for rank in range(self.size))
        return [end - first for first, end in spans]


def shard_of(spec: ModelSpec, rank: int = 0, size: int = 1) -> Shard:
    """Return the share of `rank` of `size`. Raises ValueError with the sizes that work, see `refusal`."""
    if text := refusal(spec, size):
        raise ValueError(text)
    heads, kv = spec.num_heads // size, spec.num_kv_heads
    first_kv = rank * kv // size
    return Shard(
        rank=rank,
        size=size,
        heads=(rank * heads, (rank + 1) * heads),
        kv_heads=(first_kv, first_kv + max(1, kv // size)),
        inner=_span(spec.intermediate_size, rank, size),
        vocabulary=_span(spec.vocab_size, rank, size),
        vocab_size=spec.vocab_size,
    )


def refusal(spec: ModelSpec, size: int) -> str:
    """Return why the model cannot be split over `size` ranks, with the numbers that work; empty if it can."""
    if _splits(spec, size):
        return ""
    works = ", ".join(str(each) for each in range(1, spec.num_heads + 1) if _splits(spec, each))
    return (
        f"parallel.tensor is {size}; {spec.num_heads} query heads and {spec.num_kv_heads} KV heads split over {works}"
    )


def _splits(spec: ModelSpec, size: int) -> bool:
    heads, kv = spec.num_heads, spec.num_kv_heads
    if size < 1 or heads % size or (kv % size and size % kv):
        return False
    return size <= min(spec.vocab_size, spec.intermediate_size)


def _span(width: int, rank: int, size: int) -> tuple[int, int]:
    """Return the columns of `rank`, as even as whole units allow."""
    unit = UNIT if width % UNIT == 0 and width // UNIT >= size else 1
    units = width // unit
    return rank * units // size * unit, (rank + 1) * units // size * unit
