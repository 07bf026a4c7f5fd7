"""Events of the core, stamped with the wall time."""

from __future__ import annotations

import time
from collections.abc import Callable

from ppengine.protocol.finished import FinishedInfo
from ppengine.protocol.snapshot import Event


class Events:
    """Publishes events; the gateway numbers them."""

    def __init__(self, publish: Callable[[Event], None]) -> None:
        self._publish = publish

    def __call__(self, kind: str, text: str, *, stage: int | None = None, request: str | None = None) -> None:
        """Publish `text` under `kind`, about a stage or a request."""
        self._publish(Event(seq=0, wall=time.time(), kind=kind, text=text, stage=stage, request=request))

    def finished(self, info: FinishedInfo) -> None:
        """Publish the end of a request."""
        text = f"{info.id} {info.ending}, {info.output_tokens} tokens"
        event = Event(seq=0, wall=info.wall, kind="request.finished", text=text, request=info.id, finished=info)
        self._publish(event)
