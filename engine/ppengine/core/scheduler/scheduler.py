"""The cycle of the scheduler: admit, schedule, retire; restart after a lost stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ppengine.common.profile_sections import SchedulerConfig
from ppengine.core.scheduler.actions import RequestActions
from ppengine.core.scheduler.admission import Admission
from ppengine.core.scheduler.batch import Batcher
from ppengine.core.scheduler.block_pool_resize import BlockPoolResize
from ppengine.core.scheduler.block_tables import BlockTables
from ppengine.core.scheduler.cache_copies import CacheCopies, HostLimits
from ppengine.core.scheduler.fences import Fences
from ppengine.core.scheduler.masks import Masks
from ppengine.core.scheduler.request import Request
from ppengine.core.scheduler.request_queues import RequestQueues
from ppengine.core.scheduler.retirement import Retirement, StepRetirer
from ppengine.core.scheduler.step_log import StepLog
from ppengine.protocol.steps import Row, Sampled, Step


class Scheduler:
    """The one scheduler of an engine: public parts, and the cycle that joins them."""

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
        host_cache: HostLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`host_cache`: limits of the host cache; None: there is none."""
        self.config = config
        self.paused = False
        """Whether steps get no rows. Copies of earlier actions still go out."""
        self.paused_by = ""
        """Author of the newest pause; empty while there is none."""
        self._stages = stages
        self.depth = stages + config.schedule_ahead
        """Upper limit of micro-batches in flight."""
        self.steps = StepLog()
        self.queues = RequestQueues(max_pending=2 if config.schedule_ahead else 1)
        self.blocks = BlockTables(
            self.steps, block_size=block_size, num_blocks=num_blocks, num_host_blocks=num_host_blocks,
            watermark=config.watermark, prefix_caching=config.prefix_caching, host_cache=host_cache,
        )  # fmt: skip
        self.fences = Fences(self.steps, self.blocks, self.queues, clock)
        self.admission = Admission(config, self.blocks, self.queues, clock, max_model_len, eos_token_ids)
        self.actions = RequestActions(config, self.blocks, self.queues, self.fences)
        self.resize = BlockPoolResize(self.steps, self.blocks, self.queues, self.fences, max_model_len)
        self.retirement = StepRetirer(self.blocks, self.queues, self.fences)
        self.masks = Masks(self.steps, self.queues, self.retirement)
        self.batcher = Batcher(config, stages, self.steps, self.blocks, self.queues, self.fences, self.masks)

    def admit(self, requests: Sequence[Request]) -> None:
        """Queue the samples of one prompt: all of them, or none.

        Raises DoesNotFit if one can never run here, ValueError for an id that is in use.
        """
        self.admission.check(requests)
        for request in requests:
            self.admission.resolve(request)
            self.queues.enqueue(request)

    def restore(self, request: Request) -> None:
        """Queue a request of a core before this one, to be recomputed from its known tokens."""
        self.admission.limit(request)
        self.queues.enter(request)
        if request.held_by:
            self.queues.put_held(request, request.held_by)
        else:
            self.queues.put_waiting(request)

    def schedule(self) -> Step | None:
        """Return the next step; None if nothing can run or enough steps are in flight."""
        self.resize.advance()
        rows = [] if self.paused or self.full else self.batcher.fill()
        if self.blocks.copies is not None:
            self._add_copies(self.blocks.copies, rows)
        return self.steps.emit(rows) if rows or self.steps.urgent else None

    @property
    def full(self) -> bool:
        """Whether enough micro-batches are in flight.

        One behind as many as there are stages begins when the oldest of them has sampled. So it waits for the masks of
        that one: its rows would otherwise leave those out whose masks come a moment later.
        """
        flying = self.steps.micro_batches
        return flying >= self.depth or (flying >= self._stages and self.masks.awaited)

    def _add_copies(self, copies: CacheCopies, rows: list[Row]) -> None:
        """Add copies of the host cache to the draft, which is sent without them if it has `rows` or is urgent.

        Loads make steps of their own, at most `depth` ahead: a request waits for them. Copies to
        the host go along with other steps in batches, since a step for them alone would delay the
        next rows. They get steps of their own, one at a time, once nothing runs. No other step
        would carry the last blocks of a chat, and its next turn begins with them.
        """
        sends = bool(rows) or self.steps.urgent
        if copies.loads and (sends or len(self.steps.unretired) < self.depth):
            copies.add_in(alone=len(self.queues.running) == len(copies.loads))
            sends = sends or self.steps.urgent
        idle = not (self.paused or self.steps.unretired or self.queues.running)
        if idle or (sends and copies.due):
            copies.add_out(self.blocks.watermark + len(self.queues.running), sum(row.count for row in rows))

    def retire(self, number: int, sampled: Sequence[Sampled]) -> Retirement:
        """Retire step `number`, executed by all stages; `sampled` has a token a sampling row.

        Raises ValueError, before any change, if the step is not the oldest or the samples are not
        its own.
        """
        record = self.steps.retire(number, sampled)
        self.fences.retired_step = number
        self.blocks.unpin(record)
        result = Retirement(
            number, prompt_tokens=record.prefill_tokens, copied_out=len(record.entering), copied_in=len(record.filling)
        )
        self.retirement.take_rows(record, sampled, result)
        self.retirement.take_copies(record)
        result.finished += self.fences.take_ended()
        return result

    def restarted(self) -> None:
        """Note that the stages have met: the requests that the restart set back go on."""
        now = self.fences.now()
        for request in self.queues.requests.values():
            request.end_phase("restart", now)

    def pause(self, by: str, *, finish: bool) -> None:
        """Begin no request. `finish`: the running ones go on; otherwise nothing is scheduled."""
        self.paused_by, self.paused, self.batcher.closed = by, not finish, True

    def resume(self) -> None:
        """Undo `pause`."""
        self.paused_by, self.paused, self.batcher.closed = "", False, False

    def restart(self, why: str) -> list[Request]:
        """Set everything back after a lost stage; return the requests that end by it.

        Steps in flight are dropped, and all blocks are empty. Each request goes back to its place
        in the waiting queue and is recomputed from its known tokens; held ones stay held. Pending
        actions take effect. The next step must be `resize.map_step(blocks.device.size)`; an
        unfinished resize is dropped.
        """
        for record in [*self.steps.unretired, self.steps.draft]:
            self.blocks.void(record)
        for request in list(self.queues.requests.values()):
            self.fences.void(request, why)
        self.steps.reset()
        self.blocks.reset()
        self.resize.reset()
        self.batcher.reset()
        return self.fences.take_ended()
