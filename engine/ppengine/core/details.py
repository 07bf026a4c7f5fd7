"""Answers to inspections: one request in full, the ended ones, the block map, the ledger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from ppengine.core.block_map import BlockMap
from ppengine.core.health import Health, NotServingError
from ppengine.core.live_checks import Checks
from ppengine.core.live_requests import LiveRequests
from ppengine.core.outputs import OutputHub
from ppengine.core.request_details import ended_detail, live_detail
from ppengine.core.scheduler import Scheduler
from ppengine.core.stage_records import Stages
from ppengine.protocol.control import Failed, Inspect, Inspected
from ppengine.protocol.inspection import RequestDetail


@dataclass(eq=False)
class Details:
    """Answers inspections of an engine that serves."""

    _health: Health
    _stages: Stages
    _requests: LiveRequests
    _outputs: OutputHub
    _checks: Checks
    _block_map: BlockMap
    _clock: Callable[[], float]

    def answer(self, question: Inspect) -> Inspected | Failed:
        """Return the answer to an Inspect of requests, of the blocks or of the ledger."""
        detail: msgspec.Struct
        nonce = question.nonce
        try:
            serving = self._health.require()
        except NotServingError as error:
            return Failed(nonce=nonce, code="BUSY", text=str(error))
        if question.what == "blocks":
            detail = self._block_map.answer(serving, question.cells, question.request)
        elif question.what == "ledger":
            if question.stage is not None and question.stage >= len(self._stages):
                return Failed(nonce=nonce, code="NOT_FOUND", text=self._stages.unknown(question.stage))
            detail = self._checks.ledger(question.stage)
        elif question.what == "finished":
            detail = self._requests.finished()
        elif question.what == "request":
            name = question.request or ""
            found = self._of_request(serving.scheduler, name)
            if found is None:
                return Failed(nonce=nonce, code="NOT_FOUND", text=self._requests.gone_text(name))
            detail = found
        else:
            return Failed(nonce=nonce, code="UNSUPPORTED", text=f"the core cannot inspect {question.what}")
        return Inspected(nonce=nonce, what=question.what, data=msgspec.Raw(msgspec.msgpack.encode(detail)))

    def _of_request(self, scheduler: Scheduler, name: str) -> RequestDetail | None:
        """Return the detail of a live or ended request; None if there is none of this name."""
        members, output = self._requests.members(name), self._outputs.get(name)
        if members:
            return live_detail(scheduler, members[0], self._clock())
        ending = output.samples[0].ending if output is not None else None
        return ended_detail(output, ending, self._clock()) if output is not None and ending is not None else None
