"""The records of a fault, fetched for a recording while it is written."""

from __future__ import annotations

import asyncio

from ppengine.protocol.control import InspectWhat
from ppengine.protocol.inspection import FaultDetail, FindingsDetail
from ppengine.protocol.recording import Recorder, Update
from ppengine.protocol.snapshot import Snapshot

from ppconsole.link.source import Detail, LinkLost, QueryFailed, Source

EVERY_S = 0.5


class FaultWatcher:
    """Writes the record of a fault and the findings of the checks, each time there is more in them."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._newest: Snapshot | None = None
        self._written: dict[InspectWhat, object] = {}

    def see(self, update: Update) -> None:
        """Take an update of the link."""
        if isinstance(update, Snapshot):
            self._newest = update

    async def run(self, source: Source) -> None:
        """Fetch until cancelled; retry a fetch that failed."""
        while True:
            await asyncio.sleep(EVERY_S)
            for what in self._wanted():
                try:
                    detail = await source.inspect(what)
                except (LinkLost, QueryFailed):
                    continue
                if self._written.get(what) != (mark := _mark(detail)):
                    self._written[what] = mark
                    self._recorder.write_detail(what, detail)

    def _wanted(self) -> list[InspectWhat]:
        snapshot = self._newest
        if snapshot is None:
            return []
        wanted: list[InspectWhat] = ["fault"] if any(verdict.root for verdict in snapshot.verdicts) else []
        return [*wanted, "findings"] if snapshot.engine.checks.findings else wanted


def _mark(detail: Detail) -> object:
    """Return a value that changes when the record has grown; ages do not count."""
    if isinstance(detail, FaultDetail):
        stacks = detail.stacks.all if detail.stacks else []
        return detail.number, detail.rings is not None, len(stacks), detail.over_wall is not None
    return [finding.summary for finding in detail.findings] if isinstance(detail, FindingsDetail) else None
