"""Many lines as one: those that differ by their stage alone, and ends of requests that follow each other."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from ppengine.protocol.severity import is_routine
from ppengine.protocol.snapshot import Event

_STAGE = re.compile(r"\bstage (\d+)(?: rank (\d+))?(?: \(pid \d+\))?(?= (?:was|is|ended)\b)")

_BLOCKS = re.compile(r"\b\d+ blocks dropped, ")
_VERDICTS = ("verdict.raised", "verdict.cleared")
_SUBMITTED, _MANY = "submitted", 4
"""Submissions that follow each other are one line from this number on."""
_OVER = "over: "
_SUFFERERS = ("starved", "blocked")


def alike(texts: Iterable[str]) -> list[str]:
    """Return the texts in their order; those about the end of a stage that are the same but for it, once."""
    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault(_STAGE.sub("stage", text, count=1), []).append(text)
    return [_one(group) for group in groups.values()]


def folded(events: Iterable[Event]) -> list[Event]:
    """Return events, each run of those that are the same but for their stage as its last one with all stages."""
    found = []
    for _, run in groupby(events, lambda event: (event.kind, event.by, _STAGE.sub("stage", event.text, count=1))):
        group = list(run)
        last = group[-1]
        if len({_place(event.text) or event.stage for event in group}) == len(group) > 1:
            text = _one([event.text for event in group])
            last = Event(seq=last.seq, wall=last.wall, kind=last.kind, text=text, by=last.by, step=last.step)
            found.append(last)
        else:
            found += group
    return found


def counted(events: Iterable[Event], singly: int) -> list[Event]:
    """Return events, each run of ends of requests as a count, and the newest `singly` of them one by one."""
    found: list[Event] = []
    for routine, run in groupby(events, is_routine):
        group = list(run)
        if routine and len(group) > singly + 1:
            found.append(_count(group[: len(group) - singly]))
            group = group[len(group) - singly :]
        found += group
    return found


def gathered(events: Iterable[Event]) -> list[Event]:
    """Return events, each run of consequences of one fault as one line, and each run of requests that it hit.

    Without it the log of a small screen has these alone, and not the fault.
    """
    found: list[Event] = []
    for key, run in groupby(events, _consequence):
        group = list(run)
        found += [_gathered(key, group)] if key and len(group) >= (_MANY if key == _SUBMITTED else 2) else group
    return found


def _consequence(event: Event) -> str:
    """Return the words that consequences of one sort share: `starved`, `over: starved`; empty: it is none."""
    if event.kind in _VERDICTS:
        cause = event.text.removeprefix(_OVER).partition(":")[0].partition(",")[0]
        return event.text[: event.text.index(cause)] + cause if cause in _SUFFERERS else ""
    if event.kind == "op.applied" and event.text.startswith("submit "):
        return _SUBMITTED
    if event.kind == "request.preempted" and event.request and not event.by:
        return _BLOCKS.sub("", event.text.removeprefix(f"{event.request} "))
    return ""


def _gathered(key: str, group: Sequence[Event]) -> Event:
    last = group[-1]
    if last.kind in _VERDICTS:
        places = sorted({found for event in group if (found := _place(event.text)) is not None})
        text = f"{key}: stages {_names(places)}"
    elif key == _SUBMITTED:
        by = {event.by for event in group}
        author = f" by {len(by)} users" if len(by) > 1 else ""
        return Event(
            seq=last.seq, wall=last.wall, kind=last.kind, text=f"submitted {len(group)} requests{author}",
            by=last.by if len(by) == 1 else "",
        )  # fmt: skip
    else:
        text = f"{len(group)} requests: {key}"
    return Event(seq=last.seq, wall=last.wall, kind=last.kind, text=text)


def _count(ends: Sequence[Event]) -> Event:
    """Return one event for the ends of several requests: `37 requests ended: 20 stop, 12 length, 5 abort`."""
    reasons = Counter(
        event.text.removeprefix(f"{event.request} ").partition(",")[0].partition(" ")[0].rstrip(":") for event in ends
    )
    named = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
    last = ends[-1]
    return Event(seq=last.seq, wall=last.wall, kind=last.kind, text=f"{len(ends)} requests ended: {named}")


def _one(texts: list[str]) -> str:
    """Return one text for several that differ by their stage."""
    places = sorted({found for text in texts if (found := _place(text)) is not None})
    if len(places) < 2:
        return texts[0]
    return _plural(texts[0], _names(places))


def _names(places: Sequence[tuple[int, int]]) -> str:
    """Return stages, or ranks of them, as a list: `0, 2 and 3`, `0 to 3`, `0.1 and 1.0`."""
    ranked = any(rank >= 0 for _, rank in places)
    names = [f"{stage}.{rank}" if ranked and rank >= 0 else f"{stage}" for stage, rank in places]
    numbers = [stage for stage, _ in places]
    if not ranked and len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)


def _place(text: str) -> tuple[int, int] | None:
    """Return stage and rank that a text is about; rank -1: the whole stage; None: neither."""
    match = _STAGE.search(text)
    return None if match is None else (int(match[1]), -1 if match[2] is None else int(match[2]))


def _plural(text: str, names: str) -> str:
    text = _STAGE.sub(f"stages {names}", text, count=1)
    return text.replace(" was ", " were ", 1).replace(" is ", " are ", 1)
