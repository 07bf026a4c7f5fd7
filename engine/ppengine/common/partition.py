"""How layers are cut into stages, so that the slowest stage is as fast as it can be."""

from __future__ import annotations

from collections.abc import Sequence

from ppengine.common.config import ConfigError


def partition_layers(
    num_layers: int, stages: int, partition: list[int] | None = None, *, head: float = 0.0
) -> list[tuple[int, int]]:
    """Return `[start, end)` of each stage.

    `partition`: layers of each stage, as an operator wants it; None cuts so that the longest stage is shortest, where
    the last one has the head to do as well, which takes as long as `head` layers (`ModelSpec.head_layers`). Raises
    ConfigError if a stage would be empty or `partition` does not add up.
    """
    if stages > num_layers:
        raise ConfigError(f"parallel.pipeline is {stages}; the model has {num_layers} layers, so at most that many")
    if partition is None:
        counts = best_partition(num_layers, 1.0, [0.0] * (stages - 1) + [head])
    else:
        counts = partition
        if len(counts) != stages:
            raise ConfigError(f"parallel.partition names {len(counts)} stages, parallel.pipeline is {stages}")
        if min(counts) < 1:
            raise ConfigError(f"parallel.partition is {counts}; every stage needs at least 1 layer")
        if sum(counts) != num_layers:
            raise ConfigError(
                f"parallel.partition {counts} adds up to {sum(counts)} layers, the model has {num_layers}"
            )
    ends = [sum(counts[: stage + 1]) for stage in range(stages)]
    return [(end - count, end) for end, count in zip(ends, counts, strict=True)]


def best_partition(layers: int, layer_ms: float, extra_ms: Sequence[float]) -> list[int]:
    """Return the layers of each stage with which the longest one takes least, one each at least.

    `extra_ms`: time of a micro-batch there beside its layers: embedding, head, sampling, sending. Among equal
    stages, those in the middle get more. Raises ValueError for fewer layers than stages.
    """
    stages = len(extra_ms)
    if layers < stages:
        raise ValueError(f"{layers} layers are too few for {stages} stages")
    centre = (stages - 1) / 2
    counts = [1] * stages
    for _ in range(layers - stages):
        # Layers are alike, so it is enough to give each to whoever has it done first.
        first = min(
            range(stages),
            key=lambda stage: ((counts[stage] + 1) * layer_ms + extra_ms[stage], abs(stage - centre), stage),
        )
        counts[first] += 1
    return counts


def longest_ms(counts: Sequence[int], layer_ms: float, extra_ms: Sequence[float]) -> float:
    """Return what a micro-batch takes the slowest stage."""
    return max(count * layer_ms + extra for count, extra in zip(counts, extra_ms, strict=True))
