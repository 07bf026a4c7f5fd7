"""The dialog before every verb with an effect: target, epoch, the engine's own plan, the CLI line; focus on Cancel."""

from __future__ import annotations

from typing import ClassVar

from ppengine.protocol.control import Accepted, Deferred, Outcome, Refused
from ppengine.protocol.snapshot import Snapshot
from ppengine.protocol.verbs import Verb, label_of, row_of
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button

from ppconsole.link.source import LinkLost
from ppconsole.model.choosing import NAMED, Choice
from ppconsole.model.plan_age import PlanAge
from ppconsole.screens.console import Console, GiveBack
from ppconsole.view import commands, plan
from ppconsole.view.cells import EMPTY, Row, fit, row
from ppconsole.view.keys import CONFIRM_KEYS
from ppconsole.view.lowering import BLANK, TARGET, VITAL, Weighed, lowered, weighed
from ppconsole.widgets.lines import Lines

MAX_WIDTH = 92
OVERRIDE_REASON = "confirmed on the console"
"""Reason of an override: a dialog that has shown the owners is one. The CLI takes another with `--reason`."""
_PLAN_REASON = "the console asks for the plan"


class Confirm(ModalScreen[None]):
    """Asks before `verb`. Verb, epoch and revisions are fixed when it opens; its plan is renewed while it is open.

    A verb on many requests goes to those that the plan on the screen does not exclude. Buttons stay in their place:
    they begin at the left, and the dialog does not become lower.
    The plan names the owners of others' requests; to confirm it is to override them.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "cancel", "cancel", show=False),
        Binding("left,up", "app.focus_previous", "", show=False),
        Binding("right,down", "app.focus_next", "", show=False),
        Binding("y", "copy_cli", "copy the CLI line", show=False),
        Binding("question_mark", "help", "help", show=False),
    ]

    def __init__(
        self, console: Console, verb: Verb, seen: Snapshot, choice: Choice = NAMED, give_back: GiveBack | None = None
    ) -> None:
        super().__init__()
        self.console = console
        self.verb = commands.guarded(verb, seen)
        self._seen = seen
        self._choice = choice
        self._give_back = give_back
        """Takes a refused verb back to the line that it was typed on; None: it came by a key."""
        self._age = PlanAge()
        self._asking = False
        self._most = 0, 0
        """Width of the terminal, and the most rows that were shown in it."""
        self.if_rev = commands.revision_of(verb, seen)
        self._answer: Outcome | Refused | None = None
        self._trouble: list[Row] = []
        self._note = ""
        self.busy = False
        self._unknown = False
        """Whether the link was lost after the verb was sent."""
        self._composed = False

    def compose(self) -> ComposeResult:
        """Rows, then the buttons: Cancel first."""
        with Vertical(id="dialog"):
            yield Lines(id="dialog-body")
            with Horizontal(id="dialog-buttons"):
                yield Button("Cancel", id="cancel", compact=True)
                yield Button(f"Do it: {label_of(self.verb)}", id="confirm", compact=True, disabled=True)
                yield Button("Look again", id="again", compact=True, classes="hidden")

    def on_mount(self) -> None:
        """Ask for the plan; the focus is on Cancel."""
        self._composed = True
        self.query_one("#cancel", Button).label = "Cancel"
        self.query_one("#cancel").focus()
        self._ask()

    def on_resize(self) -> None:
        """Fit the new size."""
        self.paint()

    def paint(self) -> None:
        """Show the answers so far."""
        if not self._composed or not self.is_attached:
            return  # a tick may come before the dialog is composed
        width = min(MAX_WIDTH, self.app.size.width - 6)
        title = f" {label_of(self.verb)}?"
        rows = [Weighed(row((fit(title, width), ""), fill="head"), VITAL)]
        rows += plan.head_rows(self.verb, self._seen, self.if_rev, width, self._hidden(), self._choice)
        rows += [BLANK, *(weighed(self._trouble, VITAL) or plan.plan_rows(self._answer, width))]
        rows.append(Weighed(self._renewed(width), TARGET))
        rows += plan.cli_rows(self._possible() or self.verb, self._seen.engine.name, width, self._reason())
        note = self._note or self._off()
        rows.append(Weighed(row((fit(note or self._keys(), width), "warn" if note else "dim")), VITAL))
        room = self.app.size.height - 5
        board = self.query_one("#dialog-body", Lines)
        self.query_one("#dialog").styles.width = width + 4
        shown = [each.row for each in lowered(rows, room)]
        shown[-1:-1] = [EMPTY] * (self._lowest(len(shown), room) - len(shown))
        board.styles.height = len(shown)
        board.show(shown)
        self._buttons()

    def _lowest(self, rows: int, room: int) -> int:
        """Return the rows that the dialog has at least: as many as before in a terminal of this width."""
        width = self.app.size.width
        most = max(rows, self._most[1]) if self._most[0] == width else rows
        self._most = width, min(most, room)
        return self._most[1]

    def _renewed(self, width: int) -> Row:
        """Renew a plan that is old; return its age, and how its requests have changed."""
        model = self.console.model
        ended, since = plan.since_opened(self.verb, self._choice, model.state.snapshot)
        waits = self._answer is None or self._asking or self._trouble or self._note or self._blocked_by()
        if not waits and self._age.is_old(model.now(), ended):
            self._start_plan()
        return plan.age_row(self._age.seconds(model.now()), since, width)

    def _keys(self) -> str:
        """Return the keys; those that confirm only while they do."""
        does = "⏎ does it" if self.focused is self.query_one("#confirm") else "⇥ ⏎ does it"
        return ("" if self._blocked() else f"{does}   ") + "esc cancels   y copies the shell line"

    def on_descendant_focus(self) -> None:
        """Show the keys for the button that has the focus, with a fresh plan."""
        self._age.touched()
        self.paint()

    def _hidden(self) -> int:
        """Return how many requests of the verb are live now and hidden by the filter of the table."""
        now, filtered = self.console.model.state.snapshot, self.console.model.shown.wanted
        named = set(commands.requests_of(self.verb))
        live = [each for each in now.requests if each.id in named and each.state != "finished"] if now else []
        return sum(not filtered.matches(each) for each in live)

    def _possible(self) -> Verb | None:
        """Return the verb on the requests that its plan does not exclude; None without any, or without a plan."""
        answer = self._answer
        if not isinstance(answer, Outcome) or answer.state != "planned":
            return None
        return commands.without_conflicts(self.verb, answer)

    def _reason(self) -> str:
        """Return the reason of the override that the plan needs; empty: it needs none."""
        needed = isinstance(self._answer, Outcome) and self._answer.override
        return OVERRIDE_REASON if needed else ""

    def _blocked(self) -> bool:
        """Return whether the verb cannot be confirmed now."""
        ready = self._possible() is not None and not self._trouble
        return not ready or self._blocked_by()

    def _blocked_by(self) -> bool:
        """Return whether the verb is under way, or none is possible."""
        return self.busy or bool(self._off())

    def _off(self) -> str:
        """Return why the verb is not possible now; empty if it is."""
        model = self.console.model
        return model.verbs_off() or model.refusal(row_of(self.verb).name)

    def _buttons(self) -> None:
        """Confirm needs a plan, a live link and nothing under way."""
        possible, confirm = self._possible(), self.query_one("#confirm", Button)
        confirm.disabled = self._blocked()
        what = "it"
        if possible is not None and possible is not self.verb:
            what = f"the other {len(commands.requests_of(possible))}"
        label = f"{'Override' if self._reason() else 'Do'} {what}: {label_of(self.verb)}"
        if str(confirm.label) != label:
            confirm.label = label
            confirm.refresh(layout=True)  # Textual keeps the width of a button whose label changes.
        conflicts = isinstance(self._answer, Outcome) and bool(self._answer.conflicts)
        self.query_one("#again", Button).set_class(not (self._trouble or conflicts), "hidden")

    def _ask(self) -> None:
        """Ask the engine what the verb would do."""
        self._answer, self._trouble, self._note = None, [], ""
        self._age.forget()
        self._start_plan()
        self.paint()

    def _start_plan(self) -> None:
        """Ask for a plan; the one on the screen stays until it is there."""
        self._asking = True
        self.run_worker(self._plan(), exit_on_error=False, exclusive=True, name="dry run", group="confirm")

    async def _plan(self) -> None:
        ended, _ = plan.since_opened(self.verb, self._choice, self.console.model.state.snapshot)
        try:
            answer = await self._command(self.verb, dry_run=True, reason=_PLAN_REASON)
        finally:
            self._asking = False
        if self.busy:
            return  # the plan that was confirmed stays on the screen
        if answer is None and self._answer is not None:
            self._note = ""  # the plan stays, and the note on the link says why it is old
        elif answer is not None:
            self._answer = answer
            self._age.made(self.console.model.now(), ended)
            self._check_conflict(answer)
        self.paint()

    async def _command(self, verb: Verb, *, dry_run: bool, reason: str) -> Outcome | Refused | None:
        """Send the verb, with an override if it has a `reason`.

        Return None when the link broke, which is then explained in the note.
        """
        try:
            return await self.console.source.command(
                verb,
                dry_run=dry_run,
                if_rev=self.if_rev,
                epoch=self._seen.engine.epoch,
                reason=reason,
                override=bool(reason),
                on_progress=None if dry_run else self._progress,
            )
        except LinkLost as error:
            unknown = error.sent and not dry_run
            self._note = f"outcome unknown: {error}; look at the events" if unknown else f"nothing was done: {error}"
            self._unknown = self._unknown or unknown
            if unknown:
                self.console.report(f"{label_of(self.verb)}: {self._note}", bad=True)
            return None

    def _progress(self, message: Accepted | Deferred) -> None:
        """Show that the command is under way."""
        self.console.navigation.unmark(self.verb)
        if not self.is_attached:
            return
        what = f"deferred: {message.text}" if isinstance(message, Deferred) else "accepted"
        self._note = f"{what}; esc closes this and it goes on"
        self.query_one("#cancel", Button).label = "Close"
        self.paint()

    def _check_conflict(self, answer: Outcome | Refused) -> None:
        """Turn a conflict into words: what has changed since the dialog opened."""
        if isinstance(answer, Refused) and answer.code in ("CONFLICT", "STALE_EPOCH"):
            now = self.console.model.state.snapshot
            changes = plan.changes_since(self._seen, now, self.verb) if now is not None else []
            self._trouble = plan.conflict_rows(answer, changes, min(MAX_WIDTH, self.app.size.width - 6))

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Cancel, act, or look again."""
        event.stop()
        if event.button.id == "cancel":
            self.action_cancel()
        elif event.button.id == "again":
            self._look_again()
        elif not self.busy and (verb := self._possible()) is not None:
            self.busy = True
            self.paint()
            # The app's worker and not this dialog's: the end of a verb is reported after the dialog is closed, too.
            self.app.run_worker(self._act(verb), exit_on_error=False, name=label_of(self.verb))

    def _look_again(self) -> None:
        """Take the present state as the one to act on, and ask for a new plan."""
        now = self.console.model.state.snapshot
        if now is not None:
            self._seen, self.if_rev = now, commands.revision_of(self.verb, now)
            self.verb = commands.guarded(self.verb, now)
        self.query_one("#cancel", Button).label = "Cancel"
        self.query_one("#cancel").focus()
        self._ask()

    async def _act(self, verb: Verb) -> None:
        """Send the verb and wait for its end."""
        try:
            answer = await self._command(verb, dry_run=False, reason=self._reason())
        finally:
            self.busy = False
        if isinstance(answer, Outcome):
            self.console.navigation.unmark(self.verb)
            self.console.report_outcome(verb, answer)
            if self.is_attached:
                self.dismiss()
            return
        if not self.is_attached:
            if why := self._refusal(answer):
                self._report_refusal(why)
            return
        if answer is not None:
            self._answer = answer
            self._check_conflict(answer)
            self._note = "" if self._trouble else f"refused: {answer.code}"
        self.query_one("#cancel").focus()
        self.paint()

    def action_cancel(self) -> None:
        """Close. A verb that was sent already goes on in the engine, and says so."""
        self.dismiss()
        if self.busy:
            self.console.report(f"{label_of(self.verb)} goes on; its end will be reported", bad=False)
        elif self._give_back is not None and (why := self._refusal(self._answer)):
            self._give_back(why, opens=True)
        elif not self._unknown:
            self.console.report(f"{label_of(self.verb)}: cancelled; nothing was done", bad=False)

    def _refusal(self, answer: Outcome | Refused | None) -> str:
        """Return why the verb is not done, by its answer or for lack of one; empty: it is, may be, or is not known."""
        if isinstance(answer, Refused):
            return f"{label_of(self.verb)} refused: {answer.code}: {answer.text}"
        if isinstance(answer, Outcome) and self._possible() is None:
            return f"{label_of(self.verb)}: {'; '.join(plan.conflict_lines(answer) or [answer.text])}"
        return f"{label_of(self.verb)}: {self._note}" if answer is None and self._note and not self._unknown else ""

    def _report_refusal(self, why: str) -> None:
        """Report a refusal after the dialog was closed; a verb that was typed is given back."""
        if self._give_back is not None:
            self._give_back(why)
        else:
            self.console.report(why, bad=True)

    def action_help(self) -> None:
        """Open the legend of this dialog."""
        self.console.navigation.open_help("confirm", CONFIRM_KEYS)

    def action_copy_cli(self) -> None:
        """Copy the equivalent shell line."""
        self.console.copying.command(commands.shell_words(self._possible() or self.verb, self._reason()))
