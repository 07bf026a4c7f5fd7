"""The one scheduler of an engine: requests in, numbered steps out, retirements in, tokens out. Integers only."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

from ppengine.common.config import SchedulerConfig
from ppengine.core.scheduler import invariants
from ppengine.core.scheduler.actions import Acts
from ppengine.core.scheduler.admission import Intake
from ppengine.core.scheduler.batch import Batcher
from ppengine.core.scheduler.block_pool import BlockPool, HostPool
from ppengine.core.scheduler.block_pool_resize import Resizer
from ppengine.core.scheduler.fences import Fences
from ppengine.core.scheduler.kv_allocation import KvBlocks
from ppengine.core.scheduler.request import Request
from ppengine.core.scheduler.request_queues import Lines
from ppengine.core.scheduler.results import (
    Effect,
    Note,
    PreemptMode,
    ResizePlan,
    ResizeReport,
    Retirement,
)
from ppengine.core.scheduler.retirement import Returns
from ppengine.core.scheduler.step_log import Pipeline
from ppengine.core.scheduler.wait_reasons import Situation, why
from ppengine.protocol.snapshot import Queues, Why
from ppengine.protocol.steps import Sampled, Step


class Scheduler:
    """See DESIGN §4. Steps retire in order, and only when every stage has retired them."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        stages: int,
        block_size: int,
        max_model_len: int,
        num_blocks: int,
        num_host_blocks: int,
        eos_token_ids: frozenset[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.paused = False
        """No rows while it is set; copies that effects need go on."""
        self.depth = stages + config.schedule_ahead
        """Micro-batches in flight at most."""
        self._pipeline = Pipeline()
        self._lines = Lines(2 if config.schedule_ahead else 1)
        self._kv = KvBlocks(
            self._pipeline, block_size=block_size, num_blocks=num_blocks, num_host_blocks=num_host_blocks,
            watermark=config.watermark, prefix_caching=config.prefix_caching,
        )  # fmt: skip
        self._fences = Fences(self._pipeline, self._kv, self._lines, clock)
        self._acts = Acts(
            self._kv, self._lines, self._fences, preemption=config.preemption, max_seqs=config.max_num_seqs
        )
        self._resizer = Resizer(self._kv, self._lines, self._fences, floor=self._kv.blocks_for(max_model_len) + 1)
        self._batcher = Batcher(
            config, stages=stages, pipeline=self._pipeline, kv=self._kv, lines=self._lines, fences=self._fences,
            acts=self._acts,
        )  # fmt: skip
        self._intake = Intake(
            config, self._kv, self._lines, self._fences, max_model_len=max_model_len, eos_token_ids=eos_token_ids
        )
        self._returns = Returns(self._pipeline, self._kv, self._lines, self._fences, self._acts)

    # --- requests in ----------------------------------------------------------------------------------------

    def add(self, requests: Sequence[Request]) -> None:
        """Put the samples of one prompt into the line: all of them, or none.

        Raises DoesNotFit when it could never run here, ValueError for an id that is in use.
        """
        self._intake.add(requests)

    def check_fits(self, requests: Sequence[Request]) -> None:
        """Raise what `add` would raise for `requests`; nothing changes."""
        self._intake.check(requests)

    # --- steps out ------------------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """Return the next step; None when nothing can be done now or enough micro-batches are in flight."""
        if self._kv.device.tail_live or self._kv.device.reserve:
            self._resizer.advance()
        rows = []
        if not self.paused and self._pipeline.micro_batches < self.depth:
            rows = self._batcher.fill()
        if not rows and not self._pipeline.urgent:
            return None
        return self._pipeline.emit(rows)

    # --- retirements in -------------------------------------------------------------------------------------

    def retire(self, number: int, sampled: Sequence[Sampled]) -> Retirement:
        """Take back step `number`, retired on every stage. `sampled`: one token a sampling row, in row order.

        Raises ValueError when the step is not the oldest or the samples are not its own.
        """
        return self._returns.retire(number, sampled)

    def finish(self, request_id: str, reason: str) -> None:
        """End a request whose text has met a stop text; tokens still in flight are dropped.

        Raises KeyError for an unknown or finished id.
        """
        request = self.requests[request_id]
        if request.finished:
            raise KeyError(request_id)
        self._returns.end(request, reason)

    # --- a lost stage ---------------------------------------------------------------------------------------

    def restart(self, why: str) -> list[Request]:
        """Begin anew with stages that know nothing: a stage was lost. Returns the requests that end by it.

        Steps in flight are dropped and will not retire; no block, cached one or host block holds anything any more.
        Every request is set back to be recomputed from the tokens that it has, at its place in the line; held ones
        stay held. Effects under way have happened. The next step must be `map_step(device.size)`; an unfinished
        resize is forgotten.
        """
        for record in [*self._pipeline.unretired, self._pipeline.draft]:
            self._kv.unpin(record)
        for request in list(self.requests.values()):
            self._fences.void(request, why, self._acts.loading.pop(request, None))
        self._pipeline.reset()
        self._kv.reset()
        self._resizer.reset()
        self._batcher.reset()
        ended, self._fences.ended = self._fences.ended, []
        return ended

    # --- acts -----------------------------------------------------------------------------------------------

    def abort(self, request_id: str, *, by: str = "") -> Effect:
        """End a request. For all acts: KeyError for an unknown or finished id, Refused where it cannot be done."""
        return self._acts.abort(request_id, by)

    def preempt(self, request_id: str, mode: PreemptMode | None = None, hold: bool = False, *, by: str = "") -> Effect:
        """Take a request's device blocks: drop them (`recompute`) or move them to the host (`swap`)."""
        return self._acts.preempt(request_id, mode, hold, by)

    def swap_out(self, request_id: str, hold: bool = True, *, by: str = "") -> Effect:
        """Move a request's blocks to the host, and hold it there."""
        return self._acts.swap_out(request_id, hold, by)

    def swap_in(self, request_id: str, *, by: str = "") -> Effect:
        """Bring a request's blocks back and let it run."""
        return self._acts.swap_in(request_id, by)

    def release(self, request_id: str, *, by: str = "") -> Effect:
        """End a hold."""
        return self._acts.release(request_id, by)

    def plan_act(
        self,
        verb: Literal["abort", "preempt", "swap-out", "swap-in", "release"],
        request_id: str,
        mode: PreemptMode | None = None,
        hold: bool | None = None,
    ) -> tuple[list[str], dict[str, float]]:
        """Return what the verb would do now, in lines and figures; it raises what the verb would raise."""
        return self._acts.plan(verb, request_id, mode, hold)

    def settled(self) -> list[Effect]:
        """Return the effects that were pending and ended since the last call."""
        return self._fences.settled()

    def notes(self) -> list[Note]:
        """Return what the scheduler did by itself since the last call: preemptions, loads."""
        return self._fences.notes()

    # --- memory ---------------------------------------------------------------------------------------------

    def plan_resize(self, num_blocks: int) -> ResizePlan:
        """Return what a change to `num_blocks` device blocks would do now; nothing changes."""
        return self._resizer.plan(num_blocks)

    def begin_resize(self, num_blocks: int) -> ResizePlan:
        """Begin a change; whatever was under way is superseded. A refused plan changes nothing.

        To shrink: then wait for `resize_ready()`, send `map_step(n)`, and when all have answered `finish_resize(n)`.
        To grow: send `map_step(n)`, then `finish_resize(smallest answer)`.
        """
        return self._resizer.begin(num_blocks)

    def resize_ready(self) -> bool:
        """Return whether nothing live and nothing unretired is at or beyond the new limit."""
        return self._resizer.ready()

    def map_step(self, num_blocks: int) -> Step:
        """Return the step that makes the stages map `num_blocks`. Raises ValueError while the tail is live."""
        self._resizer.mapping(num_blocks)
        return self._pipeline.emit([], map_blocks=num_blocks)

    def checks_step(self, checks: int) -> Step:
        """Return the step from which on exactly these live checks are on in every stage."""
        return self._pipeline.emit([], checks=checks)

    def finish_resize(self, num_blocks: int) -> ResizeReport:
        """End a change: `num_blocks` are mapped on every stage."""
        return self._resizer.finish(num_blocks)

    # --- what it looks like ---------------------------------------------------------------------------------

    @property
    def requests(self) -> dict[str, Request]:
        """Requests that have not ended or still have steps in flight, by id."""
        return self._fences.requests

    @property
    def device(self) -> BlockPool:
        """Device blocks: `used cached free size`."""
        return self._kv.device

    @property
    def host(self) -> HostPool:
        """Host blocks: `used free size`."""
        return self._kv.host

    @property
    def generation(self) -> int:
        """Generation of the stages that steps are for; the core sets it."""
        return self._pipeline.generation

    @generation.setter
    def generation(self, value: int) -> None:
        self._pipeline.generation = value

    @property
    def revision(self) -> int:
        """Revision of the memory that steps carry; the core sets it."""
        return self._pipeline.revision

    @revision.setter
    def revision(self, value: int) -> None:
        self._pipeline.revision = value

    @property
    def admissions(self) -> bool:
        """Whether waiting and swapped requests may begin to run (False: only finish what runs)."""
        return self._batcher.admissions

    @admissions.setter
    def admissions(self, value: bool) -> None:
        self._batcher.admissions = value

    @property
    def cordon(self) -> str:
        """Why no request begins that never ran, in one line; empty: they begin."""
        return self._batcher.cordon

    @cordon.setter
    def cordon(self, why: str) -> None:
        self._batcher.cordon = why

    @property
    def floor(self) -> int:
        """Fewest device blocks that serve one request of the model's length, null block included."""
        return self._resizer.floor

    @property
    def step(self) -> int:
        """Number of the last step that was sent."""
        return self._pipeline.number

    @property
    def steps_in_flight(self) -> list[int]:
        """Numbers of the unretired steps, oldest first."""
        return [record.number for record in self._pipeline.unretired]

    @property
    def preemptions_total(self) -> int:
        """Requests that lost their device blocks and did not end, since boot."""
        return self._fences.preemptions_total

    @property
    def prefix_hit_tokens_total(self) -> int:
        """Tokens that admissions found computed, since boot."""
        return self._kv.hit_tokens_total

    def queues(self) -> Queues:
        """Return how many requests are in each state."""
        return invariants.queues(self._lines, self._fences)

    def why(self, request: Request) -> Why | None:
        """Return why `request` does not run, or what it waits for while it does."""
        situation = Situation(
            self._lines, self._kv, self._pipeline, self.paused, self.config.max_num_seqs, self.depth,
            self._batcher.admissions, self._batcher.cordon, self._batcher.head, self._batcher.starved,
        )  # fmt: skip
        return why(request, situation)

    def owner_of(self, block: int) -> list[Request]:
        """Return the requests whose tables hold `block`."""
        return [request for request in self._fences.requests.values() if block in request.blocks]

    def check(self) -> None:
        """Raise AssertionError on any broken invariant of blocks, slots and queues."""
        invariants.check(self._fences, self._lines, self._kv, self._pipeline)
