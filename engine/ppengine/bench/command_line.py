"""Arguments that the commands of this package share."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Argument parser that reports an error in one line, as the CLI's verbs do."""

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
