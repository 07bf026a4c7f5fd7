"""The memory of all stages, in the form that the arithmetic of blocks needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ppengine.common.memory_arithmetic import MemoryPlan, StageBudget, fewest_blocks, plan_memory, shortage
from ppengine.protocol.steps import StageReady


@dataclass(frozen=True, slots=True)
class Demand:
    """Bytes that the stages of one device need for more blocks."""

    device: str
    """UUID of a card, or name of a host."""
    card: bool
    stages: list[int]
    bytes: int

    @property
    def stages_text(self) -> str:
        """The stages in words: `stage 1`, `stages 0 and 2`."""
        numbers = [str(stage) for stage in self.stages]
        if len(numbers) == 1:
            return f"stage {numbers[0]}"
        return f"stages {', '.join(numbers[:-1])} and {numbers[-1]}"

    @property
    def device_text(self) -> str:
        """The device in words."""
        owner = "its" if len(self.stages) == 1 else "their"
        return f"{owner} {'card' if self.card else 'host'}"


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
        self._devices = [(stage.device_uuid or stage.host, stage.device_uuid is not None) for stage in stages]
        self._stages = [stage.stage for stage in stages]
        self.block_bytes = sum(stage.block_bytes for stage in stages)
        """Bytes of one block in all stages."""
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

    def demands(self, blocks: int) -> list[Demand]:
        """Return what `blocks` more blocks need of each device, in the order of the stages."""
        made: dict[str, Demand] = {}
        for stage, budget, (device, card) in zip(self._stages, self._budgets, self._devices, strict=True):
            before = made.get(device, Demand(device, card, [], 0))
            more = before.bytes + blocks * budget.block_bytes
            made[device] = Demand(device, card, [*before.stages, stage], more)
        return list(made.values())

    def utilization_of(self, blocks: int) -> float | None:
        """Return the largest utilization in hundredths that maps at most `blocks` and can serve; None without one."""
        fits = (each / 100 for each in range(100, 0, -1) if self.plan(each / 100).mapped <= blocks)
        most = next(fits, None)
        return None if most is None or self.refusal(most) else most
