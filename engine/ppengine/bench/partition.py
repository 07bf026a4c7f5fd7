"""How layers would be spread best, by what a layer and all else took on each stage."""

from __future__ import annotations

from collections.abc import Sequence


def best_partition(layers: int, layer_ms: float, extra_ms: Sequence[float]) -> list[int]:
    """Return the layers of each stage with which the longest one takes least, one each at least.

    `extra_ms`: what a micro-batch takes there beside its layers: embedding, head, sampling, sending. Raises ValueError
    for fewer layers than stages.
    """
    stages = len(extra_ms)
    if layers < stages:
        raise ValueError(f"{layers} layers are too few for {stages} stages")
    counts = [1] * stages
    for _ in range(layers - stages):
        # Layers are alike, so it is enough to give each to whoever has it done first.
        counts[min(range(stages), key=lambda stage: (counts[stage] + 1) * layer_ms + extra_ms[stage])] += 1
    return counts


def longest_ms(counts: Sequence[int], layer_ms: float, extra_ms: Sequence[float]) -> float:
    """Return what a micro-batch takes the slowest stage."""
    return max(count * layer_ms + extra for count, extra in zip(counts, extra_ms, strict=True))
