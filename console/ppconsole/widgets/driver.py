"""The terminal's driver: it draws on the terminal, wherever that is, and delivers a paste as one event."""

from __future__ import annotations

import select
import signal
import sys
import threading
from collections.abc import Iterable
from typing import Any

from textual._xterm_parser import BRACKETED_PASTE_END, BRACKETED_PASTE_START, XTermParser
from textual.drivers import linux_driver
from textual.message import Message

from ppconsole.model.safe import clean

ESCAPE_S = 0.03
"""A terminal sends the characters of a function key together; a slow link parts them seldom, and not for long."""


class PasteParser(XTermParser):
    """Collects a bracketed paste up to its end and hands on its text without control characters.

    Textual's parser takes escape sequences inside a paste for keys, and those arrive before the text around them.
    """

    def __init__(self, debug: bool = False) -> None:
        super().__init__(debug)
        self._tail = ""
        """The last characters read: the mark that begins a paste may come in two reads."""
        self._pasted: str | None = None
        """The paste so far; None outside of one."""

    def feed(self, data: str) -> Iterable[Message]:
        """Yield the messages in `data`. Textual's parser sees both marks of a paste and clean text between them."""
        if not data:
            yield from super().feed(data)
        while data:
            if self._pasted is None:
                known = self._tail + data
                begin = known.find(BRACKETED_PASTE_START)
                end = len(data) if begin < 0 else begin + len(BRACKETED_PASTE_START) - len(self._tail)
                yield from super().feed(data[:end])
                self._tail = known[-len(BRACKETED_PASTE_START) + 1 :] if begin < 0 else ""
                self._pasted = None if begin < 0 else ""
                data = data[end:]
            else:
                text, mark, data = (self._pasted + data).partition(BRACKETED_PASTE_END)
                self._pasted = None if mark else text
                if mark:
                    yield from super().feed(clean(text, newlines=True) + mark)

    def tick(self) -> Iterable[Message]:
        """Yield the messages that a silence completes: Esc is a key if nothing follows it within `ESCAPE_S`.

        Textual looks ten times a second alone, so Esc took more than 0.1 s.
        """
        if self._timeout_time is not None and not _more_within(ESCAPE_S):
            self._timeout_time = 0.0
        yield from super().tick()


def _more_within(seconds: float) -> bool:
    """Whether the terminal sends more within `seconds`; without a terminal, nothing is known to be missing."""
    return sys.__stdin__ is None or bool(select.select([sys.__stdin__], [], [], seconds)[0])


setattr(linux_driver, "XTermParser", PasteParser)  # noqa: B010  # the driver has no other place for its parser


class ConsoleDriver(linux_driver.LinuxDriver):
    """Textual draws on stderr; an operator who redirects that wants errors in it and no screen."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        on_terminal = sys.__stderr__ is not None and sys.__stderr__.isatty()
        if not on_terminal and sys.__stdout__ is not None:
            self._file = sys.__stdout__

    def start_application_mode(self) -> None:
        """Begin to draw and to read keys; leave after a signal, and once the terminal has hung up."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            # `demo` and `tour` have handlers of their own, and `nohup` ignores SIGHUP.
            if signal.getsignal(number) is signal.SIG_DFL:
                self._loop.add_signal_handler(number, self._leave_on_signal, number)
        super().start_application_mode()  # type: ignore[no-untyped-call]
        threading.Thread(target=self._leave_on_hangup, name="hangup", daemon=True).start()

    def _leave_on_signal(self, number: signal.Signals) -> None:
        """Give the terminal back and end with the exit code that a shell gives to a death by `number`."""
        self._app.exit(return_code=128 + number)

    def _leave_on_hangup(self) -> None:
        """Wait for the hangup. Without the terminal as controlling terminal there is no SIGHUP, and each read returns
        nothing at once: Textual's thread for keys would keep a core busy for ever.
        """
        hangup = select.poll()
        hangup.register(self.fileno, 0)
        hangup.poll()
        self._app.call_from_thread(self._app.exit)
