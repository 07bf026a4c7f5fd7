"""The memory of all stages, in the form that the arithmetic of blocks needs."""

from __future__ import annotations

from collections.abc import Iterable

from ppengine.common.memory_arithmetic import MemoryPlan, StageBudget, fewest_blocks, plan_memory, shortage
from ppengine.protocol.steps import StageReady


class Capacity:
    """The memory of all stages, fixed by their profile runs."""

    def __init__(self, ready: Iterable[StageReady], block_size: int, max_model_len: int) -> None:
        stages = sorted(ready, key=lambda stage: (stage.stage, stage.rank))
        self._budgets = [
            StageBudget(
                stage.total_bytes, stage.peak_bytes, stage.block_bytes, stage.quantum_blocks, stage.reserved_blocks
            )
            for stage in stages
        ]
        self.least = fewest_blocks(max_model_len, block_size)
        """Fewest blocks, null block included, that hold one request of the model's length."""
        self.host_blocks = min(stage.swap_blocks for stage in stages)
        self._max_model_len = max_model_len

    def plan(self, utilization: float) -> MemoryPlan:
        """Return the blocks that `utilization` gives."""
        return plan_memory(self._budgets, utilization)

    def refusal(self, utilization: float) -> str | None:
        """Return why not even one sequence fits at `utilization`; None if one does."""
        short = shortage(self._budgets, utilization, self.least)
        if short is None:
            return None
        return (
            f"utilization {utilization:g} leaves {self.plan(utilization).mapped} blocks; one sequence of "
            f"{self._max_model_len} tokens needs {self.least}: {short.text}"
        )
