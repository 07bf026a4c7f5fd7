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


def matches(request: RequestInfo, text: str) -> bool:
    """Whether every word of `text` is in the id, owner, state or why of the request, and no `!word`; case is all one.

    A `!` alone, as while `!word` is being typed, excludes nothing.
    """
    words = text.casefold().split()
    if not words:
        return True
    why = f"{request.why.code} {request.why.text}" if request.why else ""
    haystack = f"{request.id} {request.owner} {request.state} {why}".casefold()
    return all(_holds(word, haystack) for word in words)


def _holds(word: str, haystack: str) -> bool:
    if word.startswith("!"):
        return word == "!" or word[1:] not in haystack
    return word in haystack


def visible_requests(state: ConsoleState) -> list[RequestInfo]:
    """Return the requests that pass the filter, in the order of the sort key (`arrival`: as the engine lists them)."""
    if state.snapshot is None:
        return []
    shown = [request for request in state.snapshot.requests if matches(request, state.filter)]
    if state.sort == "arrival":
        return shown[::-1] if state.descending else shown
    return sorted(shown, key=_KEYS[state.sort], reverse=state.descending)
