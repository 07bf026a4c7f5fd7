"""Changing the number of device blocks while requests run: logically first to shrink, physically first to grow."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from ppengine.core.scheduler.fences import Fences
from ppengine.core.scheduler.kv_allocation import KvBlocks
from ppengine.core.scheduler.request import Request
from ppengine.core.scheduler.request_queues import Lines
from ppengine.core.scheduler.results import Fence, PreemptMode, ResizePlan, ResizeReport


@dataclass(slots=True)
class _Victim:
    """A request that a resize has fenced, with what it had lost before."""

    request: Request
    mode: PreemptMode
    blocks: int
    preemptions: int

    @property
    def left(self) -> bool:
        """Whether it has left or will: it did not end, or was not taken by something else, in between."""
        fence = self.request.fence
        return self.request.preemptions > self.preemptions or (fence is not None and fence.resize)


@dataclass(slots=True)
class _Done:
    """What a resize has done so far."""

    before: int
    moved: int = 0
    dropped: int = 0
    victims: list[_Victim] = field(default_factory=list)
    cleared: bool = False
    """Nobody who stays has a block in the tail any more; copies and fences there end by themselves."""

    def report(self, after: int) -> ResizeReport:
        """Return the end of it, at `after` blocks."""
        left = [victim for victim in self.victims if victim.left]
        swapped = [victim.blocks for victim in left if victim.mode == "swap"]
        recomputed = [victim.blocks for victim in left if victim.mode == "recompute"]
        return ResizeReport(
            self.before, after, self.moved, self.dropped, len(swapped), sum(swapped), len(recomputed), sum(recomputed)
        )


class Resizer:
    """One resize at a time; a later one supersedes.

    A shrink lowers the limit at once, drops cached blocks of the tail, fences victims (newest first) until what
    stays fits below the limit, and moves what stays in the tail down, as fast as blocks below the limit come back.
    """

    def __init__(self, kv: KvBlocks, lines: Lines, fences: Fences, *, floor: int) -> None:
        self._kv = kv
        self._lines = lines
        self._fences = fences
        self._done: _Done | None = None
        self.floor = floor
        """Fewest blocks that serve one request of the model's length, null block included."""

    @property
    def shrinking(self) -> bool:
        """Whether live blocks have to leave the tail first."""
        return self._kv.device.tail_live > 0

    # --- planning -------------------------------------------------------------------------------------------

    def plan(self, target: int) -> ResizePlan:
        """Return what a change to `target` blocks would do now; nothing changes."""
        device = self._kv.device
        plan = ResizePlan(device.size, target)
        if target < self.floor:
            plan.refused = (
                f"{target} blocks are too few: one request of the model's length needs {self.floor - 1} "
                f"and the null block 1; at least {self.floor} would fit"
            )
        if plan.refused or target >= device.size:
            return plan
        owners = self._owners(victims_too=True)
        host_free = self._kv.host.free
        host_free += sum(len(r.fence.host) for r in self._fences.leaving if r.fence is not None and r.fence.resize)
        victims = self._candidates()
        while len(owners) > target - 1 and victims:
            victim = victims.pop(0)
            need = self._kv.swap_need(victim)
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
        """Return who may be a victim: unfenced requests, and those whom an unfinished resize has fenced."""
        fenced = [r for r in self._fences.leaving if self._can_call_off(r)]
        return sorted([*self._lines.newest_first(), *fenced], key=lambda r: -r.arrival)

    @staticmethod
    def _can_call_off(request: Request) -> bool:
        fence = request.fence
        return fence is not None and fence.resize and not fence.copying

    def _owners(self, first: int = 0, *, victims_too: bool = False) -> dict[int, list[Request]]:
        """Return who stays on each used block from `first` on; whose blocks come back by themselves do not count.

        `victims_too`: those whom an unfinished resize has fenced count, for a plan that may call them back.
        """
        owners: dict[int, list[Request]] = defaultdict(list)
        for request in self._lines.running:
            if request.fence is None or (victims_too and self._can_call_off(request)):
                for block in request.blocks:
                    if block >= first:
                        owners[block].append(request)
        return dict(owners)

    # --- doing ----------------------------------------------------------------------------------------------

    def begin(self, target: int) -> ResizePlan:
        """Begin a change to `target` blocks; an unfinished one is superseded. A refused plan changes nothing."""
        plan = self.plan(target)
        if plan.refused:
            return plan
        self._call_off()
        device = self._kv.device
        self._done = _Done(device.size)
        self._done.dropped = device.set_limit(min(target, device.size))
        device.reserve = 0
        for request_id, mode in plan.victims:
            self._evict(self._fences.requests[request_id], mode)
        self.advance()
        return plan

    def _call_off(self) -> None:
        for request in [r for r in self._fences.leaving if self._can_call_off(r)]:
            self._fences.call_off(request, "the resize was superseded")
            self._lines.resume(request)

    def _evict(self, request: Request, mode: PreemptMode) -> None:
        done = self._done
        if done is None:
            raise ValueError("no resize is under way")
        fence = Fence(mode, "memory resize", resize=True)
        blocks = len(request.blocks)
        if mode == "swap":
            blocks = self._kv.swap_need(request)
            fence.host = self._kv.host.allocate(blocks)
        done.victims.append(_Victim(request, mode, blocks, request.preemptions))
        self._fences.set(request, fence)

    def advance(self) -> None:
        """Move live tail blocks down, as far as blocks below the limit are there."""
        device, done = self._kv.device, self._done
        if done is not None and device.reserve and not device.free + device.cached and self._fences.leaving:
            return
        device.reserve = 0
        if not device.tail_live or done is None or done.cleared:
            return
        owners, holders = self._owners(device.limit), self._holders(device.limit)
        tail = sorted(owners)
        left = len(tail)
        for block in tail:
            # A copy that is in flight reads the block: it moves when that has retired.
            if device.references(block) > holders[block]:
                continue
            if device.available < 1:
                break
            self._kv.relocate(block, owners[block])
            done.moved += 1
            left -= 1
        done.cleared = not left
        stuck = left and not device.available and not self._fences.leaving and not self._kv.pinned
        device.reserve = left
        if stuck:
            self._more_victims()

    def _holders(self, first: int) -> Counter[int]:
        """Return how many tables hold each block from `first` on, those of leaving requests too."""
        requests = dict.fromkeys([*self._lines.running, *self._fences.leaving])
        return Counter(block for request in requests for block in request.blocks if block >= first)

    def _more_victims(self) -> None:
        plan = self.plan(self._kv.device.limit)
        for request_id, mode in plan.victims:
            self._evict(self._fences.requests[request_id], mode)

    def reset(self) -> None:
        """Forget an unfinished change; whoever wants it begins it anew."""
        self._done = None

    def ready(self) -> bool:
        """Return whether nothing live and nothing unretired is at or beyond the limit."""
        return self._kv.device.tail_live == 0

    def mapping(self, target: int) -> None:
        """The stages are told to map `target` blocks: what a shrink gives up is gone from here on."""
        device = self._kv.device
        if target < device.size:
            if device.limit > target or not self.ready():
                raise ValueError(f"blocks at or beyond {target} are still live; wait for resize_ready()")
            device.resize(target)
        elif device.limit < device.size:
            self.begin(device.size)

    def finish(self, size: int) -> ResizeReport:
        """End the resize: `size` blocks are mapped on every stage."""
        device = self._kv.device
        if size < device.size:
            self.mapping(size)
        done = self._done or _Done(device.size)
        if size > device.size:
            device.resize(size)
        self._done = None
        return done.report(size)
