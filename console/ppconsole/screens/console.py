"""The services that a screen gets from the app, typed. Screens know these protocols and not the app itself."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple, Protocol

from ppengine.protocol.control import Outcome
from ppengine.protocol.discovery import EndedEngine, EngineRecord
from ppengine.protocol.snapshot import Snapshot
from ppengine.protocol.verbs import Verb

from ppconsole.link.replay import ReplaySource
from ppconsole.link.settings import Settings
from ppconsole.link.source import Source
from ppconsole.model.choosing import NAMED, Choice
from ppconsole.view.display import DisplayModel
from ppconsole.view.keys import Key
from ppconsole.view.notes import Notes


class Selected(NamedTuple):
    """The requests and the stage that a verb of a screen acts on; None: it has none."""

    request: str | None = None
    stage: int | None = None
    marked: tuple[str, ...] = ()
    """Marked requests, which go before the selected one."""
    rank: int | None = None
    """The selected rank of the stage; verbs act on the whole stage."""
    client: str | None = None
    """Name of the selected API key."""
    backend: str | None = None
    """Name of the selected backend of KV tiers."""

    @property
    def requests(self) -> tuple[str, ...]:
        """The requests that a verb acts on."""
        return self.marked or ((self.request,) if self.request is not None else ())


NOTHING_SELECTED = Selected()


class GiveBack(Protocol):
    """Gives a line that was entered back to the operator, with the reason for which it was refused."""

    def __call__(self, why: str, *, opens: bool = False) -> None:
        """Show the line again. `opens`: in answer to a key, so that a line that is closed may open."""


class Copying(Protocol):
    """Copies to the terminal's clipboard, and into a file."""

    def command(self, words: Sequence[str]) -> None:
        """Copy the shell line of a command of the CLI; without words nothing."""

    def answer(self, request: str, text: str, left_out: int = 0) -> None:
        """Copy the answer of a request. `left_out`: characters before `text` that are not kept here."""


class Navigation(Protocol):
    """Opens screens and begins verbs."""

    def ask(
        self, verb: Verb, seen: Snapshot | None = None, choice: Choice = NAMED, give_back: GiveBack | None = None
    ) -> None:
        """Open the confirm dialog for `verb` on `seen`; None: on the present snapshot.

        `choice`: how its requests were chosen. `give_back`: takes the verb back if it is refused, to the line that it
        was typed on; None: it came by a key.
        """

    def begin_verb(self, name: str) -> None:
        """Begin the verb of a key on the selection of the present screen."""

    def begin_command(self, text: str, needs_words: bool) -> None:
        """Run a command, or open the command line with it if it needs more words."""

    def unmark(self, verb: Verb) -> None:
        """Unmark the requests of a verb that was confirmed: the next verb must not hit them unseen."""

    def run_line(self, text: str, give_back: GiveBack) -> None:
        """Run a command line: the name of a screen, or a verb. One that is refused is given back, now or later."""

    def open_reader(self, name: str, stage: int | None = None, request: str = "") -> None:
        """Open the reader called `name`."""

    def find_ended(self, word: str) -> None:
        """Open the ended request with `word` in its id, or the list of several."""

    def open_selected(self) -> None:
        """Open the detail of the selected request or stage."""

    def open_help(self, screen: str, keys: tuple[Key, ...], selected: Selected = NOTHING_SELECTED) -> None:
        """Open the help of `screen`: the `selected` row in words, the legend, its `keys`."""


class Console(Protocol):
    """The app as its screens see it."""

    @property
    def source(self) -> Source:
        """The engine, or a recording of one."""

    @property
    def model(self) -> DisplayModel:
        """The state and the view of it."""

    @property
    def settings(self) -> Settings:
        """The console's own settings."""

    @property
    def notes(self) -> Notes:
        """The messages that are shown."""

    @property
    def copying(self) -> Copying:
        """The way to the clipboard."""

    @property
    def navigation(self) -> Navigation:
        """The way to other screens."""

    def run_worker(
        self,
        work: Coroutine[Any, Any, None],
        name: str | None = ...,
        group: str = ...,
        *,
        exit_on_error: bool = ...,
        exclusive: bool = ...,
    ) -> object:
        """Run `work` beside the screens; the banner shows its failure."""

    def paint(self) -> None:
        """Paint the visible screens now."""

    def paint_soon(self) -> None:
        """Paint the visible screens in a moment."""

    def report(self, text: str, *, bad: bool) -> None:
        """Show a message for some seconds."""

    def report_outcome(self, verb: Verb, outcome: Outcome) -> None:
        """Show how a verb ended."""

    def use_theme(self, name: str) -> None:
        """Change colours."""

    def switch_to(self, engine: EngineRecord | EndedEngine) -> None:
        """Leave the present engine and attach to another one, or show one that has ended."""

    def open_past(self, source: ReplaySource, title: str, *, diagnosis: bool = False) -> None:
        """Open the screens of a past on top of the present ones; with `diagnosis`, that one first."""

    def leave(self) -> None:
        """Leave a past that was opened from a live engine."""

    def export(self) -> None:
        """Write an export into the current folder."""
