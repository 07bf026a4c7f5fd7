"""The common part of recordings and exports as sources: read-only, with the details that they hold."""

from __future__ import annotations

from typing import Unpack

from ppengine.protocol.control import Fetched, InspectWhat, Outcome, Refused
from ppengine.protocol.verbs import Verb

from ppconsole.link.source import CommandOptions, Detail, InspectOptions, Progress, QueryFailed


class PastSource:
    """Refuses every verb; `kept` says which details there are."""

    live = False
    kind = "recording"

    def kept(self, what: InspectWhat) -> Detail | None:
        """Return a detail as it was kept last."""
        return None

    async def command(
        self,
        verb: Verb,
        *,
        epoch: str | None = None,
        on_progress: Progress | None = None,
        timeout: float | None = None,
        **options: Unpack[CommandOptions],
    ) -> Outcome | Refused:
        """Refuse: a recording cannot be changed."""
        return Refused(id="", code="UNSUPPORTED", text=f"this {self.kind} is the past: it cannot be changed")

    async def fetch(
        self, request: str, *, offset: int = 0, text_offset: int = 0, sample: int = 0, wait_ms: int = 1000
    ) -> Fetched:
        """Refuse: outputs are not recorded."""
        raise QueryFailed("UNSUPPORTED", f"this {self.kind} has no outputs")

    async def inspect(self, what: InspectWhat, **options: Unpack[InspectOptions]) -> Detail:
        """Return the recorded detail. Raises QueryFailed if there is none."""
        detail = self.kept(what)
        if detail is None and what == "rings":
            raise QueryFailed("NOT_FOUND", f"this {self.kind} keeps no steps; each incident has those before its fault")
        if detail is None:
            raise QueryFailed("NOT_FOUND", f"this {self.kind} has no {what}")
        return detail
