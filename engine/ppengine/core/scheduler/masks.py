"""Masks of constrained rows: in their step, or behind it if the grammar process still computes them.

A row that waits for its mask is late. The stages compute it meanwhile, and the last one samples when the masks of all
late rows of its step are there. So a request has one late row at most: the mask behind it depends on its token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ppengine.core.scheduler.request import Request
from ppengine.core.scheduler.request_queues import RequestQueues
from ppengine.core.scheduler.retirement import Retirement, StepRetirer
from ppengine.core.scheduler.step_log import StepLog, StepRecord
from ppengine.protocol.steps import LateMasks, Mask
from ppengine.protocol.token_mask import TokenMask


@dataclass(eq=False)
class Masks:
    """Adds masks to steps, and makes the messages with those that come later."""

    _steps: StepLog
    _queues: RequestQueues
    _retirer: StepRetirer
    _complete: list[LateMasks] = field(init=False, default_factory=list)

    @property
    def awaited(self) -> bool:
        """Whether the oldest micro-batch in flight lacks masks."""
        return next((bool(record.late) for record in self._steps.unretired if record.rows), False)

    @property
    def any_complete(self) -> bool:
        """Whether `complete` has a message."""
        return bool(self._complete)

    def add(self, request: Request) -> None:
        """Add the mask of a row of the draft that samples, or note that it is late. Its sample is pending already.

        Raises ValueError for a request without a slot.
        """
        draft = self._steps.draft
        if request.slot is None:
            raise ValueError(f"{request.id} is scheduled without a slot")
        if request.mask is not None and request.pending == 1:
            _put(draft.masks, request.mask, request.slot)
        else:
            draft.late[request] = request.slot
            request.late_step = draft.number

    def take_all(self, taken: Iterable[tuple[Request, TokenMask, Sequence[int]]], result: Retirement) -> None:
        """Take masks: each is of the token behind the outputs of a request and behind those that its grammar forces.

        Forced tokens go into `result`. A late row samples the first of them for nothing.
        """
        late = {record.number: record for record in self._steps.unretired if record.late}
        resume = self._queues.resume
        for request, mask, forced in taken:
            if forced and not request.finished:
                self._drop(request)
                self._retirer.take_forced(request, forced, result)
            if request.finished:
                continue
            request.mask = mask
            record = late.get(request.late_step) if request.late_step else None
            if record is not None and (slot := record.late.pop(request, None)) is not None:
                _put(record.late_masks, mask, slot)
                request.late_step = 0
                if not record.late:
                    self._end(record)
            resume(request)

    def give_up(self, request: Request) -> None:
        """Let the step of a late row go on without its mask, and schedule the request behind its masks from now on.

        The token before its sample is computed again, once the step has retired.
        """
        request.ahead = False
        if (record := self._late(request)) is not None:
            del record.late[request]
            record.dropped[request] = True
            self._end(record)

    def complete(self) -> list[LateMasks]:
        """Return the messages that are complete since the last call, for the last stage."""
        for record in self._steps.unretired:
            # The token before may have been dropped, and no mask behind it is asked for.
            for request in [one for one in record.late if one.fence is not None and one.fence.final]:
                self._drop(request)
        complete, self._complete = self._complete, []
        return complete

    def _drop(self, request: Request) -> None:
        """Drop the sample of a late row: its token is known, or its request ends."""
        if (record := self._late(request)) is not None:
            del record.late[request]
            record.dropped[request] = False
            request.pending -= 1
            request.late_step = 0
            self._end(record)

    def _late(self, request: Request) -> StepRecord | None:
        """Return the step with a late row of a request; None if there is none, or its mask was given up."""
        if not request.late_step:
            return None
        for record in self._steps.unretired:
            if record.number == request.late_step:
                return record if request in record.late else None
        return None

    def _end(self, record: StepRecord) -> None:
        if not record.late:
            masks, record.late_masks = list(record.late_masks.values()), {}
            self._complete.append(LateMasks(self._steps.generation, record.number, masks))


def _put(masks: dict[int, Mask], mask: TokenMask, slot: int) -> None:
    """Add the mask of a row. One that several rows share is one object: to compare the bits would take longer."""
    known = masks.get(id(mask))
    if known is None:
        masks[id(mask)] = Mask([slot], mask)
    else:
        known.slots.append(slot)
