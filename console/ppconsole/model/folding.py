"""Lines that differ by their stage alone, as one line: `stages 0 to 3 were killed by SIGKILL`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby

from ppengine.protocol.snapshot import Event

_STAGE = re.compile(r"\bstage (\d+)(?: \(pid \d+\))?(?= (?:was|is|ended)\b)")


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
        if len({event.stage for event in group}) == len(group) > 1:
            text = _one([event.text for event in group])
            last = Event(seq=last.seq, wall=last.wall, kind=last.kind, text=text, by=last.by, step=last.step)
            found.append(last)
        else:
            found += group
    return found


def _one(texts: list[str]) -> str:
    """Return one text for several that differ by their stage."""
    numbers = sorted({int(match[1]) for text in texts if (match := _STAGE.search(text))})
    if len(numbers) < 2:
        return texts[0]
    last = f"{numbers[0]} to {numbers[-1]}"
    if len(numbers) == 2 or numbers != list(range(numbers[0], numbers[-1] + 1)):
        last = f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
    text = _STAGE.sub(f"stages {last}", texts[0], count=1)
    return text.replace(" was ", " were ", 1).replace(" is ", " are ", 1)
