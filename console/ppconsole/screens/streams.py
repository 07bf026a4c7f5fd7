"""The Streams screen: what every stream does, and the live checks with what they have found."""

from __future__ import annotations

from typing import ClassVar

from ppengine.protocol.inspection import FindingsDetail
from ppengine.protocol.reports import Finding
from textual.binding import Binding, BindingType

from ppconsole.screens.reader import Reader
from ppconsole.view import streams
from ppconsole.view.cells import Row, text_of
from ppconsole.view.keys import STREAMS_KEYS, Key


class StreamsScreen(Reader):
    """Streams come with every snapshot; findings are asked for once a second."""

    every_s: ClassVar[float] = 1.0
    keys: ClassVar[tuple[Key, ...]] = STREAMS_KEYS
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("1", "check(0)", "ledger", show=False),
        Binding("2", "check(1)", "strict", show=False),
        Binding("3", "check(2)", "finite", show=False),
        Binding("4", "check(3)", "shadow", show=False),
        Binding("tab", "findings", "findings", show=False),
        Binding("d", "diagnosis", "diagnosis", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._findings: list[Finding] | None = None

    def heading(self) -> str:
        """Return what is shown."""
        return "STREAMS"

    def cli(self) -> str:
        """Return the verb that prints the same."""
        return "status --json"

    def body(self, width: int) -> list[Row]:
        """Return checks, streams and findings."""
        act = not (self.console.state.read_only or not self.console.state.live_source)
        return streams.rows(self.console.shown.snapshot, self._findings, self.problem, width, act)

    async def load(self) -> None:
        """Fetch the findings."""
        answer = await self.console.source.inspect("findings")
        self._findings = answer.findings if isinstance(answer, FindingsDetail) else None

    def action_check(self, index: int) -> None:
        """Switch a check, after its confirm."""
        snapshot, why = self.console.state.snapshot, self.console.verbs_off()
        name = streams.CHECKS[index][0]
        if why:
            self.console.report(f"check {name}: {why}", bad=True)
        elif snapshot is not None:
            self.console.ask(streams.toggle(name, snapshot.engine.checks))

    def action_findings(self) -> None:
        """Scroll to the findings, and from there to the top."""
        rows = self.body(self.size.width)
        place = next((index for index, line in enumerate(rows) if text_of(line).startswith(f" {streams.FINDINGS}")), 0)
        self.scroll_to_row(0 if self.top >= min(place, len(rows) - self.size.height + 2) else place)

    def action_diagnosis(self) -> None:
        """Open the diagnosis; back to it where it is below, so that what it froze is still there."""
        self.go_to("diagnosis", "DiagnosisScreen")
