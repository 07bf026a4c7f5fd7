"""`wait`: until an engine serves, or until it has no request left; for systemd, CI and jobs of Kubernetes."""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING

import click

from ppconsole.cli import exits
from ppconsole.cli.options import Common, common_options
from ppconsole.cli.session import find, print_json, run, say

if TYPE_CHECKING:
    from ppengine.protocol.discovery import EngineRecord
    from ppengine.protocol.recording import Update
    from ppengine.protocol.snapshot import Snapshot

_LOOK_S = 0.2
"""Seconds between two looks for an engine."""
_REPEAT_S = 30.0
"""Seconds after which a reason whose figures have changed is printed again."""
_CORE_LATE_S = 2.0
"""Age of the core's report from which on it says nothing about now."""
_FIGURES = re.compile(r"\d+")
_SERVES = ("serving", "resizing")


@click.command("wait")
@click.argument("goal", type=click.Choice(["serving", "idle"]))
@common_options
def wait_command(common: Common, goal: str) -> None:
    """Wait until an engine serves, or has no request left.

    With an HTTP port it serves once that takes calls. The wait may begin before the engine does. Each reason to go on
    is a line on stderr. An engine that ends meanwhile ends it, with exit code 3. Without --timeout it waits for as long
    as it takes.
    """
    from ppconsole.model.safe import clean

    began = time.monotonic()
    snapshot = run(lambda: _Waiting(common, goal).done())
    engine = snapshot.engine
    if common.json:
        waited_s = round(time.monotonic() - began, 3)
        print_json({"engine": engine.id, "name": engine.name, "state": engine.state, "waited_s": waited_s})
    else:
        click.echo(clean(f"{engine.name} ({engine.id}) {'serves' if goal == 'serving' else 'is idle'}"))


def not_serving(snapshot: Snapshot) -> str:
    """Return why an engine does not serve, or its HTTP port, if it has one; empty: they do."""
    engine = snapshot.engine
    if engine.state not in _SERVES:
        return f"it is {engine.state}{engine.message and ': '}{engine.message}"
    return "" if engine.http_serves is not False else "no process of its HTTP port takes calls yet"


def not_idle(snapshot: Snapshot) -> str:
    """Return why an engine is not idle; empty: no request was left at the core's report."""
    if snapshot.engine.state == "loading":
        return not_serving(snapshot)  # The requests of the core before this one may not be back.
    if left := snapshot.requests_total:
        return f"{left} request{'s' * (left != 1)} left, {snapshot.queues.running} of them running"
    return "" if snapshot.core_age_ms is not None else "the core does not report"


class _Reasons:
    """Prints why a wait goes on: each reason at once, the same one with other figures now and then."""

    def __init__(self) -> None:
        self.newest = ""
        self._printed = ""
        self._printed_at = 0.0

    def take(self, text: str) -> None:
        """Take the reason of this moment."""
        self.newest = text
        now = time.monotonic()
        alike = _FIGURES.sub("", text) == _FIGURES.sub("", self._printed)
        if text != self._printed and (not alike or now - self._printed_at >= _REPEAT_S):
            self._printed, self._printed_at = text, now
            say(f"waiting: {text}")


class _Waiting:
    """One wait. `done` returns the snapshot that reaches the goal."""

    def __init__(self, common: Common, goal: str) -> None:
        self._common, self._goal = common, goal
        self._reasons = _Reasons()
        self._reached: asyncio.Future[Snapshot] = asyncio.get_running_loop().create_future()
        self._attached_at: float | None = None

    async def done(self) -> Snapshot:
        """Wait until the goal is reached. Raises Failure, AccessDenied."""
        limit = self._common.timeout
        try:
            async with asyncio.timeout(limit):
                return await self._watched(await self._found())
        except TimeoutError:
            word = "does not serve" if self._goal == "serving" else "is not idle"
            raise exits.Failure(f"it {word} within {limit:g} s: {self._reasons.newest}", exits.TIMEOUT) from None

    async def _found(self) -> EngineRecord:
        """Return the engine that is meant, once there is one. Raises Failure if it has begun and ended meanwhile."""
        from ppconsole.link.find import newest_ended
        from ppconsole.model.endings import ended_text

        began = time.time()
        while True:
            try:
                return find(self._common.engine)
            except exits.Failure as error:
                if error.exit_code != exits.NO_ENGINE:
                    raise
                ended = newest_ended(self._common.engine)
                if ended is not None and ended.end.wall > began:
                    raise exits.Failure(ended_text(ended, time.time()), exits.NO_ENGINE) from None
                self._reasons.take(error.message)
            await asyncio.sleep(_LOOK_S)

    async def _watched(self, record: EngineRecord) -> Snapshot:
        from ppconsole.link.engine_link import EngineLink

        link = EngineLink(record, backlog=0, slow=True, passing=True)
        await link.start(self._take)
        attaching = asyncio.create_task(link.attached())
        try:
            # A key that is refused ends the wait, as does an engine that ends before it is attached to.
            await asyncio.wait((attaching, self._reached), return_when=asyncio.FIRST_EXCEPTION)
            if attaching.done():
                attaching.result()
            return await self._reached
        finally:
            attaching.cancel()
            await link.close()

    def _take(self, update: Update) -> None:
        from ppengine.protocol.recording import LinkState
        from ppengine.protocol.snapshot import Snapshot

        if self._reached.done():
            return
        if isinstance(update, Snapshot):
            self._see(update)
        elif isinstance(update, LinkState) and update.state == "ended":
            self._reached.set_exception(exits.Failure(f"the engine {update.text}", exits.NO_ENGINE))
        elif isinstance(update, LinkState) and update.state not in ("connecting", "live"):
            self._attached_at = None
            self._reasons.take(f"{update.state}: {update.text}")

    def _see(self, snapshot: Snapshot) -> None:
        now = time.monotonic()
        if self._attached_at is None:
            self._attached_at = now
        known_s, age_s = now - self._attached_at, (snapshot.core_age_ms or 0.0) / 1e3
        if reason := not_serving(snapshot) if self._goal == "serving" else not_idle(snapshot):
            self._reasons.take(reason)
        elif age_s > _CORE_LATE_S:
            self._reasons.take(f"the core has not reported for {age_s:.0f} s")
        elif self._goal == "serving" or age_s < known_s:
            self._reached.set_result(snapshot)
        else:
            # A report from before may lack a request that was submitted just now.
            self._reasons.newest = "the next report of the core has not come"
