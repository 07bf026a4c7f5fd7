"""Fences: what is to become of a request, and doing it once nothing in flight needs its blocks any more."""

from __future__ import annotations

from collections.abc import Callable

from ppengine.core.scheduler.kv_allocation import KvBlocks
from ppengine.core.scheduler.request import Request
from ppengine.core.scheduler.request_queues import Lines
from ppengine.core.scheduler.results import Effect, EffectState, Fence, Note
from ppengine.core.scheduler.step_log import Pipeline

NOTES_LIMIT = 1000


class Fences:
    """Sets, applies and calls off fences; keeps what the core has to hear of them."""

    def __init__(self, pipeline: Pipeline, kv: KvBlocks, lines: Lines, clock: Callable[[], float]) -> None:
        self.requests: dict[str, Request] = {}
        """Requests that have not ended, by id."""
        self.leaving: dict[Request, None] = {}
        """Fenced requests whose device blocks will come back, ended ones that still have steps in flight too."""
        self.ended: list[Request] = []
        """Requests that an abort has ended since the last retirement."""
        self.preemptions_total = 0
        self.retired_step = 0
        self._settled: list[Effect] = []
        self._notes: list[Note] = []
        self._pipeline = pipeline
        self._kv = kv
        self._lines = lines
        self._clock = clock

    def settled(self) -> list[Effect]:
        """Return the pending effects that ended since the last call."""
        settled, self._settled = self._settled, []
        return settled

    def told(self, effect: Effect) -> None:
        """The effect ended inside the act and was its answer: it is not settled a second time."""
        self._settled.remove(effect)
        if effect.verb == "abort":
            self.ended.pop()

    def now(self) -> float:
        """Return the time of the clock that was passed in."""
        return self._clock()

    def notes(self) -> list[Note]:
        """Return what the scheduler did by itself since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def returning(self) -> int:
        """Return at most how many device blocks come back by themselves."""
        return sum(len(request.blocks) for request in self.leaving) + self._kv.pinned

    def tell(self, request: Request, kind: str, text: str) -> None:
        """Write to the history of the request and to the notes."""
        request.note(self._clock(), text)
        if len(self._notes) < NOTES_LIMIT:
            self._notes.append(Note(kind, request.id, text))

    # --- setting --------------------------------------------------------------------------------------------

    def set(self, request: Request, fence: Fence) -> None:
        """Fence `request`: at once if nothing of it is in flight. An older fence is superseded."""
        self._lines.leave(request)
        old = request.fence
        if old is not None:
            fence.copying = old.copying
            if old.kind == fence.kind == "swap":
                fence.host, old.host = old.host, []
            self._kv.host.release(old.host)
            self._end(old.effect, "superseded", f"{old.by} was superseded by {fence.by}")
        request.fence = fence
        self.leaving[request] = None
        self._lines.unpark(request)
        if not request.in_flight:
            self.apply(request)

    def call_off(self, request: Request, text: str) -> None:
        """Take a fence away before it was applied; the request goes on."""
        fence = request.fence
        if fence is None or fence.final or fence.copying:
            raise ValueError(f"{request.id} has no fence that can be called off")
        self._kv.host.release(fence.host)
        request.fence = None
        del self.leaving[request]
        self._end(fence.effect, "superseded", text)
        request.note(self._clock(), text)

    # --- applying -------------------------------------------------------------------------------------------

    def apply(self, request: Request) -> None:
        """Do what the fence says; nothing of the request is in flight."""
        fence = request.fence
        if fence is None:
            return
        if fence.kind == "swap" and not fence.copying:
            fence.copying = True
            host, fence.host = fence.host, []
            self._kv.copy_out(request, host)
            return
        request.fence = None
        self.leaving.pop(request, None)
        if fence.final:
            self._finish(request, fence)
        elif fence.kind == "recompute":
            self._recompute(request, fence)
        else:
            self._swapped(request, fence)

    def copied_out(self, request: Request) -> None:
        """The copies to the host have retired on every stage: the device blocks come back."""
        fence = request.fence
        if fence is not None and fence.kind != "swap":
            # Something else was decided while the copies were under way; it takes both kinds of blocks.
            return
        self._kv.drop_device(request)

    def _finish(self, request: Request, fence: Fence) -> None:
        self._give_back(request)
        self.requests.pop(request.id, None)
        if request.finish_reason is None:
            self.mark_finished(request, fence.reason)
            self.ended.append(request)
        self._end(fence.effect, "applied", f"{fence.by}: ended after {len(request.output_ids)} tokens")

    def mark_finished(self, request: Request, reason: str) -> None:
        """End the request for whoever reads it; what it holds may still be in flight."""
        self._lines.forget(request)
        request.state = "finished"
        request.finish_reason = reason
        request.finished_time = self._clock()
        request.note(request.finished_time, f"finished: {reason}")
        self._lines.unpark(request)

    def _recompute(self, request: Request, fence: Fence) -> None:
        blocks = len(request.blocks)
        self._lines.forget(request)
        self._give_back(request)
        request.num_computed = request.num_entered = 0
        request.preemptions += 1
        self.preemptions_total += 1
        text = f"{fence.by}: {blocks} blocks dropped, to be recomputed"
        self._settle(request, fence, text)
        if not fence.hold:
            self._lines.put_waiting(request)

    def _swapped(self, request: Request, fence: Fence) -> None:
        self._lines.forget(request)
        request.preemptions += 1
        request.swaps += 1
        self.preemptions_total += 1
        text = f"{fence.by}: {len(request.host_blocks)} blocks swapped out"
        self._settle(request, fence, text)
        if not fence.hold:
            self._lines.put_swapped(request)

    def _settle(self, request: Request, fence: Fence, text: str) -> None:
        if fence.hold:
            self.hold(request, fence.by)
            text += ", held"
        self.tell(request, "preempted", text)
        self._end(fence.effect, "applied", text)

    def hold(self, request: Request, by: str) -> None:
        """Keep a request that is in no line any more off until somebody releases it."""
        request.state = "held"
        request.held_by = by

    def _give_back(self, request: Request) -> None:
        if request.blocks:
            self._kv.drop_device(request)
        if request.host_blocks:
            self._kv.drop_host(request)
        self._pipeline.release_slot(request)

    def _end(self, effect: Effect | None, state: EffectState, text: str) -> None:
        if effect is not None and effect.state == "pending":
            effect.state, effect.text, effect.step = state, text, self.retired_step
            self._settled.append(effect)

    # --- a lost stage ---------------------------------------------------------------------------------------

    def void(self, request: Request, why: str, loading: Effect | None) -> None:
        """A stage was lost, so nothing is in flight and no block of `request` holds anything: it is recomputed.

        What its fence was for happens now; a swap has nothing left to copy and becomes a recompute. `loading` is the
        effect of a swap-in under way.
        """
        request.in_flight.clear()
        request.pending = 0
        fence = request.fence
        self._end(loading, "applied", f"{why}: runs again, recomputed in place of copied")
        if fence is not None:
            self._kv.host.release(fence.host)
            fence.host, fence.copying = [], False
            if fence.kind == "swap":
                fence.kind, fence.by = "recompute", f"{fence.by}, {why}"
            self.apply(request)
        elif request in self._lines.running:
            self.set(request, Fence("recompute", why))
        elif request.host_blocks:
            self._void_host(request, why)

    def _void_host(self, request: Request, why: str) -> None:
        """The host copies of a swapped or held request are void, for one stage's part of them is gone."""
        swapped, blocks = request.state == "swapped", len(request.host_blocks)
        self._lines.forget(request)
        self._give_back(request)
        request.num_computed = request.num_entered = 0
        self.tell(request, "recompute", f"{why}: {blocks} host blocks void, to be recomputed")
        if swapped:
            self._lines.put_waiting(request)

    # --- loads ----------------------------------------------------------------------------------------------

    def loaded(self, request: Request, effect: Effect | None) -> None:
        """The copies back from the host have retired: the host blocks come back and the request runs."""
        blocks = len(request.host_blocks)
        self._kv.drop_host(request)
        if not request.finished:
            request.state = "running"
        text = f"{blocks} blocks swapped in"
        self.tell(request, "loaded", text)
        self._end(effect, "applied", text)
