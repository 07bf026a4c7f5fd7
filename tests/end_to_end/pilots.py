"""A console under a pilot, on a real engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from operators import Operator
from ppconsole.app import ConsoleApp
from ppconsole.link.engine_link import EngineLink
from ppconsole.screens.confirm import Confirm
from ppconsole.view.cells import text_of
from ppconsole.widgets.lines import Lines
from ppengine.protocol.control import Outcome
from ppengine.protocol.verbs import Verb
from serving import Served
from textual.pilot import Pilot
from textual.widgets import Button

TOKENS = 1000
BESIDE = 8
"""Requests that run beside the one that a verb is about, so that it lasts."""


class Rig:
    """A console under a pilot, and an operator beside it who sees what the engine says."""

    def __init__(self, app: ConsoleApp, pilot: Pilot[int], op: Operator | None = None) -> None:
        self.app, self.pilot, self.op = app, pilot, op
        self.notes: list[str] = []
        self.outcomes: list[Outcome] = []
        tell, tell_outcome = app.report, app.report_outcome

        def report(text: str, *, bad: bool) -> None:
            self.notes.append(text)
            tell(text, bad=bad)

        def report_outcome(verb: Verb, outcome: Outcome) -> None:
            self.outcomes.append(outcome)
            tell_outcome(verb, outcome)

        app.report = report  # type: ignore[method-assign]
        app.report_outcome = report_outcome  # type: ignore[method-assign]

    def board(self, name: str) -> str:
        """Return the text of a board of the topmost screen that has it: a dialog may lie over the banner."""
        for screen in reversed(self.app.screen_stack):
            for board in screen.query(f"#{name}").results(Lines):
                return "\n".join(text_of(row) for row in board.rows)
        raise AssertionError(f"no board {name} on {self.app.screen_stack}")

    async def until(self, ready: Callable[[], Any], what: str, seconds: float = 60.0) -> None:
        for _ in range(int(seconds / 0.02)):
            if ready():
                return
            await self.pilot.pause(0.02)
        raise AssertionError(f"not within {seconds:g} s: {what}; told: {self.notes}")

    async def running(self) -> str:
        """Return a request that writes, has most of its way before it, and is the selected one here."""
        names = await self.op.submit_all([[5, 6, 7, 8]] * BESIDE, max_tokens=TOKENS)
        await self.op.written(names[-1], 3)
        await self.select(names[-1])
        return names[-1]

    async def select(self, name: str) -> None:
        selection = self.app.main.selection
        selection.requests.choose(name)
        await self.until(lambda: selection.request() == name, name)

    async def ask(self, *keys: str) -> Confirm:
        """Press the keys of a verb; return its dialog with the engine's plan."""
        if self.op is not None:  # the console must have seen what the operator has, or its revision would be old
            seen = (await self.op.now()).sampled_at
            await self.until(lambda: self.app.model.state.snapshot.sampled_at >= seen, "the newest picture")
        await self.pilot.press(*keys)
        await self.until(lambda: isinstance(self.app.screen, Confirm), "a dialog")
        dialog = self.app.screen
        assert isinstance(dialog, Confirm)
        assert self.app.focused is dialog.query_one("#cancel"), "the focus is on Cancel"
        await self.until(lambda: not dialog.query_one("#confirm", Button).disabled, "a plan")
        return dialog

    async def do(self, *keys: str) -> None:
        """Ask, then confirm and see the dialog close."""
        await self.ask(*keys)
        await self.confirm()

    async def do_held(self, *keys: str) -> None:
        """Do, with the requests held in place for as long as the keys take."""
        with self.op.engine.stopped("stage1"):
            await self.ask(*keys)
        await self.confirm()

    async def confirm(self) -> None:
        """Confirm, once the button can be: a plan that is renewed disables it, and Enter would cancel."""
        button = self.app.screen.query_one("#confirm", Button)
        while self.app.focused is not button:
            await self.until(lambda: not button.disabled, "a plan")
            await self.pilot.press("right")
        await self.pilot.press("enter")
        await self.until(lambda: self.app.screen is self.app.main, "the end of the verb")

    async def clear(self) -> None:
        """Abort what is left, so that the next test finds an idle engine."""
        await self.op.abort(*[request.id for request in (await self.op.now()).requests])
        await self.op.idle()


@asynccontextmanager
async def console(engine: Served, *, slow: bool = False) -> AsyncIterator[Rig]:
    """Open a console; `slow` where the engine publishes more often than a screen can be painted."""
    link = EngineLink(engine.record, find=lambda: engine.record, user="pilot", slow=slow)
    async with engine.operator() as op:
        app = ConsoleApp(link, theme="pp-dark")
        async with app.run_test(size=(132, 40)) as pilot:
            rig = Rig(app, pilot, op)
            await rig.until(lambda: app.model.state.snapshot is not None, "a first snapshot")
            yield rig
            await rig.clear()
