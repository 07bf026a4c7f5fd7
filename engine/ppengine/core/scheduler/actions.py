"""An operator's verbs for one request, from abort to release. Each has a dry run."""

from __future__ import annotations

from ppengine.common.profile_sections import SchedulerConfig
from ppengine.common.sizes import counted, size_text
from ppengine.core.scheduler.block_tables import BlockTables
from ppengine.core.scheduler.fences import Fences
from ppengine.core.scheduler.request import Request
from ppengine.core.scheduler.request_queues import RequestQueues
from ppengine.core.scheduler.results import ActionResult, Fence, PreemptMode, Refused, Room
from ppengine.protocol.verbs import Abort, Preempt, Priority, Release, RequestVerb, SwapIn, SwapOut


class RequestActions:
    """Checks a verb, fences the request and returns the result.

    Each verb raises KeyError for an unknown or finished id, Refused if it cannot be done.
    """

    def __init__(self, config: SchedulerConfig, blocks: BlockTables, queues: RequestQueues, fences: Fences) -> None:
        self._blocks = blocks
        self._queues = queues
        self._fences = fences
        self._preemption: PreemptMode = config.preemption
        self._max_seqs = config.max_num_seqs

    # --- verbs ----------------------------------------------------------------------------------------------

    def begin(self, verb: RequestVerb, request_id: str, *, by: str = "") -> ActionResult:
        """Begin a verb on one request, which may be one sample of those that the verb names."""
        match verb:
            case Abort():
                return self.abort(request_id, by=by)
            case Preempt():
                return self.preempt(request_id, verb.mode, verb.hold, by=by)
            case SwapOut():
                return self.swap_out(request_id, verb.hold, by=by)
            case SwapIn():
                return self.swap_in(request_id, by=by)
            case Release():
                return self.release(request_id, by=by)
            case Priority():
                return self.prioritize(request_id, verb.priority, by=by)

    def abort(self, request_id: str, *, by: str = "") -> ActionResult:
        """End a request; its blocks are freed when nothing of it is in flight."""
        request = self._find(request_id)
        self._check_not_ending(request)
        request.aborted_by = by
        return self._fence(request, "abort", Fence("abort", _by("abort", by), reason="abort"))

    def preempt(
        self, request_id: str, mode: PreemptMode | None = None, hold: bool = False, *, by: str = ""
    ) -> ActionResult:
        """Take a request's device blocks: drop or swap them; `hold` keeps it from running."""
        request = self._find(request_id)
        return self._take(request, "preempt", mode or self._default_mode(request), hold, by)

    def swap_out(self, request_id: str, hold: bool = True, *, by: str = "") -> ActionResult:
        """Move a request's device blocks to the host; `hold` keeps them there."""
        return self._take(self._find(request_id), "swap-out", "swap", hold, by)

    def swap_in(self, request_id: str, *, by: str = "") -> ActionResult:
        """Load a request's blocks from the host and let it run."""
        request = self._find(request_id)
        need = self._check_swap_in(request)
        self._fences.start_load(request)
        request.revision += 1
        result = ActionResult("swap-in", request.id, "pending", f"{need} blocks on their way to the device")
        self._fences.loading[request] = result
        request.note(self._fences.now(), f"{_by('swap-in', by)}: {need} blocks on their way")
        return result

    def release(self, request_id: str, *, by: str = "") -> ActionResult:
        """End a hold; the scheduler decides when the request runs."""
        request = self._find(request_id)
        self._check_release(request)
        request.revision += 1
        text = f"{_by('release', by)}: no longer held"
        if request.fence is not None:
            request.fence.hold = False
        else:
            self._queues.forget(request)
            if request.host_blocks:
                self._queues.put_swapped(request)
            else:
                self._queues.put_waiting(request)
        request.held_by = ""
        request.note(self._fences.now(), text)
        return ActionResult("release", request.id, "applied", text)

    def prioritize(self, request_id: str, priority: int, *, by: str = "") -> ActionResult:
        """Change a request's place among those that wait; one that runs takes it when it is queued again."""
        request = self._find(request_id)
        self._check_not_ending(request)
        text = _unchanged(request)
        if priority != request.priority:
            text = f"{_by('priority', by)}: {request.priority} -> {priority}"
            with self._queues.reordering(request):
                request.priority = priority
            request.revision += 1
            request.note(self._fences.now(), text)
        return ActionResult("priority", request.id, "applied", text)

    def _default_mode(self, request: Request) -> PreemptMode:
        """Return the configured mode, or recompute if the host has no room for a swap."""
        if self._preemption == "swap" and not _has_host(request):
            return "swap" if self._blocks.swap_need(request) <= self._blocks.host.free else "recompute"
        return self._preemption

    # --- dry run --------------------------------------------------------------------------------------------

    def plan(self, verb: RequestVerb, request_id: str, block_bytes: int) -> tuple[list[str], dict[str, float]]:
        """Return the expected outcome of a verb in lines and figures; raise as it would.

        `block_bytes`: bytes of one block in all stages.
        """
        request = self._find(request_id)
        self.check(verb, request_id)
        if isinstance(verb, Priority):
            return self._plan_priority(request, verb.priority)
        figures = self.figures(request)
        return self._plan_lines(verb, request, figures, block_bytes), figures

    def check(self, verb: RequestVerb, request_id: str) -> None:
        """Raise Refused if a verb cannot be done now."""
        request = self._find(request_id)
        match verb:
            case Abort() | Priority():
                self._check_not_ending(request)
            case Preempt():
                self._check_take(request, "preempt", verb.mode or self._default_mode(request), verb.hold)
            case SwapOut():
                self._check_take(request, "swap-out", "swap", verb.hold)
            case SwapIn():
                self._check_swap_in(request)
            case Release():
                self._check_release(request)

    def figures(self, request: Request) -> dict[str, float]:
        """Return the blocks and tokens that a verb on a request is about."""
        device, host = self._blocks.device, self._blocks.host
        return {
            "blocks": len(request.blocks),
            "blocks_back": self._blocks.exclusive(request),
            "blocks_free": device.available,
            "in_flight": len(request.in_flight),
            "host_needed": self._blocks.swap_need(request) if request.blocks else 0,
            "host_blocks": len(request.host_blocks),
            "host_free": host.free,
            "computed_tokens": request.num_computed,
            "output_tokens": len(request.output_ids),
            "device_needed": self._blocks.load_need(request) if request.host_blocks else 0,
        }

    def _plan_lines(
        self, verb: RequestVerb, request: Request, figures: dict[str, float], block_bytes: int
    ) -> list[str]:  # fmt: skip
        lines = [f"{request.id} is {request.state}, {len(request.blocks)} device and {len(request.host_blocks)} host"]
        if isinstance(verb, SwapIn):
            lines.append(f"takes {figures['device_needed']:.0f} device blocks of {figures['blocks_free']:.0f} free")
        elif not isinstance(verb, Release):
            lines.append(f"{figures['blocks_back']:.0f} device blocks come back")
        if self._swaps(verb, request) and request.blocks:
            need, free = int(figures["host_needed"]), figures["host_free"]
            lines.append(f"mode swap: takes {need} host blocks ({size_text(need * block_bytes)}) of {free:.0f} free")
        elif isinstance(verb, Preempt):
            size = size_text(len(request.blocks) * block_bytes)
            lines.append(f"mode recompute: {request.num_computed} computed tokens ({size}) are computed again")
        if request.in_flight:
            steps = " ".join(f"m{number}" for number in request.in_flight)
            lines.append(f"after {counted(len(request.in_flight), 'step')} in flight: {steps}")
        return lines

    def room(self) -> Room:
        """Return the free host blocks, device blocks and places, from which verbs take."""
        return Room(
            self._blocks.host.free, self._blocks.device.available, self._max_seqs - len(self._queues.running)
        )  # fmt: skip

    def needs(self, verb: RequestVerb, request_id: str) -> Room:
        """Return the room that a verb takes at once."""
        request = self._find(request_id)
        if isinstance(verb, SwapIn):
            return Room(device=self._blocks.load_need(request), places=1)
        if self._swaps(verb, request) and request.blocks and not _has_host(request):
            return Room(host=self._blocks.swap_need(request))
        return Room()

    def _swaps(self, verb: RequestVerb, request: Request) -> bool:
        """Return whether a verb moves the request's blocks to the host."""
        if isinstance(verb, Preempt):
            return (verb.mode or self._default_mode(request)) == "swap"
        return isinstance(verb, SwapOut)

    def _plan_priority(self, request: Request, priority: int) -> tuple[list[str], dict[str, float]]:
        """Return the place before and after. Samples of one prompt move together and count once."""
        if priority == request.priority:
            return [_unchanged(request)], {"priority": priority}
        lines = [f"{request.id} is {request.state}, priority {request.priority} -> {priority}"]
        figures: dict[str, float] = {"priority_before": request.priority, "priority_after": priority}
        queue = next((queue for queue in (self._queues.waiting, self._queues.swapped) if request in queue), None)
        if queue is None:
            return [*lines, "takes effect when it waits in a queue"], figures
        others = [other.order() for other in queue if other.group != request.group]
        before = 1 + sum(order < request.order() for order in others)
        after = 1 + sum(order < (priority, request.arrival) for order in others)
        lines.append(f"position {before} -> {after} of {len(others) + 1} {request.state}")
        return lines, figures | {"position_before": before, "position_after": after}

    # --- checks ---------------------------------------------------------------------------------------------

    def _find(self, request_id: str) -> Request:
        request = self._queues.requests[request_id]
        if request.finished:
            raise KeyError(request_id)
        return request

    @staticmethod
    def _check_not_ending(request: Request) -> None:
        if request.fence is not None and request.fence.final:
            raise Refused("CONFLICT", f"{request.id} is ending already: {request.fence.by}")

    def _check_take(self, request: Request, verb: str, mode: PreemptMode, hold: bool) -> None:
        self._check_not_ending(request)
        if request.state == "held":
            raise Refused("CONFLICT", f"{request.id} is held already ({request.held_by}); release it first")
        if _has_nothing_to_take(request, mode) and not hold:
            raise Refused(
                "INVALID", f"{request.id} is {request.state} and has no device blocks; {verb} would do nothing"
            )
        need, have = self._blocks.swap_need(request), self._blocks.host.free
        if mode == "swap" and request.blocks and not _has_host(request) and need > have:
            raise Refused(
                "DOES_NOT_FIT",
                f"{request.id} needs {need} host blocks, {have} of {self._blocks.host.size} are free; recompute fits",
            )

    def _check_swap_in(self, request: Request) -> int:
        self._check_not_ending(request)
        if request.fence is not None or not request.host_blocks or request.state not in ("swapped", "held"):
            raise Refused("INVALID", f"{request.id} is {request.state} and holds no blocks on the host alone")
        need, have = self._blocks.load_need(request), self._blocks.device.available
        if need > have:
            raise Refused("DOES_NOT_FIT", f"{request.id} needs {need} device blocks, {max(have, 0)} are free or cached")
        if len(self._queues.running) >= self._max_seqs:
            raise Refused("DOES_NOT_FIT", f"max_num_seqs is {self._max_seqs} and as many run; release lets it wait")
        return need

    @staticmethod
    def _check_release(request: Request) -> None:
        holding = request.fence is not None and request.fence.hold
        if request.state != "held" and not holding:
            raise Refused("INVALID", f"{request.id} is {request.state}, not held; nothing to release")

    # --- execution ------------------------------------------------------------------------------------------

    def _take(self, request: Request, verb: str, mode: PreemptMode, hold: bool, by: str) -> ActionResult:
        self._check_take(request, verb, mode, hold)
        author = _by(verb, by)
        if _has_nothing_to_take(request, mode):
            self._queues.forget(request)
            self._queues.unpark(request)
            self._fences.let_go(request)
            self._queues.put_held(request, author)
            request.revision += 1
            text = f"{author}: held, it had no device blocks"
            request.note(self._fences.now(), text)
            return ActionResult(verb, request.id, "applied", text)
        fence = Fence(mode, author, hold=hold)
        if mode == "swap" and not _has_host(request):
            fence.host = self._blocks.host.allocate(self._blocks.swap_need(request))
        return self._fence(request, verb, fence)

    def _fence(self, request: Request, verb: str, fence: Fence) -> ActionResult:
        steps = " ".join(f"m{number}" for number in request.in_flight)
        waits = f"waits for {steps}" if steps else "copies begin with the next step"
        result = ActionResult(verb, request.id, "pending", f"{fence.by}: {waits}")
        fence.result = result
        request.revision += 1
        self._fences.set(request, fence)
        if result.state != "pending":
            self._fences.drop_settled(result)
        return result


def _unchanged(request: Request) -> str:
    return f"nothing changes: the priority of {request.id} is {request.priority} already"


def _has_nothing_to_take(request: Request, mode: PreemptMode) -> bool:
    """Return whether a preemption in `mode` can only hold: there are no device blocks."""
    return request.state in ("waiting", "finding", "fetching") or (request.state == "swapped" and mode == "swap")


def _has_host(request: Request) -> bool:
    """Return whether host blocks are reserved for its swap, or being written."""
    fence = request.fence
    return fence is not None and (fence.kind == "swap" or fence.copying)


def _by(verb: str, by: str) -> str:
    return f"{verb} by {by}" if by else verb
