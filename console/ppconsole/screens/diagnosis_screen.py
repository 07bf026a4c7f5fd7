"""The Diagnosis screen: the stuck stage, the cause, and Enter, which runs the suggested fix."""

from __future__ import annotations

from typing import ClassVar

from ppengine.protocol.inspection import FaultDetail, RingsDetail, StacksDetail
from ppengine.protocol.snapshot import Snapshot, Verdict
from textual.binding import Binding, BindingType

from ppconsole.link.source import LinkLost, QueryFailed
from ppconsole.model.facts import root_verdict
from ppconsole.model.safe import clean
from ppconsole.model.suggestion import suggestion
from ppconsole.screens.console import Console, Selected
from ppconsole.screens.line_screen import verb_keys
from ppconsole.screens.reader import Reader
from ppconsole.view import commands, diagnosis, step_table
from ppconsole.view.cells import Row
from ppconsole.view.keys import Key, diagnosis_keys


class DiagnosisScreen(Reader):
    """Keeps the record of a fault until the operator leaves or a new fault comes."""

    topic: ClassVar[str] = "diagnosis"
    every_s: ClassVar[float] = 1.0
    names_fault: ClassVar[bool] = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "run_suggested", "run the suggestion", show=False),
        *verb_keys("stage"),
        Binding("t", "take_stacks", "take stacks", show=False),
        Binding("tab", "section", "next section", show=False),
        Binding("E", "export", "export", show=False),
    ]

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._known = diagnosis.Known()
        self._epoch: str | None = None
        self._sections: tuple[int, ...] = (0,)
        self._taking = False

    def on_unmount(self) -> None:
        """Drop the record: the steps of a large engine have some MB, and the screen waits for a search for garbage."""
        self._known = diagnosis.Known()

    def heading(self) -> str:
        """Return the title."""
        return "DIAGNOSIS"

    def cli(self) -> str:
        """Return the suggested command where it is one of ours, else the verb that prints the same."""
        snapshot = self.console.model.shown.snapshot
        verdict = root_verdict(snapshot) if snapshot is not None else None
        wanted = suggestion(verdict.suggest) if verdict is not None else None
        return " ".join(wanted.words) if wanted is not None and wanted.words else "explain"

    def body(self, width: int) -> list[Row]:
        """Return the page."""
        model, link = self.console.model, self.console.model.link()
        ended = link.text if link.state == "ended" else ""
        known = self._known._replace(past=bool(ended) or not self.console.source.live)
        snapshot = model.shown.snapshot
        old = "" if snapshot is None else diagnosis.old_text(link, snapshot.sampled_at)
        made = diagnosis.page(snapshot, known, width, self._off(), ended, old)
        self._sections = made.sections
        return made.rows

    def _off(self) -> str:
        """Return why the suggested fix cannot be run now; empty if it can."""
        model, verdict = self.console.model, self._present()
        name = suggestion(verdict.suggest).name if verdict is not None else ""
        usage = commands.VERBS.get(name)
        return model.verbs_off() or (model.refusal(usage.row.name) if usage is not None else "")

    def shown_keys(self) -> tuple[Key, ...]:
        """Return the keys; those that act only while there is something to do."""
        verdict = self._present()
        wanted = suggestion(verdict.suggest) if verdict is not None else None
        return diagnosis_keys(clean(" ".join(wanted.words)) if wanted else "", self.selected().stage)

    def selected(self) -> Selected:
        """Return the root stage."""
        verdict = self._present()
        return Selected(stage=verdict.stage if verdict is not None else None)

    def _present(self) -> Verdict | None:
        """Return the root verdict that is present; None: no fault is."""
        snapshot = self.console.model.state.snapshot
        return root_verdict(snapshot) if snapshot is not None else None

    # --- details that the snapshot lacks ------------------------------------------------------------------------

    async def load(self) -> None:
        """Fetch the record of the fault while there is one, otherwise the last steps as they are now."""
        snapshot = self.console.model.state.snapshot
        if snapshot is not None and snapshot.engine.epoch != self._epoch:
            self._epoch, self._known = snapshot.engine.epoch, diagnosis.Known()
        try:
            if not await self._load_fault(snapshot) and self._known.fault is None:
                rings = await self.console.source.inspect("rings", lines=step_table.COUNT)
                self._keep(rings=rings if isinstance(rings, RingsDetail) else None, problem="")
        except QueryFailed as error:
            self._keep(problem=str(error))

    async def _load_fault(self, snapshot: Snapshot | None) -> bool:
        """Take the newest fault if it is present, or the shown one if it is over; return whether there was one.

        The past has one fault to show, present or over.
        """
        past = not self.console.source.live or self.console.model.link().state == "ended"
        present = past or (snapshot is not None and root_verdict(snapshot) is not None)
        if self._known.fault is None and not present:
            return False
        try:
            kept = await self.console.source.inspect("fault")
        except QueryFailed as error:
            if error.code == "NOT_FOUND":
                return False
            raise
        shown = self._known.fault
        same = shown is not None and isinstance(kept, FaultDetail) and shown.number == kept.number
        if isinstance(kept, FaultDetail) and (past or same or kept.over_wall is None):
            self._keep(fault=kept, problem="")
            return True
        return False

    def _keep(self, **changes: object) -> None:
        self._known = self._known._replace(**changes)  # type: ignore[arg-type]

    def action_take_stacks(self, core: bool = False) -> None:
        """Take all stacks, or those of the core alone: each process stops for a moment, so only on request."""
        if not self._taking:
            self._taking = True
            self._keep(taking=True, stacks=None, stacks_problem="")
            self.run_worker(self._take(core), exit_on_error=False, name="stacks")
            self.paint()

    async def _take(self, core: bool) -> None:
        try:
            answer = await self.console.source.inspect("stacks", core=core)
            self._keep(stacks=answer if isinstance(answer, StacksDetail) else None, taking=False)
        except (LinkLost, QueryFailed) as error:
            self._keep(stacks_problem=str(error), taking=False)
        finally:
            self._taking = False
        self.paint()

    # --- keys ---------------------------------------------------------------------------------------------------

    def action_section(self) -> None:
        """Scroll to the next section; from the last one to the top."""
        self.scroll_to_row(self.next_place(self._sections))

    def action_export(self) -> None:
        """Write an export into the current folder."""
        self.console.export()

    def action_run_suggested(self) -> None:
        """Run the suggested fix: a verb after its confirm, a reader at once; the rest is for a shell."""
        verdict = self._present()
        if verdict is None or not verdict.suggest:
            self.console.report("no fault is present, so nothing is suggested", bad=False)
            return
        wanted = suggestion(verdict.suggest)
        if wanted.name in ("stacks", "logs", "events"):
            if wanted.name == "stacks" and wanted.stage is None:
                self.action_take_stacks(core="--core" in wanted.words)
            else:
                self.console.navigation.open_reader(wanted.name, wanted.stage)
        elif wanted.name not in commands.VERBS:
            self.console.report(f"not for the console: {wanted.text}", bad=True)
        elif why := self.console.model.refusal(commands.VERBS[wanted.name].row.name, wanted.name):
            self.console.report(why, bad=True)
        else:
            self.console.navigation.begin_command(" ".join(wanted.words), needs_words=False)
