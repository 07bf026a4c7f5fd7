"""Arguments that the commands of this package share."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from ppengine.protocol.error_text import PREFIX

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a full or broken disk."""
_STDOUT = 1
ONCE_S = 2.0
"""Seconds in which interrupts are one: Ctrl-C reaches this process, and the command that passes it on."""


def run(command: Callable[[], int]) -> int:
    """Run a command and return its exit code: 1 if its output cannot be written, with a line if it has a reader."""
    _interrupt_once()
    try:
        code = command()
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        return 1
    except OSError as error:
        if error.filename is not None or error.errno not in _UNWRITABLE:
            raise
        _drop_output()
        to_stderr(f"{PREFIX}the output or a temporary file cannot be written: {error.strerror}")
        return 1
    return code


def _interrupt_once() -> None:
    """Let one Ctrl-C be one KeyboardInterrupt: a second one would interrupt the cleaning up after the first."""
    newest = -ONCE_S

    def interrupt(*_: object) -> None:
        nonlocal newest
        if time.monotonic() - newest >= ONCE_S:
            newest = time.monotonic()
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)


def _drop_output() -> None:
    """Keep the rest of the buffer from raising again when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)


class Parser(argparse.ArgumentParser):
    """Argument parser that reports an error in one line, as the CLI's verbs do."""

    def print_help(self, file: object = None) -> None:
        """Print the help to stdout; unlike the base class, raise OSError if it cannot be written."""
        print(self.format_help(), end="", flush=True)

    def error(self, message: str) -> NoReturn:
        """Print the line and exit with 2."""
        self.exit(2, f"error: {message}. See: {self.prog} --help\n")


AGAIN_S = 10.0
"""An exception that comes while a finalizer or a comparison in C runs is printed or lost there. Ends take less time."""


class Overdue(BaseException):
    """--timeout is over. No error that somebody on the way could take for one of his own."""


def overdue_after(seconds: float | None) -> None:
    """Raise Overdue in the main thread after `seconds`, and again if somebody on the way drops it; None: never."""

    def over(*_: object) -> None:
        raise Overdue

    signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds or 0.0, AGAIN_S)


def to_stderr(text: str) -> None:
    """Write a line of progress to stderr, where results are not."""
    print(text, file=sys.stderr, flush=True)


def at_least_one(text: str) -> int:
    """Return a count given on the command line. Raises argparse.ArgumentTypeError below 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of 1 or more")
    return int(text)


def above_zero(text: str) -> float:
    """Return seconds given on the command line. Raises argparse.ArgumentTypeError where no time can pass."""
    return _between(text, "of seconds above 0, 1e6 at most", 0.0, 1e6)


def rate(text: str) -> float:
    """Return a rate, time or size given on the command line. Raises argparse.ArgumentTypeError for none."""
    return _between(text, "above 0, 1e9 at most", 0.0, 1e9)


def share(text: str) -> float:
    """Return a factor given on the command line. Raises argparse.ArgumentTypeError outside of (0, 1]."""
    return _between(text, "above 0, 1 at most", 0.0, 1.0)


def _between(text: str, words: str, low: float, high: float) -> float:
    with contextlib.suppress(ValueError):
        if low < (value := float(text)) <= high:
            return value
    raise argparse.ArgumentTypeError(f"{text} is not a number {words}")
