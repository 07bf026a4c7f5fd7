"""Which requests are shown, in which order."""

from __future__ import annotations

from ppengine.protocol.snapshot import RequestInfo

from ppconsole.model.request_fields import FIELDS
from ppconsole.model.sorting import arranged
from ppconsole.model.state import ConsoleState


def visible_requests(state: ConsoleState) -> list[RequestInfo]:
    """Return the requests that pass the filter, in the order of the table."""
    if state.snapshot is None:
        return []
    shown = [request for request in state.snapshot.requests if state.wanted.matches(request)]
    return arranged(shown, state.order, FIELDS)
