"""Fetching the past of an engine on another host for a command, with its progress on a terminal."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import click

from ppconsole.cli import exits
from ppconsole.cli.options import Common
from ppconsole.cli.session import attached, run, say

if TYPE_CHECKING:
    from ppconsole.link.far_past import Copied, FarPast, Progress
    from ppconsole.link.incident_source import Listed

_SHOWN_S = 0.2
"""Least seconds between two figures of the progress."""
T = TypeVar("T")


def fetch_list(common: Common) -> list[Listed]:
    """Return the incidents of an engine on another host. Raises Failure."""
    return _with_past(common, lambda past: past.incidents())


def fetch_incident(common: Common, listed: Listed, *, minutes: bool) -> Copied:
    """Copy the files of an incident. Raises Failure."""
    return _fetch(common, lambda past, progress: past.copy_incident(listed, progress, minutes=minutes))


def fetch_history(common: Common) -> Copied:
    """Copy the last hour of an engine on another host. Raises Failure."""
    return _fetch(common, lambda past, progress: past.copy_history(progress))


def _fetch(common: Common, copy: Callable[[FarPast, Progress], Awaitable[Copied]]) -> Copied:
    """Copy with the progress on stderr, and name the missing files. Whole files stay, also if it is broken off."""
    shown = _Shown()
    try:
        found = _with_past(common, lambda past: copy(past, shown.take))
    except exits.Failure as error:
        if shown.total:
            text = f"{error}; whole files that came are kept, and a repeat goes on there"
            raise exits.Failure(text, error.exit_code) from None
        raise
    finally:
        shown.end()
    if found.missing:
        say(found.missing)
    return found


def _with_past(common: Common, work: Callable[[FarPast], Awaitable[T]]) -> T:
    from ppconsole.link.far_past import FarPast

    async def body() -> T:
        async with asyncio.timeout(common.timeout), attached(common, slow=True, passing=True) as link:
            return await work(FarPast(link))

    try:
        return run(body)
    except OSError as error:
        raise exits.Failure(f"a copy cannot be written: {error}") from None


class _Shown:
    """The progress, in one line that is written over. Without a terminal there is none."""

    def __init__(self) -> None:
        self.total = 0
        self._at = 0.0
        self._terminal = sys.stderr.isatty()
        self._open = False

    def take(self, done: int, total: int) -> None:
        """Show bytes so far, and of all."""
        from ppconsole.model.units import bytes_text

        self.total, now = total, time.monotonic()
        if self._terminal and (now - self._at >= _SHOWN_S or done >= total):
            self._at, self._open = now, True
            share = 100 * done // max(1, total)
            click.echo(f"\rfetching {bytes_text(done)} of {bytes_text(total)}, {share} % ", nl=False, err=True)

    def end(self) -> None:
        """End the line."""
        if self._open:
            click.echo("", err=True)
