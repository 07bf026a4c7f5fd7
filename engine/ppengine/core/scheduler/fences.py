"""Fences: a decision about a request, applied once no step in flight needs its blocks any more."""

from __future__ import annotations

from collections.abc import Callable

from ppengine.core.scheduler.block_tables import BlockTables
from ppengine.core.scheduler.request import Request
from ppengine.core.scheduler.request_queues import RequestQueues
from ppengine.core.scheduler.results import ActionResult, ActionState, Fence, Note, SwapCopies
from ppengine.core.scheduler.step_log import StepLog

NOTES_LIMIT = 1000


class Fences:
    """Sets, applies and cancels fences; keeps their results until the core takes them."""

    def __init__(
        self, steps: StepLog, blocks: BlockTables, queues: RequestQueues, clock: Callable[[], float]
    ) -> None:  # fmt: skip
        self.leaving: dict[Request, None] = {}
        """Fenced requests, ended ones with steps in flight included."""
        self.loading: dict[Request, ActionResult] = {}
        """Results of swap-ins whose copies are in flight."""
        self.preemptions_total = 0
        """Requests that lost their device blocks and did not end, since boot."""
        self.swaps_total = 0
        """Those of them whose blocks went to the host."""
        self.copies_out, self.copies_in = SwapCopies(), SwapCopies()
        """Copies to the host and back that are done."""
        self.retired_step = 0
        self._ended: list[Request] = []
        self._settled: list[ActionResult] = []
        self._notes: list[Note] = []
        self._steps = steps
        self._blocks = blocks
        self._queues = queues
        self._clock = clock

    def now(self) -> float:
        """Return the time of the scheduler's clock."""
        return self._clock()

    def returning(self) -> int:
        """Return an upper limit of the device blocks that will be freed anyway."""
        return sum(len(request.blocks) for request in self.leaving) + self._blocks.pinned

    # --- for the core ---------------------------------------------------------------------------------------

    def settled(self) -> list[ActionResult]:
        """Return the pending results that ended since the last call."""
        settled, self._settled = self._settled, []
        return settled

    def notes(self) -> list[Note]:
        """Return the scheduler's own preemptions and loads since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def take_ended(self) -> list[Request]:
        """Return the requests that an abort has ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def drop_settled(self, result: ActionResult) -> None:
        """Drop a result that its action returns, so that it is not reported twice."""
        self._settled.remove(result)
        if result.verb == "abort":
            self._ended.pop()

    # --- setting --------------------------------------------------------------------------------------------

    def set(self, request: Request, fence: Fence) -> None:
        """Fence `request` and supersede an older fence; apply it if nothing is in flight."""
        self._queues.leave(request)
        old = request.fence
        if old is not None:
            fence.copying = old.copying
            if old.kind == fence.kind == "swap":
                fence.host, old.host = old.host, []
            self._blocks.host.release(old.host)
            self._end(old.result, "superseded", f"{old.by} was superseded by {fence.by}")
        request.fence = fence
        self.leaving[request] = None
        self._queues.unpark(request)
        if not request.in_flight:
            self.apply(request)

    def cancel(self, request: Request, text: str) -> None:
        """Remove a fence that was not applied. Raises ValueError if it is too late."""
        fence = request.fence
        if fence is None or fence.final or fence.copying:
            raise ValueError(f"{request.id} has no fence that can be cancelled")
        self._blocks.host.release(fence.host)
        request.fence = None
        del self.leaving[request]
        self._end(fence.result, "superseded", text)
        request.note(self._clock(), text)

    # --- applying -------------------------------------------------------------------------------------------

    def apply(self, request: Request) -> None:
        """Apply the fence of a request with nothing in flight; a swap starts its copies first."""
        fence = request.fence
        if fence is None:
            return
        if self._blocks.copies is not None:
            self._blocks.copies.end(request)
        if fence.kind == "swap" and not fence.copying and not request.num_computed:
            fence.kind = "recompute"  # A load had begun, and no copy of it had.
        if fence.kind == "swap" and not fence.copying:
            fence.copying = True
            request.begin_phase("swap-out", self._clock(), fence.by)
            host, fence.host = fence.host, []
            self._blocks.copy_out(request, host)
            return
        request.fence = None
        self.leaving.pop(request, None)
        if fence.final:
            self._finish(request, fence)
        elif fence.kind == "recompute":
            self._recompute(request, fence)
        else:
            self._swapped(request, fence)

    def _finish(self, request: Request, fence: Fence) -> None:
        self._give_back(request)
        self._queues.requests.pop(request.id, None)
        if request.finish_reason is None:
            self.mark_finished(request, fence.reason)
            self._ended.append(request)
        self._end(fence.result, "applied", f"{fence.by}: ended after {len(request.output_ids)} tokens")

    def mark_finished(self, request: Request, reason: str) -> None:
        """Set the state of a request to finished; its steps may still be in flight."""
        self._queues.forget(request)
        self._queues.left(request)
        request.state = "finished"
        request.finish_reason = reason
        request.finished_time = self._clock()
        request.note(request.finished_time, f"finished: {reason}")
        self._queues.unpark(request)

    def _recompute(self, request: Request, fence: Fence) -> None:
        blocks = len(request.blocks)
        self._queues.forget(request)
        self._give_back(request)
        request.num_computed = request.num_entered = 0
        request.end_phase("swap-out", self._clock())
        self._settle(request, fence, f"{fence.by}: {blocks} blocks dropped, to be recomputed")
        if not fence.hold:
            self._queues.put_waiting(request)

    def _swapped(self, request: Request, fence: Fence) -> None:
        self._queues.forget(request)
        request.swaps += 1
        self.copies_out.add(len(request.host_blocks), request.end_phase("swap-out", self._clock()))
        self.swaps_total += 1
        self._settle(request, fence, f"{fence.by}: {len(request.host_blocks)} blocks swapped out")
        if not fence.hold:
            self._queues.put_swapped(request)

    def _settle(self, request: Request, fence: Fence, text: str) -> None:
        request.preemptions += 1
        self.preemptions_total += 1
        if fence.hold:
            self._queues.put_held(request, fence.by)
            text += ", held"
        self._notify(request, "preempted", text)
        self._end(fence.result, "applied", text)

    def _give_back(self, request: Request) -> None:
        if request.blocks:
            self._blocks.drop_device(request)
        if request.host_blocks:
            self._blocks.drop_host(request)
        self.let_go(request)
        self._steps.release_slot(request)

    def let_go(self, request: Request) -> None:
        """End the pins of host slots that were fetched for a request."""
        if self._blocks.copies is not None:
            self._blocks.copies.let_go(request)

    def _end(self, result: ActionResult | None, state: ActionState, text: str) -> None:
        if result is not None and result.state == "pending":
            result.state, result.text, result.step = state, text, self.retired_step
            self._settled.append(result)

    def _notify(self, request: Request, kind: str, text: str) -> None:
        request.note(self._clock(), text)
        if len(self._notes) < NOTES_LIMIT:
            self._notes.append(Note(kind, request.id, text))

    # --- swap copies ----------------------------------------------------------------------------------------

    def copied_out(self, request: Request) -> None:
        """Free the device blocks of a request whose copies to the host have retired."""
        fence = request.fence
        if fence is not None and fence.kind != "swap":
            # A later decision superseded the swap while it copied; it frees both kinds of blocks.
            return
        self._blocks.drop_device(request)

    def start_load(self, request: Request) -> None:
        """Give a swapped or held request device blocks; its copies go out with the next step."""
        self._queues.forget(request)
        request.state = "loading"
        request.begin_phase("swap-in", self._clock())
        request.held_by = ""
        self._queues.running[request] = None
        self._blocks.copy_in(request)

    def loaded(self, request: Request) -> None:
        """Let a request run whose copies to the device have retired; free its host blocks."""
        blocks = len(request.host_blocks)
        self._blocks.drop_host(request)
        self.copies_in.add(blocks, request.end_phase("swap-in", self._clock()))
        if not request.finished:
            request.state = "running"
        text = f"{blocks} blocks swapped in"
        self._notify(request, "loaded", text)
        self._end(self.loading.pop(request, None), "applied", text)

    # --- a lost stage ---------------------------------------------------------------------------------------

    def void(self, request: Request, why: str) -> None:
        """Set a request back to be recomputed: with a lost stage, its blocks hold nothing.

        Its fence is applied now. A swap has nothing left to copy and becomes a recompute.
        """
        request.in_flight.clear()
        request.pending = request.late_step = 0
        self.let_go(request)
        if not request.finished:
            request.begin_phase("restart", self._clock(), why)
        fence = request.fence
        self._end(self.loading.pop(request, None), "applied", f"{why}: runs again, recomputed in place of copied")
        if fence is not None:
            self._blocks.host.release(fence.host)
            fence.host, fence.copying = [], False
            if fence.kind == "swap":
                fence.kind, fence.by = "recompute", f"{fence.by}, {why}"
            self.apply(request)
        elif request in self._queues.running:
            self.set(request, Fence("recompute", why))
        elif request.host_blocks:
            self._void_host(request, why)
        elif request in self._queues.aside:
            # Its slots are void, too; the store desk sees that it is not aside.
            self._queues.take_back(request)

    def _void_host(self, request: Request, why: str) -> None:
        """Set a swapped or held request back: one stage's part of its host copies is gone."""
        blocks = len(request.host_blocks)
        self._give_back(request)
        request.num_computed = request.num_entered = 0
        self._notify(request, "recompute", f"{why}: {blocks} host blocks void, to be recomputed")
        if request.state == "swapped":
            self._queues.forget(request)
            self._queues.put_waiting(request)
