"""Running a command on an attached link, and turning what can go wrong into exit codes."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ppconsole.cli import exits
from ppconsole.cli.options import Common

if TYPE_CHECKING:
    from ppengine.protocol.discovery import EndedEngine, EngineRecord
    from ppengine.protocol.recording import Update
    from ppengine.protocol.snapshot import Snapshot

    from ppconsole.link.ended import EndedSource
    from ppconsole.link.engine_link import EngineLink

ATTACH_S = 10.0
WAITS = "; waiting for an engine of its name"
"""Behind the end of an engine, from a command that goes on."""
SEE_WHY = "; to see why: "
"""Before the command that asks the host of an engine which does not answer."""
_UNSAFE = re.compile("[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
T = TypeVar("T")


def say(text: str) -> None:
    """Print one message on stderr; nothing in it can move a cursor."""
    from ppconsole.model.safe import clean

    click.echo(clean(text), err=True)


def print_json(value: Any) -> None:
    """Print one value as one line of JSON, and flush it: a reader may wait for it.

    Characters that move a cursor or reorder text are escaped: the same JSON, and harmless in a terminal.
    """
    import msgspec

    text = msgspec.json.encode(value).decode()
    click.echo(_UNSAFE.sub(lambda found: f"\\u{ord(found.group()):04x}", text))


@contextmanager
def _found() -> Iterator[None]:
    """Turn the errors of a search for an engine into a Failure with exit code 3 (none), 2 (several) or 1."""
    from ppengine.protocol.discovery import RuntimeDirError

    from ppconsole.link.contexts import ContextError
    from ppconsole.link.find import NoEngine, SeveralEngines

    try:
        yield
    except NoEngine as error:
        raise exits.Failure(str(error), exits.NO_ENGINE) from None
    except (SeveralEngines, ContextError) as error:
        raise exits.Failure(str(error), exits.USAGE) from None
    except RuntimeDirError as error:
        raise exits.Failure(str(error), exits.ERROR) from None


def find(wanted: str | None) -> EngineRecord:
    """Return the live engine that is meant. Raises Failure."""
    from ppconsole.link.find import find_engine

    with _found():
        return find_engine(wanted)


def find_far(wanted: str | None) -> EngineRecord | None:
    """Return the engine on another host that is meant; None: one of this host is. Raises Failure."""
    from ppconsole.link import find as finding

    with _found():
        return finding.find_far(wanted)


def find_any(wanted: str | None) -> EngineRecord | EndedEngine:
    """Return the engine that is meant, alive or ended. Raises Failure."""
    from ppconsole.link import find as finding

    with _found():
        return finding.find_any(wanted)


def run(main: Callable[[], Awaitable[T]]) -> T:
    """Run `main()` in a loop of its own; what a link raises becomes a Failure."""
    from ppengine.protocol.frames import NotUtf8

    from ppconsole.link.source import AccessDenied, LinkLost, QueryFailed

    async def body() -> T:
        return await main()

    try:
        return asyncio.run(body())
    except AccessDenied as error:
        raise exits.Failure(str(error), exits.DENIED) from None
    except LinkLost as error:
        raise exits.Failure(str(error), exits.TIMEOUT) from None
    except QueryFailed as error:
        raise exits.Failure(f"{error} ({error.code})", exits.OF_CODE[error.code]) from None
    except NotUtf8 as error:
        raise exits.Failure(f"{error}; nothing was sent", exits.USAGE) from None
    except TimeoutError:
        raise exits.Failure("no answer before --timeout was over", exits.TIMEOUT) from None


@contextmanager
def deadline(seconds: float | None) -> Iterator[None]:
    """Raise Failure with exit code 5 where the block takes longer. Main thread only; a loop has timeouts of its own."""

    def over(*_: object) -> None:
        raise exits.Failure(f"not done within {seconds:g} s", exits.TIMEOUT)

    if seconds is None:
        yield
        return
    handler = signal.signal(signal.SIGALRM, over)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


@asynccontextmanager
async def attached(
    common: Common, on_update: Callable[[Update], None] | None = None, **options: Any
) -> AsyncIterator[EngineLink]:
    """Attach to the engine that `common` names and leave it at the end. Raises Failure, LinkLost."""
    from ppconsole.link.engine_link import EngineLink
    from ppconsole.link.source import AccessDenied, LinkLost

    record = find(common.engine)
    link = EngineLink(record, **{"backlog": 0, **options})
    await link.start(on_update or (lambda update: None))
    try:
        try:
            await link.attached(common.timeout or ATTACH_S)
        except AccessDenied:
            raise
        except LinkLost as error:
            hint = "" if record.remote else f"{SEE_WHY}ppconsole -e {record.id} explain"
            raise LinkLost(f"{error}{hint}", sent=False) from None
        yield link
    finally:
        await link.close()


@asynccontextmanager
async def opened(
    common: Common, on_update: Callable[[Update], None] | None = None, **options: Any
) -> AsyncIterator[EngineLink | EndedSource]:
    """Attach to the engine that `common` names; one that has ended is read from its kept files, with a line on stderr.

    Raises Failure, LinkLost.
    """
    from ppengine.protocol.discovery import EndedEngine

    from ppconsole.link.ended import EndedSource
    from ppconsole.model.endings import ended_text

    found = find_any(common.engine)
    if not isinstance(found, EndedEngine):
        chosen = common if found.remote else replace(common, engine=found.id)
        async with attached(chosen, on_update, **options) as link:
            yield link
        return
    say(ended_text(found, time.time()))
    source = EndedSource(found)
    await source.start(on_update or (lambda update: None))
    try:
        yield source
    finally:
        await source.close()


async def has_ended(record: EngineRecord, within_s: float = 0.0) -> bool:
    """Whether the engine's supervisor, and with it the engine, has ended, or does so within `within_s` seconds."""
    from ppengine.protocol.discovery import alive

    end = asyncio.get_running_loop().time() + within_s
    while alive(record):
        if asyncio.get_running_loop().time() >= end:
            return False
        await asyncio.sleep(0.1)
    return True


class FirstSnapshot:
    """The first snapshot that a source delivers."""

    def __init__(self, common: Common) -> None:
        self._limit = common.timeout or ATTACH_S
        self._found: asyncio.Future[Snapshot] = asyncio.get_running_loop().create_future()

    @property
    def arrived(self) -> bool:
        """Whether it is here."""
        return self._found.done()

    def take(self, update: Update) -> None:
        """Take an update of the source."""
        from ppengine.protocol.snapshot import Snapshot

        if isinstance(update, Snapshot) and not self._found.done():
            self._found.set_result(update)

    async def get(self) -> Snapshot:
        """Wait for it. Raises LinkLost."""
        from ppconsole.link.source import LinkLost

        try:
            async with asyncio.timeout(self._limit):
                return await self._found
        except TimeoutError:
            raise LinkLost(f"attached, but no snapshot within {self._limit:g} s", sent=False) from None


async def one_snapshot(common: Common) -> Snapshot:
    """Return the first snapshot of a live engine, or the last one of an engine that has ended.

    Raises Failure, LinkLost.
    """
    first = FirstSnapshot(common)
    async with opened(common, first.take) as source:
        if not source.live and not first.arrived:
            raise exits.Failure("no picture of it was kept", exits.NOT_FOUND)
        return await first.get()


@asynccontextmanager
async def attached_with_snapshot(common: Common) -> AsyncIterator[tuple[EngineLink, Snapshot]]:
    """Attach to a live engine, and yield the link and the first snapshot. Raises Failure, LinkLost."""
    first = FirstSnapshot(common)
    async with attached(common, first.take, passing=True) as link:
        yield link, await first.get()


def named(text: str, snapshot: Snapshot, ended: Sequence[str] = ()) -> str:
    """Return the id of the request that `text` means, and say so if it is a part of it. Raises Failure.

    `ended`: ids of requests that have ended and that the snapshot lists no more.
    """
    from ppconsole.model.request_names import AmbiguousError, whole_in

    try:
        found = whole_in(text, snapshot, ended)
    except AmbiguousError as error:
        raise exits.Failure(str(error), exits.USAGE) from None
    if found != text:
        say(f"{text} is {found}")
    return found
