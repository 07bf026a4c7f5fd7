"""The Streams screen: what every stream does, the live checks with what they have found, and the ledger."""

from __future__ import annotations

from typing import ClassVar

from ppengine.protocol.inspection import FindingsDetail, LedgerDetail
from ppengine.protocol.reports import Finding
from textual.binding import Binding, BindingType

from ppconsole.link.source import QueryFailed
from ppconsole.screens.console import Console
from ppconsole.screens.reader import Reader
from ppconsole.view import stream_table
from ppconsole.view.cells import Row, text_of
from ppconsole.view.keys import STREAMS_KEYS, Key


class StreamsScreen(Reader):
    """Streams come with every snapshot; findings, and the ledger if it is on, are fetched once a second."""

    topic: ClassVar[str] = "streams"
    every_s: ClassVar[float] = 1.0
    keys: ClassVar[tuple[Key, ...]] = STREAMS_KEYS
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("1", "check(0)", "ledger", show=False),
        Binding("2", "check(1)", "strict", show=False),
        Binding("3", "check(2)", "finite", show=False),
        Binding("4", "check(3)", "shadow", show=False),
        Binding("5", "check(4)", "checksum", show=False),
        Binding("tab", "section", "next section", show=False),
    ]

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._findings: list[Finding] | None = None
        self._ledger: LedgerDetail | None = None
        self._missing = ""
        """Why there is no ledger, where there should be one."""

    def heading(self) -> str:
        """Return the title."""
        return "STREAMS"

    def cli(self) -> str:
        """Return the verb that prints the same."""
        return "streams" if self._ledger_on() else "status --json"

    def body(self, width: int) -> list[Row]:
        """Return checks, streams and findings."""
        act = not self.console.model.refusal("check")
        return stream_table.rows(
            self.console.model.shown.snapshot, self._findings, self.problem, width, act,
            known=self._ledger, missing=self._missing,
        )  # fmt: skip

    async def load(self) -> None:
        """Fetch the ledger where it is on, and the findings. A recording may have the one without the other."""
        self._missing = ""
        try:
            found = await self.console.source.inspect("ledger") if self._ledger_on() else None
        except QueryFailed as error:
            found, self._missing = None, str(error)
        self._ledger = found if isinstance(found, LedgerDetail) else None
        answer = await self.console.source.inspect("findings")
        self._findings = answer.findings if isinstance(answer, FindingsDetail) else None

    def _ledger_on(self) -> bool:
        snapshot = self.console.model.shown.snapshot
        return snapshot is not None and snapshot.engine.checks.ledger

    def action_check(self, index: int) -> None:
        """Switch a check, after its confirm."""
        snapshot, name = self.console.model.state.snapshot, stream_table.CHECKS[index][0]
        if why := self.console.model.refusal("check", f"check {name}"):
            self.console.report(why, bad=True)
        elif snapshot is not None:
            self.console.navigation.ask(stream_table.toggle(name, snapshot.engine.checks))

    def action_section(self) -> None:
        """Scroll to the findings, from there to the ledger, and from the last of them to the top."""
        rows = self.body(self.size.width)
        titles = (f" {stream_table.FINDINGS}", f" {stream_table.LEDGER}")
        self.scroll_to_row(self.next_place([at for at, line in enumerate(rows) if text_of(line).startswith(titles)]))
