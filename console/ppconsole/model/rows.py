"""Which requests are shown, in which order. Those that have just ended are the last ones for some seconds."""

from __future__ import annotations

from ppengine.protocol.finished import FinishedInfo
from ppengine.protocol.snapshot import RequestInfo, Snapshot

from ppconsole.model.request_fields import FIELDS
from ppconsole.model.sorting import arranged
from ppconsole.model.state import ConsoleState

ENDED_S, ENDED_MOST = 5.0, 4
"""Seconds for which a request that has ended keeps a row, and most such rows: the newest."""


def visible_requests(state: ConsoleState) -> list[RequestInfo]:
    """Return the requests that pass the filter, in the order of the table; those that have ended come last."""
    if state.snapshot is None:
        return []
    listed = [*state.snapshot.requests, *just_ended(state, state.snapshot)]
    wanted = [request for request in listed if state.wanted.matches(request)]
    return sorted(arranged(wanted, state.order, FIELDS), key=lambda request: request.state == "finished")


def just_ended(state: ConsoleState, snapshot: Snapshot) -> list[RequestInfo]:
    """Return the requests that ended in the last seconds before a snapshot, from their events, the newest first."""
    since, found = snapshot.sampled_at - ENDED_S, dict[str, RequestInfo]()
    listed: set[str] | None = None
    for event in reversed(state.events):
        if event.wall < since or len(found) == ENDED_MOST:
            break
        if (ended := event.finished) is not None:
            listed = {request.id for request in snapshot.requests} if listed is None else listed
            if ended.id not in listed:
                found.setdefault(ended.id, _row_of(ended, snapshot.sampled_at))
    return list(found.values())


def _row_of(ended: FinishedInfo, now: float) -> RequestInfo:
    """Return the row of a request that has ended. Its blocks are free again."""
    return RequestInfo(
        id=ended.id, owner=ended.owner, state="finished", age_s=ended.took_s + max(0.0, now - ended.wall),
        prompt_tokens=ended.prompt_tokens, output_tokens=ended.output_tokens, blocks=0, swap_blocks=0,
        finish_reason=ended.ending, preemptions=ended.preemptions, prepare_s=ended.prepare_s, queue_s=ended.queue_s,
        ttft_s=ended.ttft_s, itl_ms=ended.itl_ms, itl_p99_ms=ended.itl_p99_ms, client=ended.client,
    )  # fmt: skip
