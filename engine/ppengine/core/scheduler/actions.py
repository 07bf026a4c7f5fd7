"""What an operator may do to one request: abort, preempt, swap out, swap in, release. Each has a dry run."""

from __future__ import annotations

from ppengine.core.scheduler.fences import Fences
from ppengine.core.scheduler.kv_allocation import KvBlocks
from ppengine.core.scheduler.request import Request
from ppengine.core.scheduler.request_queues import Lines
from ppengine.core.scheduler.results import Effect, Fence, PreemptMode, Refused


class Acts:
    """The verbs. Each checks, fences, and answers with an effect; unknown or ended ids raise KeyError."""

    def __init__(self, kv: KvBlocks, lines: Lines, fences: Fences, *, preemption: PreemptMode, max_seqs: int) -> None:
        self._kv = kv
        self._lines = lines
        self._fences = fences
        self._preemption = preemption
        self._max_seqs = max_seqs
        self.loading: dict[Request, Effect] = {}
        """Effects of swap-ins whose copies are in flight."""

    # --- verbs ----------------------------------------------------------------------------------------------

    def abort(self, request_id: str, by: str) -> Effect:
        """End a request; its blocks come back when nothing of it is in flight."""
        request = self._find(request_id)
        self._not_ending(request)
        return self._fence(request, "abort", Fence("abort", _by("abort", by), reason="abort"))

    def preempt(self, request_id: str, mode: PreemptMode | None, hold: bool, by: str) -> Effect:
        """Take its device blocks: drop them, or move them to the host; `hold` keeps it off afterwards."""
        request = self._find(request_id)
        return self._take(request, "preempt", mode or self._default_mode(request), hold, by)

    def swap_out(self, request_id: str, hold: bool, by: str) -> Effect:
        """Move its device blocks to the host; `hold` keeps it there."""
        return self._take(self._find(request_id), "swap-out", "swap", hold, by)

    def swap_in(self, request_id: str, by: str) -> Effect:
        """Bring its blocks back from the host and let it run."""
        request = self._find(request_id)
        need = self._check_swap_in(request)
        self.begin_load(request)
        request.revision += 1
        effect = Effect("swap-in", request.id, "pending", f"{need} blocks on their way to the device")
        self.loading[request] = effect
        request.note(self._fences.now(), f"{_by('swap-in', by)}: {need} blocks on their way")
        return effect

    def release(self, request_id: str, by: str) -> Effect:
        """End a hold; the rest is the scheduler's business."""
        request = self._find(request_id)
        self._check_release(request)
        request.revision += 1
        text = f"{_by('release', by)}: no longer held"
        fence = request.fence
        if fence is not None:
            fence.hold = False
        elif request.host_blocks:
            self._lines.put_swapped(request)
        else:
            self._lines.put_waiting(request)
        request.held_by = ""
        request.note(self._fences.now(), text)
        return Effect("release", request.id, "applied", text)

    def begin_load(self, request: Request) -> None:
        """Give a swapped or held request device blocks; its copies ride in the next step."""
        self._lines.forget(request)
        request.state = "loading"
        request.held_by = ""
        self._lines.running[request] = None
        self._kv.copy_in(request)

    def _default_mode(self, request: Request) -> PreemptMode:
        """Return the configured mode, or recompute where the host has no room for a swap."""
        if self._preemption == "swap" and not _has_host(request):
            return "swap" if self._kv.swap_need(request) <= self._kv.host.free else "recompute"
        return self._preemption

    # --- dry run --------------------------------------------------------------------------------------------

    def plan(
        self, verb: str, request_id: str, mode: PreemptMode | None, hold: bool | None
    ) -> tuple[list[str], dict[str, float]]:
        """Return what a verb would do now, in words and figures. Raises what the verb itself would raise."""
        request = self._find(request_id)
        if verb == "abort":
            self._not_ending(request)
        elif verb in ("preempt", "swap-out"):
            chosen: PreemptMode = "swap" if verb == "swap-out" else mode or self._default_mode(request)
            self._check_take(request, verb, chosen, verb == "swap-out" if hold is None else hold)
        elif verb == "swap-in":
            self._check_swap_in(request)
        elif verb == "release":
            self._check_release(request)
        else:
            raise Refused("UNSUPPORTED", f"no verb {verb!r} for a request; abort, preempt, swap-out, swap-in, release")
        return self._lines_of(verb, request, mode), self._figures(request)

    def _figures(self, request: Request) -> dict[str, float]:
        device, host = self._kv.device, self._kv.host
        return {
            "blocks": len(request.blocks),
            "blocks_back": self._kv.exclusive(request),
            "blocks_free": device.available,
            "in_flight": len(request.in_flight),
            "host_needed": self._kv.swap_need(request) if request.blocks else 0,
            "host_blocks": len(request.host_blocks),
            "host_free": host.free,
            "computed_tokens": request.num_computed,
            "output_tokens": len(request.output_ids),
            "device_needed": self._kv.load_need(request) if request.host_blocks else 0,
        }

    def _lines_of(self, verb: str, request: Request, mode: PreemptMode | None) -> list[str]:
        figures = self._figures(request)
        lines = [f"{request.id} is {request.state}, {len(request.blocks)} device and {len(request.host_blocks)} host"]
        if verb == "swap-in":
            lines.append(f"takes {figures['device_needed']:.0f} device blocks of {figures['blocks_free']:.0f} free")
        elif verb != "release":
            lines.append(f"{figures['blocks_back']:.0f} device blocks come back")
        swap = verb == "swap-out" or (verb == "preempt" and (mode or self._default_mode(request)) == "swap")
        if swap and request.blocks:
            lines.append(f"takes {figures['host_needed']:.0f} host blocks of {figures['host_free']:.0f} free")
        elif verb == "preempt":
            lines.append(f"{request.num_computed} computed tokens will be recomputed")
        if request.in_flight:
            steps = " ".join(f"m{number}" for number in request.in_flight)
            lines.append(f"after {len(request.in_flight)} steps in flight: {steps}")
        return lines

    # --- checks ---------------------------------------------------------------------------------------------

    def _find(self, request_id: str) -> Request:
        request = self._fences.requests[request_id]
        if request.finished:
            raise KeyError(request_id)
        return request

    @staticmethod
    def _not_ending(request: Request) -> None:
        if request.fence is not None and request.fence.final:
            raise Refused("CONFLICT", f"{request.id} is ending already: {request.fence.by}")

    def _check_take(self, request: Request, verb: str, mode: PreemptMode, hold: bool) -> None:
        self._not_ending(request)
        if request.state == "held":
            raise Refused("CONFLICT", f"{request.id} is held already ({request.held_by}); release it first")
        idle = request.state == "waiting" or (request.state == "swapped" and mode == "swap")
        if idle and not hold:
            raise Refused(
                "INVALID", f"{request.id} is {request.state} and has no device blocks; {verb} would do nothing"
            )
        need, have = self._kv.swap_need(request), self._kv.host.free
        if mode == "swap" and request.blocks and not _has_host(request) and need > have:
            raise Refused(
                "DOES_NOT_FIT",
                f"{request.id} needs {need} host blocks, {have} of {self._kv.host.size} are free; recompute fits",
            )

    def _check_swap_in(self, request: Request) -> int:
        self._not_ending(request)
        if request.fence is not None or not request.host_blocks or request.state not in ("swapped", "held"):
            raise Refused("INVALID", f"{request.id} is {request.state} and holds no blocks on the host alone")
        need, have = self._kv.load_need(request), self._kv.device.available
        if need > have:
            raise Refused("DOES_NOT_FIT", f"{request.id} needs {need} device blocks, {max(have, 0)} are free or cached")
        if len(self._lines.running) >= self._max_seqs:
            raise Refused("DOES_NOT_FIT", f"max_num_seqs is {self._max_seqs} and as many run; release lets it wait")
        return need

    @staticmethod
    def _check_release(request: Request) -> None:
        holding = request.fence is not None and request.fence.hold
        if request.state != "held" and not holding:
            raise Refused("INVALID", f"{request.id} is {request.state}, not held; nothing to release")

    # --- effects --------------------------------------------------------------------------------------------

    def _take(self, request: Request, verb: str, mode: PreemptMode, hold: bool, by: str) -> Effect:
        self._check_take(request, verb, mode, hold)
        author = _by(verb, by)
        if request.state == "waiting" or (request.state == "swapped" and mode == "swap"):
            # Nothing to take from the device: it is only kept off.
            self._lines.forget(request)
            self._lines.unpark(request)
            self._fences.hold(request, author)
            request.revision += 1
            text = f"{author}: held, it had no device blocks"
            request.note(self._fences.now(), text)
            return Effect(verb, request.id, "applied", text)
        fence = Fence(mode, author, hold=hold)
        if mode == "swap" and not _has_host(request):
            fence.host = self._kv.host.allocate(self._kv.swap_need(request))
        return self._fence(request, verb, fence)

    def _fence(self, request: Request, verb: str, fence: Fence) -> Effect:
        steps = " ".join(f"m{number}" for number in request.in_flight)
        waits = f"waits for {steps}" if steps else "copies begin with the next step"
        effect = Effect(verb, request.id, "pending", f"{fence.by}: {waits}")
        fence.effect = effect
        request.revision += 1
        self._fences.set(request, fence)
        if effect.state != "pending":
            self._fences.told(effect)
        return effect


def _has_host(request: Request) -> bool:
    """Return whether host blocks are reserved for its swap, or being written."""
    fence = request.fence
    return fence is not None and (fence.kind == "swap" or fence.copying)


def _by(verb: str, by: str) -> str:
    return f"{verb} by {by}" if by else verb
