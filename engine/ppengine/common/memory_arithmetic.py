"""How many blocks fit: arithmetic alone. Bytes in, blocks out; the agreement between stages is made in blocks.

    capacity = min over stages of floor((total x utilization - peak) / block bytes), rounded down to the quantum

The minimum is taken in blocks, because blocks of different stages have different sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from ppengine.common.sizes import size_text


def block_bytes(
    *, block_size: int, layers: int, kv_heads: int, head_dim: int, dtype_bytes: int, tensor_parallel_size: int = 1
) -> int:
    """Return the bytes of one block on one stage: keys and values of `block_size` tokens in all its layers."""
    # With more ranks than KV heads, each rank has one, replicated.
    return 2 * block_size * layers * max(1, kv_heads // tensor_parallel_size) * head_dim * dtype_bytes


def fewest_blocks(max_model_len: int, block_size: int) -> int:
    """Return the blocks that serve one request of the model's length, null block included."""
    return -(-max_model_len // block_size) + 1


def limit_bytes(total: int, utilization: float) -> int:
    """Return total x utilization, exactly, in whole bytes."""
    return math.floor(total * _exact(utilization))


@dataclass(frozen=True, slots=True)
class StageBudget:
    """Memory of one stage in bytes. `peak`: weights, largest activations and all else that is not KV cache."""

    total: int
    peak: int
    block_bytes: int
    quantum: int = 1
    """Mapping granularity in blocks."""
    reserved: int | None = None
    """Blocks for which addresses are reserved; None: no such limit."""
    name: str = ""
    """Name for operators; empty: `stage` and the index."""

    def capacity(self, utilization: float) -> int:
        """Return the blocks that this stage could hold; 0 when not even its peak fits."""
        fits = max(0, (limit_bytes(self.total, utilization) - self.peak) // self.block_bytes)
        return fits if self.reserved is None else min(fits, self.reserved)

    def bytes_needed(self, blocks: int) -> int:
        """Return total x utilization that holds `blocks` blocks."""
        return self.peak + blocks * self.block_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The result of a utilization: `capacities` of each stage and `blocks`, their minimum, before rounding."""

    utilization: float
    capacities: tuple[int, ...]
    blocks: int
    quantum: int
    mapped: int
    """`blocks` rounded down to the quantum: what all stages map."""
    binding: int
    """Index of the stage that sets the minimum."""


def common_quantum(stages: Sequence[StageBudget]) -> int:
    """Return the smallest number of blocks that is whole handles on every stage."""
    return math.lcm(*(stage.quantum for stage in stages))


def plan_memory(stages: Sequence[StageBudget], utilization: float) -> MemoryPlan:
    """Return the blocks that all `stages` can hold at `utilization`, which is above 0 and at most 1."""
    capacities = tuple(stage.capacity(utilization) for stage in stages)
    blocks = min(capacities)
    quantum = common_quantum(stages)
    return MemoryPlan(utilization, capacities, blocks, quantum, blocks - blocks % quantum, capacities.index(blocks))


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why a number of blocks does not fit: the stage that is short by most, by how much, and what would do."""

    name: str
    short_bytes: int
    utilization: float | None
    """Smallest utilization, in hundredths, that fits; None: not even 1.0 does."""

    @property
    def text(self) -> str:
        """One line for the operator."""
        what = "no utilization would fit" if self.utilization is None else f"at least {self.utilization:.2f} would fit"
        return f"{self.name} is short by {size_text(self.short_bytes)}; {what}"


def shortage(stages: Sequence[StageBudget], utilization: float, blocks: int) -> Shortage | None:
    """Return why `blocks` blocks do not fit at `utilization`; None when they do."""
    if plan_memory(stages, utilization).mapped >= blocks:
        return None
    whole = _round_up(blocks, common_quantum(stages))
    missing = [stage.bytes_needed(whole) - limit_bytes(stage.total, utilization) for stage in stages]
    worst = max(range(len(stages)), key=missing.__getitem__)
    return Shortage(stages[worst].name or f"stage {worst}", max(missing[worst], 0), utilization_needed(stages, blocks))


def utilization_needed(stages: Sequence[StageBudget], blocks: int) -> float | None:
    """Return the smallest utilization, in hundredths, that maps at least `blocks`; None when 1.0 does not."""
    whole = _round_up(blocks, common_quantum(stages))
    if any(stage.reserved is not None and stage.reserved < whole for stage in stages):
        return None
    least = max(Fraction(stage.bytes_needed(whole), stage.total) for stage in stages)
    hundredths = max(1, math.ceil(least * 100))
    return hundredths / 100 if hundredths <= 100 else None


def _round_up(blocks: int, quantum: int) -> int:
    return -(-blocks // quantum) * quantum


def _exact(utilization: float) -> Fraction:
    """Return the decimal that was written: 0.9 as 9/10, so that no byte is lost to binary rounding."""
    return Fraction(repr(utilization))
