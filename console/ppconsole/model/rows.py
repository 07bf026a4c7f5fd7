"""Which requests are shown, in which order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ppengine.protocol.snapshot import RequestInfo

from ppconsole.model.state import ConsoleState, SortKey

_STATES = ("running", "loading", "swapped", "held", "waiting", "finished")

_KEYS: dict[SortKey, Callable[[RequestInfo], Any]] = {
    "id": lambda request: request.id,
    "owner": lambda request: request.owner,
    "state": lambda request: _STATES.index(request.state),
    "age": lambda request: request.age_s,
    "in": lambda request: request.prompt_tokens,
    "out": lambda request: request.output_tokens,
    "blocks": lambda request: request.blocks,
    "swap": lambda request: request.swap_blocks,
}


def visible_requests(state: ConsoleState) -> list[RequestInfo]:
    """Return the requests that pass the filter, in the order of the sort key (`arrival`: as the engine lists them)."""
    if state.snapshot is None:
        return []
    shown = [request for request in state.snapshot.requests if state.wanted.matches(request)]
    if state.sort == "arrival":
        return shown[::-1] if state.descending else shown
    return sorted(shown, key=_KEYS[state.sort], reverse=state.descending)
