"""Work of the console's own process, at times when no key waits for it."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable

QUIET_S = 1.0
"""Seconds without a key after which garbage is searched for."""
EVERY_S = 10.0
"""Least seconds between two searches."""
YOUNG_MOST, MIDDLE_MOST, OLD_MOST = 700, 10, 50
"""Thresholds of Python's own searches. The last one is five times Python's: it is for an operator who never pauses."""
SWITCH_S = 0.001
"""Longest time for which a thread that reads the past keeps the interpreter from the screens; Python's is 5 ms."""


class Upkeep:
    """Imports the other screens behind the first picture, and searches for garbage in pauses of the keyboard.

    A whole search stops the console for 70 ms with the objects of all modules, and for 5 ms without them.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._key_at = self._searched_at = clock()
        self._begun = False

    def rest(self) -> None:
        """Begin, or search if a search is due; call it after each picture. Screens that were left become garbage."""
        now = self._clock()
        if not self._begun:
            self._begun = True
            threading.Thread(target=begin, name="upkeep", daemon=True).start()
        elif now - self._key_at >= QUIET_S and now - self._searched_at >= EVERY_S:
            self._searched_at = now
            gc.collect()

    def note_key(self) -> None:
        """Note that a key was pressed."""
        self._key_at = self._clock()


def begin() -> None:
    """Import the other screens, exempt all objects so far from the searches, and set limits. For a thread."""
    from ppconsole.link import last_hour  # noqa: F401
    from ppconsole.screens import (  # noqa: F401
        confirm,
        detail_screens,
        diagnosis_screen,
        engines_screen,
        finished_screen,
        incidents_screen,
        memory,
        past_console,
        request_screen,
        streams_screen,
    )
    from ppconsole.view import help_page  # noqa: F401

    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_MOST, MIDDLE_MOST, OLD_MOST)
