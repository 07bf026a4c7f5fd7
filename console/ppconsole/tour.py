"""The tour: the console on an engine of its own, with a caption and with keys that the tour presses by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from ppengine.protocol.recording import Update
from ppengine.protocol.snapshot import Snapshot
from textual import events
from textual.binding import BindingType
from textual.screen import Screen
from textual.widgets import Button

from ppconsole.app import ConsoleApp
from ppconsole.screens.confirm import Confirm
from ppconsole.view.cells import cut

READ_S = 10.0
"""Time that `--auto` leaves for a caption, at speed 1."""
TYPE_S = 0.06
"""Time between two keys, at speed 1."""
NOTED_S = 0.5
"""A wait of less is not shown: each change of the frame draws the whole screen."""
_NAMES = {" ": "space", ":": "colon", "-": "minus", ".": "full_stop"}
_FAILED = 1


class DidNotHappen(Exception):
    """A step of the tour did not happen in time; the text names the missing effect."""


class Done(NamedTuple):
    """A step that happened: its name, the fact that shows it, and the seconds since its begin."""

    name: str
    fact: str
    seconds: float


class TourApp(ConsoleApp):
    """Plays `steps` on the console. Keys of the operator go to the tour, those of the tour to the console.

    `auto`: goes on by itself. `speed`: how much faster than at reading speed.
    """

    BINDINGS: ClassVar[list[BindingType]] = []

    def __init__(self, *arguments: Any, steps: tuple[Any, ...], auto: bool, speed: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.done: list[Done] = []
        self.failure = ""
        self._steps, self._auto, self._speed = steps, auto, speed
        self._tour_keys: set[int] = set()
        """Ids of key events of the tour."""
        self._caption = self._hint = ""
        self._around: tuple[Screen[Any], str, str] | None = None
        """Screen and texts that have been drawn around it."""
        self._page = 0
        """Caption on display, counted back from the newest."""
        self._captions: list[str] = []
        self._go_on = asyncio.Event()
        self._came = asyncio.Event()

    def on_mount(self) -> None:
        """Begin the tour. Textual calls the console's own handler, too."""
        self.run_worker(self._tour(), name="tour", exit_on_error=True)

    def on_update(self, update: Update) -> None:
        """Take one update, and let a step that waits look at it."""
        super().on_update(update)
        self._came.set()

    # --- caption ------------------------------------------------------------------------------------------------

    def paint(self) -> None:
        """Paint the screens, and the caption around the top one."""
        if self.is_running:
            self._caption_around(self.screen)
        super().paint()

    def _caption_around(self, screen: Screen[Any]) -> None:
        """Show the caption above a screen and the keys of the tour below it; the screen has the rows between."""
        room = max(10, self.size.width - 4)
        around = (screen, cut(self._caption, room), cut(self._hint, room))
        if around != self._around:  # a border that is set, be it the same, draws the whole screen
            if self._around is None or self._around[0] is not screen:
                screen.styles.border_top = screen.styles.border_bottom = ("heavy", self.current_theme.primary)
            self._around = around
            screen.border_title, screen.border_subtitle = _plain(around[1]), _plain(around[2])

    def say(self, caption: str) -> None:
        """Show a caption."""
        self._captions.append(caption)
        self._page = 0
        self._show()

    def _show(self, waits: str = "") -> None:
        """Show the present caption. `waits`: the thing that the tour waits for."""
        at = len(self._captions) - 1 - self._page
        self._caption = self._captions[at] if self._captions else ""
        keys = "q leaves" if self._auto else "Space or Enter: next   b: back   q: leave"
        where = f"tour {min(len(self.done) + 1, len(self._steps))} of {len(self._steps)}"
        self._hint = f"{where}   {f'waiting for {waits}' if waits else keys}"
        self.paint()

    # --- steps --------------------------------------------------------------------------------------------------

    async def _tour(self) -> None:
        """Play all steps; the first that does not happen ends the tour."""
        try:
            for step in self._steps:
                begun = time.monotonic()
                fact = await step.play(self)
                self.done.append(Done(step.name, fact, time.monotonic() - begun))
                self._show()
                await self._read()
        except DidNotHappen as error:
            self.failure = str(error)
            self.say(f"This did not happen: {error}. q leaves.")
            if self._auto:
                await asyncio.sleep(READ_S / self._speed)
                self.exit(_FAILED)
            return
        self.exit(0)

    async def _read(self) -> None:
        """Wait for the operator, or as long as a caption takes to read."""
        self._go_on.clear()
        if self._auto:
            await asyncio.sleep(READ_S / self._speed)
        else:
            await self._go_on.wait()

    async def press(self, *keys: str) -> None:
        """Press keys of the console, as the operator would."""
        for key in keys:
            event = events.Key(_NAMES.get(key, key), key if len(key) == 1 else None)
            self._tour_keys.add(id(event))
            self.post_message(event)
            await asyncio.sleep(TYPE_S / self._speed)
            while id(event) in self._tour_keys:  # the event is alive until the app has taken it
                await asyncio.sleep(0.005)

    async def enter(self, opener: str, text: str) -> None:
        """Open the line of the main screen with a key, type a text, and leave the line behind its Enter."""
        line = self.main.line
        await self.press(opener)
        await self.until(lambda: line.is_open, "line to type in")
        await self.press(*text, "enter")
        await self.until(lambda: not line.is_open or not line.input.value, "answer to Enter")
        if opener == "i" and line.is_open:  # It stays open for the next prompt; Esc after a verb closes its dialog.
            await self.press("escape")
        await self.until(lambda: not line.is_open, "end of the line")

    async def until(self, ready: Callable[[], Any], what: str, limit_s: float = 20.0) -> None:
        """Wait until `ready()`. Raises DidNotHappen after `limit_s` seconds, at any speed."""
        begun, shown = time.monotonic(), False
        while not ready():
            past_s = time.monotonic() - begun
            if past_s > limit_s:
                raise DidNotHappen(f"no {what} within {limit_s:g} s")
            if past_s > NOTED_S and not shown:
                shown = True
                self._show(what)
            self._came.clear()
            try:
                async with asyncio.timeout(0.1):
                    await self._came.wait()
            except TimeoutError:
                continue
        if shown:
            self._show()

    async def confirm(self) -> None:
        """Wait for the plan of a dialog, leave time to read it, and confirm."""
        await self.planned()
        await asyncio.sleep(READ_S / 3 / self._speed)
        await self.press("right", "enter")
        await self.until(lambda: not isinstance(self.screen, Confirm), "the end of the verb", 60.0)

    async def planned(self) -> None:
        """Wait for a confirm dialog with the engine's plan."""

        def ready() -> bool:
            screen = self.screen
            buttons = screen.query("#confirm").results(Button)
            return isinstance(screen, Confirm) and any(not button.disabled for button in buttons)

        await self.until(ready, "plan of the engine")

    @property
    def snapshot(self) -> Snapshot:
        """The newest snapshot. Raises DidNotHappen without one."""
        snapshot = self.model.state.snapshot
        if snapshot is None:
            raise DidNotHappen("no snapshot of the engine")
        return snapshot

    # --- keys of the operator -----------------------------------------------------------------------------------

    async def on_event(self, event: events.Event) -> None:
        """Give keys of the operator to the tour."""
        if isinstance(event, events.Key) and not event.is_forwarded:
            if id(event) not in self._tour_keys:
                self._operator(event.key)
                return
            self._tour_keys.discard(id(event))
        await super().on_event(event)

    def _operator(self, key: str) -> None:
        """Go on, back to an earlier caption, or leave."""
        if key in ("q", "ctrl+c"):
            self.exit(0 if self.failure == "" else _FAILED)
        elif key == "b":
            self._page = min(self._page + 1, len(self._captions) - 1)
            self._show()
        elif key in ("space", "enter") and self._page:
            self._page -= 1
            self._show()
        elif key in ("space", "enter"):
            self._go_on.set()


def _plain(text: str) -> str:
    """Return `text` so that it is no markup."""
    return text.replace("[", r"\[")
