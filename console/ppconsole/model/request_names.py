"""Requests named by a part of their id: a unique beginning, the end behind `…`, or the id that an HTTP client gave.

Tables shorten long ids to their ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ppengine.protocol.snapshot import Snapshot

_SAMPLE = re.compile(r"\.\d+$")
_CLIENTS = re.compile(r"[a-z]+[-_](.+)-[0-9a-f]{12}(-\d+)?(\.\d+)?")
"""Ids of requests whose HTTP client gave one of its own: it is the first group."""
_PART = re.compile(r"[^\s:=<>!\"]+")
"""One plain word of a filter."""
_SHOWN = 8
"""Most candidates that a refusal lists."""
_CUT = ("…", "...")


def may_be_id(text: str) -> bool:
    """Return whether a filter is one plain word, which may be a part of an id."""
    return _PART.fullmatch(text.strip()) is not None


class AmbiguousError(ValueError):
    """Several requests begin with the text; one line that lists them."""


def whole(text: str, live: Iterable[str], ended: Iterable[str] = ()) -> str:
    """Return the one id that `text` means; `text` itself if it is an id, or if none is like it.

    Live requests come before those that have ended, and continuations of one prompt are one request.
    Raises AmbiguousError.
    """
    live, ended = _with_groups(live), _with_groups(ended)
    if text in live or text in ended or not text.strip("…."):
        return text
    for names in (live, ended):
        found = [name for name in names if means(text, name)]
        # A prompt with several continuations is meant as a whole, unless the text goes into their numbers.
        found = [name for name in found if _SAMPLE.sub("", name) == name or _SAMPLE.sub("", name) not in found]
        if len(found) > 1:
            more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            raise AmbiguousError(f"{text} is ambiguous: {' '.join(found[:_SHOWN])}{more}")
        if found:
            return found[0]
    return text


def whole_in(text: str, snapshot: Snapshot, ended: Iterable[str] = ()) -> str:
    """Return the id that `text` means in a snapshot, as `whole` does.

    Raises AmbiguousError; also if the snapshot lists a part of the requests, and the others may be meant as well.
    """
    states = {request.id: request.state for request in snapshot.requests}
    live = [name for name, state in states.items() if state != "finished"]
    found = whole(text, live, [*(name for name, state in states.items() if state == "finished"), *ended])
    if found != text and found in _with_groups(live) and snapshot.requests_total > len(states):
        listed = f"the first {len(states)} of {snapshot.requests_total} requests"
        raise AmbiguousError(f"{text} may be {found}, but only {listed} are listed; give the whole id")
    return found


def means(text: str, name: str) -> bool:
    """Return whether `text` may name the request with the id `name`."""
    for sign in _CUT:
        if text.startswith(sign):
            return name.endswith(end) if (end := text.removeprefix(sign)) else False
    own = _CLIENTS.fullmatch(name)
    return name.startswith(text) or (own is not None and own[1] == text)


def _with_groups(names: Iterable[str]) -> dict[str, None]:
    """Return names in their order, each continuation `r-1.2` behind the request `r-1` that it is of."""
    found: dict[str, None] = {}
    for name in names:
        found[_SAMPLE.sub("", name)] = None
        found[name] = None
    return found
