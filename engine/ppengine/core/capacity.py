"""The memory of all places, in the form that the arithmetic of blocks needs."""

from __future__ import annotations

from dataclasses import dataclass

from ppengine.common.memory_arithmetic import MemoryPlan, StageBudget, fewest_blocks, plan_memory, shortage
from ppengine.core.stage_records import Stages
from ppengine.protocol.place import Place


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
    """The memory of all places, fixed by their profile runs."""

    def __init__(self, stages: Stages, block_size: int, max_model_len: int) -> None:
        ready = stages.ready
        groups = stages.groups
        self._budgets = [
            StageBudget(
                each.total_bytes,
                each.peak_bytes,
                each.block_bytes,
                each.quantum_blocks,
                each.reserved_blocks,
                groups.text(Place(each.stage, each.rank)),
            )
            for each in ready
        ]
        self._devices = [(each.device_uuid or each.host, each.device_uuid is not None) for each in ready]
        self._stages = [each.stage for each in ready]
        self.block_bytes = sum(each.block_bytes for each in ready)
        """Bytes of one block in all places."""
        self.most_block_bytes = max(each.block_bytes for each in ready)
        """Bytes of one block in the place that has most."""
        self.least = fewest_blocks(max_model_len, block_size)
        """Fewest blocks, null block included, that hold one request of the model's length."""
        self.host_blocks = min(each.swap_blocks for each in ready)
        self._max_model_len = max_model_len

    def plan(self, utilization: float) -> MemoryPlan:
        """Return the blocks that `utilization` gives."""
        return plan_memory(self._budgets, utilization)

    def binding(self, memory: MemoryPlan) -> str:
        """Return the name of the place that sets the minimum of a plan."""
        return self._budgets[memory.binding].name

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
            named = before.stages if stage in before.stages else [*before.stages, stage]
            made[device] = Demand(device, card, named, more)
        return list(made.values())

    def utilization_of(self, blocks: int) -> float | None:
        """Return the largest utilization in hundredths that maps at most `blocks` and can serve; None without one."""
        fits = (each / 100 for each in range(100, 0, -1) if self.plan(each / 100).mapped <= blocks)
        most = next(fits, None)
        return None if most is None or self.refusal(most) else most
