"""The dialog of `m`: a utilization or a change is typed, and the engine's plan for it is shown while typing."""

from __future__ import annotations

from typing import ClassVar

from ppengine.protocol.control import Outcome, Refused
from ppengine.protocol.snapshot import Snapshot
from ppengine.protocol.verbs import SetMemory
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.timer import Timer
from textual.widgets import Input, Static

from ppconsole.link.source import LinkLost
from ppconsole.model import memory_change
from ppconsole.model.safe import clean
from ppconsole.model.units import bytes_text
from ppconsole.screens.confirm import MAX_WIDTH
from ppconsole.screens.console import Console
from ppconsole.view import plan, stage_rows, stage_table
from ppconsole.view.cells import Row, fit, row, wrap
from ppconsole.view.keys import MEMORY_KEYS
from ppconsole.view.lowering import BLANK, SPARE, TARGET, VITAL, Weighed, lowered, weighed
from ppconsole.widgets.lines import Lines

DEBOUNCE_S = 0.25
_KEYS = (("⏎", "goes on"), ("esc", "cancels"), ("↑↓", "5 %"), ("PgUp PgDn", "20 %"), ("?", "help"))
_FRAME = 3
"""Rows beside those of the boards: border and input."""
_NOW, _PLAN = range(2)
"""Parts of the dialog: above the input, and below it."""


class UtilizationInput(Input):
    """Takes every character, so that a wrong value is refused as it was typed; `?` alone is the key of the dialog."""

    def check_consume_key(self, key: str, character: str | None) -> bool:
        """Return whether the key is typed into the field."""
        return character != "?" and super().check_consume_key(key, character)


class MemoryDialog(ModalScreen[None]):
    """Asks for a utilization. Enter goes on to the confirm dialog; nothing is done from here."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss", "cancel", show=False),
        *(
            Binding(key, f"step({percent})", f"{percent:+d} %", show=False, priority=True)
            for key, percent in (("up", 5), ("down", -5), ("pageup", 20), ("pagedown", -20))
        ),
        Binding("question_mark", "help", "help", show=False, priority=True),
    ]

    def __init__(self, console: Console, seen: Snapshot) -> None:
        super().__init__()
        self.console = console
        self._seen = seen
        self._answer: Outcome | Refused | None = None
        self._note = ""
        self._timer: Timer | None = None
        self._composed = False

    def compose(self) -> ComposeResult:
        """Yield the present memory, the input, the plan."""
        with Vertical(id="dialog"):
            yield Lines(id="memory-now")
            with Horizontal(id="memory-line"):
                yield Static("utilization › ", id="memory-label", markup=False)
                yield UtilizationInput(f"{self._seen.engine.memory_utilization:g}", id="memory-input", compact=True)
            yield Lines(id="memory-plan")

    def on_mount(self) -> None:
        """Begin with the present value."""
        self._composed = True
        self.query_one(Input).focus()
        self.paint()

    def on_resize(self) -> None:
        """Fit the new size."""
        self.paint()

    def value(self) -> float | None:
        """Return the typed utilization, or that after the typed change; None for anything else."""
        try:
            return memory_change.utilization(self.query_one(Input).value, self._seen)
        except ValueError:
            return None

    def action_step(self, percent: int) -> None:
        """Change the KV memory by `percent` beyond the typed change."""
        field = self.query_one(Input)
        field.value = memory_change.stepped(field.value, percent)
        field.cursor_position = len(field.value)

    def paint(self) -> None:
        """Show the present memory and the plan for the typed value."""
        if not self._composed or not self.is_attached:
            return
        width = min(MAX_WIDTH, self.app.size.width - 6)
        self.query_one("#dialog").styles.width = width + 4
        shown = lowered([*self._now(width), *self._plan_rows(width)], self.app.size.height - _FRAME)
        for part, name in ((_NOW, "#memory-now"), (_PLAN, "#memory-plan")):
            rows = [each.row for each in shown if each.part == part]
            board = self.query_one(name, Lines)
            board.styles.height = len(rows)
            board.show(rows)

    def _now(self, width: int) -> list[Weighed]:
        """Return title and one memory row a stage."""
        engine = self._seen.engine
        title = f" memory of {engine.name}: util {engine.memory_utilization:g}, revision {engine.memory_revision}"
        rows = [Weighed(row((fit(title, width), ""), fill="head"), VITAL, _NOW)]
        shown, rest = stage_rows.fold(self._seen, 4)
        for stage in shown:
            memory = stage.info.memory
            text = f" {bytes_text(memory.used)} of {bytes_text(memory.limit)} limit, {bytes_text(memory.total)} in all"
            bar = stage_table.bar(stage.info, max(8, min(24, width - 4 - len(text))))
            line = row((f"{stage.name:>3} ", "strong"), *bar, (text, "dim"))
            rows.append(Weighed(line, SPARE, _NOW))
        if rest:
            rows.append(Weighed(row((f"    and {len(rest)} more stages", "dim")), SPARE, _NOW))
        return [*rows, BLANK._replace(part=_NOW)]

    def _plan_rows(self, width: int) -> list[Weighed]:
        """Return the plan, or what to type."""
        if self._note:
            rows = weighed([row((fit(self._note, width), "warn"))], VITAL)
        elif (number := self.value()) is None:
            rows = weighed(self._refusal(width), VITAL)
        elif number == self._seen.engine.memory_utilization and self._answer is None:
            text = "type another value, or a change: -20%, +5%, -2GiB"
            rows = weighed([row((fit(text, width), "dim"))], VITAL)
        else:
            utilization = Weighed(plan.memory_row(number, self._seen), TARGET)
            rows = [utilization, *plan.plan_rows(self._answer, width)]
        keys = [seg for key, text in _KEYS for seg in ((key, "key"), (f" {text}  ", "dim"))]
        return [each._replace(part=_PLAN) for each in (BLANK, *rows, BLANK, Weighed(row(*keys), VITAL))]

    def _refusal(self, width: int) -> list[Row]:
        """Return why the typed text is no utilization, and the form of one."""
        typed = self.query_one(Input).value
        if not typed.strip():
            return [row((part, "dim")) for part in wrap(memory_change.FORM, width)]
        try:
            memory_change.utilization(clean(typed), self._seen)
        except ValueError as error:
            return [row((part, "warn")) for part in wrap(str(error), width)]
        return []

    def action_help(self) -> None:
        """Open the legend of this dialog."""
        self.console.navigation.open_help("memory", MEMORY_KEYS)

    def on_input_changed(self, event: Input.Changed) -> None:
        """Ask for a plan once typing pauses."""
        event.stop()
        if self._timer is not None:
            self._timer.stop()
        self._answer, self._note = None, ""
        self._timer = self.set_timer(DEBOUNCE_S, self._ask)
        self.paint()

    def _ask(self) -> None:
        """Ask for the plan of the typed value."""
        number = self.value()
        if number is not None and number != self._seen.engine.memory_utilization:
            self.run_worker(self._plan(number), exit_on_error=False, exclusive=True, name="dry run", group="memory")

    async def _plan(self, number: float) -> None:
        """Fetch the plan."""
        try:
            engine = self._seen.engine
            self._answer = await self.console.source.command(
                SetMemory(utilization=number), dry_run=True, if_rev=engine.memory_revision, epoch=engine.epoch
            )
        except LinkLost as error:
            self._note = f"no plan: {error}"
        self.paint()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Go on to the confirm dialog with the revision that was seen here."""
        event.stop()
        number = self.value()
        if number is None:
            self.paint()
            return
        seen = self._seen
        self.dismiss()
        self.console.navigation.ask(SetMemory(utilization=number), seen)
