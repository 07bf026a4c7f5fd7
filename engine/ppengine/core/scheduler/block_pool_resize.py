"""Changes of the number of device blocks while requests run."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from ppengine.core.scheduler.block_tables import BlockTables
from ppengine.core.scheduler.fences import Fences
from ppengine.core.scheduler.request import Request
from ppengine.core.scheduler.request_queues import RequestQueues
from ppengine.core.scheduler.results import Fence, PreemptMode, ResizePlan, ResizeReport
from ppengine.core.scheduler.step_log import StepLog
from ppengine.protocol.steps import Step


@dataclass(slots=True)
class _Victim:
    """A request that a resize has fenced."""

    request: Request
    mode: PreemptMode
    blocks: int
    preemptions: int
    """Its number of preemptions before this one."""

    @property
    def left(self) -> bool:
        """Whether this resize preempted it or will; not if it ended or got another fence."""
        fence = self.request.fence
        return self.request.preemptions > self.preemptions or (fence is not None and fence.resize)


@dataclass(slots=True)
class _Done:
    """Progress of a resize."""

    before: int
    moved: int = 0
    dropped: int = 0
    victims: list[_Victim] = field(default_factory=list)
    cleared: bool = False
    """Whether no staying request has a block in the tail; only copies and fences may."""

    def report(self, after: int) -> ResizeReport:
        """Return the report of its end at `after` blocks."""
        left = [victim for victim in self.victims if victim.left]
        swapped = [victim.blocks for victim in left if victim.mode == "swap"]
        recomputed = [victim.blocks for victim in left if victim.mode == "recompute"]
        return ResizeReport(
            self.before, after, self.dropped, self.moved, len(swapped), sum(swapped), len(recomputed), sum(recomputed)
        )


class BlockPoolResize:
    """Runs one resize at a time; a later one supersedes it.

    To shrink to `n` blocks: `begin(n)`, wait for `ready()`, send `map_step(n)`, and when all stages
    have answered `finish(n)`. To grow: `begin(n)`, send `map_step(n)`, then `finish(smallest
    answer)`.

    A shrink lowers the limit at once and drops cached blocks of the tail. It fences victims, newest
    first, until the other requests fit below the limit. Their blocks in the tail move down as fast
    as lower blocks are freed.
    """

    def __init__(
        self, steps: StepLog, blocks: BlockTables, queues: RequestQueues, fences: Fences, max_model_len: int
    ) -> None:
        self._steps = steps
        self._blocks = blocks
        self._queues = queues
        self._fences = fences
        self._done: _Done | None = None
        self.floor = blocks.blocks_for(max_model_len) + 1
        """Fewest blocks that serve one request of the model's length, null block included."""

    # --- planning -------------------------------------------------------------------------------------------

    def plan(self, target: int) -> ResizePlan:
        """Return the expected outcome of a change to `target` blocks, without starting it."""
        device = self._blocks.device
        plan = ResizePlan(device.size, target)
        if target < self.floor:
            plan.refused = (
                f"{target} blocks are too few: one request of the model's length needs {self.floor - 1} "
                f"and the null block 1; at least {self.floor} would fit"
            )
        if plan.refused or target >= device.size:
            return plan
        owners = self._owners(victims_too=True)
        host_free = self._blocks.host.free
        host_free += sum(len(r.fence.host) for r in self._fences.leaving if r.fence is not None and r.fence.resize)
        victims = self._candidates()
        while len(owners) > target - 1 and victims:
            victim = victims.pop(0)
            need = self._blocks.swap_need(victim)
            mode: PreemptMode = "swap" if 0 < need <= host_free else "recompute"
            if mode == "swap":
                host_free -= need
                plan.swap_requests += 1
                plan.swap_blocks += need
            else:
                plan.recompute_requests += 1
                plan.recompute_blocks += len(victim.blocks)
            plan.victims.append((victim.id, mode))
            for block in victim.blocks:
                owners[block].remove(victim)
                if not owners[block]:
                    del owners[block]
        plan.free_tail, plan.cached_dropped = device.tail_counts(target)
        plan.move = sum(1 for block in owners if block >= target)
        return plan

    def _candidates(self) -> list[Request]:
        """Return possible victims, newest first: unfenced or fenced by an unfinished resize."""
        fenced = [r for r in self._fences.leaving if self._can_cancel(r)]
        return sorted([*self._queues.unfenced(), *fenced], key=Request.order, reverse=True)

    @staticmethod
    def _can_cancel(request: Request) -> bool:
        fence = request.fence
        return fence is not None and fence.resize and not fence.copying

    def _owners(self, first: int = 0, *, victims_too: bool = False) -> dict[int, list[Request]]:
        """Return the staying requests of each used block from `first` on; fenced ones do not count.

        With `victims_too`, victims of an unfinished resize count, for a plan that may cancel their
        fences.
        """
        owners: dict[int, list[Request]] = defaultdict(list)
        for request in self._queues.running:
            if request.fence is None or (victims_too and self._can_cancel(request)):
                for block in request.blocks:
                    if block >= first:
                        owners[block].append(request)
        return dict(owners)

    # --- doing ----------------------------------------------------------------------------------------------

    def begin(self, target: int) -> ResizePlan:
        """Start a change to `target` blocks, unless the plan is refused; supersede another."""
        plan = self.plan(target)
        if plan.refused:
            return plan
        self._cancel_victims()
        device = self._blocks.device
        self._done = _Done(device.size)
        self._done.dropped = device.set_limit(min(target, device.size))
        device.reserve = 0
        self._evict(plan, self._done)
        self.advance()
        return plan

    def _cancel_victims(self) -> None:
        for request in [r for r in self._fences.leaving if self._can_cancel(r)]:
            self._fences.cancel(request, "the resize was superseded")
            self._queues.resume(request)

    def _evict(self, plan: ResizePlan, done: _Done) -> None:
        """Fence the victims of a plan."""
        for request_id, mode in plan.victims:
            request, fence = self._queues.requests[request_id], Fence(mode, "memory resize", resize=True)
            blocks = len(request.blocks)
            if mode == "swap":
                blocks = self._blocks.swap_need(request)
                fence.host = self._blocks.host.allocate(blocks)
            done.victims.append(_Victim(request, mode, blocks, request.preemptions))
            self._fences.set(request, fence)

    def advance(self) -> None:
        """Move live tail blocks down, as far as blocks below the limit are available."""
        device, done = self._blocks.device, self._done
        if done is not None and device.reserve and not device.free + device.cached and self._fences.leaving:
            return
        device.reserve = 0
        if not device.tail_live or done is None or done.cleared:
            return
        owners = self._owners(device.limit)
        tail = sorted(owners)
        left = len(tail)
        for block in tail:
            # It moves when no copy in flight reads it, for all its requests at once.
            if device.references(block) > len(owners[block]):
                continue
            if device.available < 1:
                break
            self._blocks.relocate(block, owners[block])
            done.moved += 1
            left -= 1
        done.cleared = not left
        stuck = left and not device.available and not self._fences.leaving and not self._blocks.pinned
        device.reserve = left
        if stuck:
            self._evict(self.plan(device.limit), done)

    def reset(self) -> None:
        """Drop an unfinished change."""
        self._done = None

    def ready(self) -> bool:
        """Return whether no used block and no copy in flight is at or beyond the limit."""
        return self._blocks.device.tail_live == 0

    def map_step(self, target: int) -> Step:
        """Return the step that lets the stages map `target` blocks; a shrink drops its tail.

        Raises ValueError while the tail is in use.
        """
        self._unmap(target)
        return self._steps.emit([], map_blocks=target)

    def _unmap(self, target: int) -> None:
        device = self._blocks.device
        if target < device.size:
            if device.limit > target or not self.ready():
                raise ValueError(f"blocks at or beyond {target} are still live; wait for ready()")
            device.resize(target)
        elif device.limit < device.size:
            self.begin(device.size)

    def finish(self, size: int) -> ResizeReport:
        """End the resize with `size` blocks mapped on every stage."""
        device = self._blocks.device
        if size < device.size:
            self._unmap(size)
        done = self._done or _Done(device.size)
        if size > device.size:
            device.resize(size)
        self._done = None
        return done.report(size)
