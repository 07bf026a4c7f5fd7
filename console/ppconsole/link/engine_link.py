"""The live link: attaches, reattaches until it is closed, and carries commands with a definite end."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import random
import time
from collections.abc import Callable
from typing import Unpack

import msgspec
import zmq.asyncio
from ppengine.protocol.control import (
    Command,
    Fetch,
    Fetched,
    Inspect,
    Inspected,
    InspectWhat,
    Outcome,
    Refused,
    Replay,
    Replayed,
    ToBulk,
    Welcome,
)
from ppengine.protocol.discovery import EndedEngine, EngineRecord, RuntimeDirError, alive
from ppengine.protocol.frames import (
    TOPIC_SNAPSHOT,
    TOPIC_SNAPSHOT_PACKED,
    TOPIC_SNAPSHOT_SLOW,
    ProtocolError,
    decode_as,
)
from ppengine.protocol.kept_files import engine_folder, read_end
from ppengine.protocol.past_files import CAPABILITY, ListPast, PastListed, PastPart, ReadPast
from ppengine.protocol.recording import LinkState, Update
from ppengine.protocol.severity import Level, is_at_least
from ppengine.protocol.snapshot import Event, Snapshot
from ppengine.protocol.verb_table import Role
from ppengine.protocol.verbs import Verb

from ppconsole.link.attachment import Answer, Handlers, KeyRefused, Session, SessionOver, Timing
from ppconsole.link.ended import kept_detail
from ppconsole.link.event_feed import EventFeed
from ppconsole.link.find import rediscover
from ppconsole.link.pending import Commands, command_id
from ppconsole.link.source import (
    DETAILS,
    AccessDenied,
    CommandOptions,
    Detail,
    InspectOptions,
    LinkLost,
    Progress,
    QueryFailed,
)
from ppconsole.model.endings import end_words

GATHER_S = 0.25
WARNINGS = 100
"""Older warnings and errors of a console."""


class EngineLink:
    """A `Source` on a running engine. Never gives up by itself: `lost` is a state, not an end.

    `backlog`: how many older events to ask for when it attaches. `warnings`: how many warnings and errors before
    those, which under load have left them long ago. `slow`: one snapshot a second instead of ten, and
    what follows upon another in less than `GATHER_S` waits for it. `passing`: no console, but a client that waits for
    something and goes, such as `submit`.
    """

    live = True

    def __init__(
        self,
        record: EngineRecord,
        *,
        find: Callable[[], EngineRecord | None] | None = None,
        user: str | None = None,
        read_only: bool = False,
        backlog: int = 100,
        warnings: int = 0,
        slow: bool = False,
        passing: bool = False,
        timing: Timing | None = None,
    ) -> None:
        self.record = record
        self.user = user or local_user()
        self.read_only = read_only
        self._passing = passing
        self._console = command_id()
        self._find = find or rediscover(record)
        self._backlog = backlog
        self._topic = TOPIC_SNAPSHOT_SLOW if slow else TOPIC_SNAPSHOT
        self._timing = timing or (Timing(gather_s=GATHER_S) if slow else Timing())
        self._emit: Callable[[Update], None] = lambda update: None
        self._commands = Commands()
        self._events = EventFeed(
            warnings, self.newest_of, deliver=self._deliver, show=lambda event: self._emit(event),
            jitter_s=self._timing.jitter_s,
        )  # fmt: skip
        self._session: Session | None = None
        self._over: EndedEngine | None = None
        self._attached = asyncio.Event()
        """Set while there is a session, and after an attempt that failed by its key."""
        self._denied = False
        """The last attempt failed by its key."""
        self._epoch: str | None = None
        self._up = False
        self._role: Role | None = None
        """Rights of this console's key, as reported last."""
        self._snapshot_at: float | None = None
        self._runner: asyncio.Task[None] | None = None
        self._text = "connecting"

    async def start(self, on_update: Callable[[Update], None]) -> None:
        """Begin to attach; updates come by `on_update`."""
        self._emit = on_update
        self._runner = asyncio.create_task(self._run())
        self._runner.add_done_callback(self._ended)

    async def attached(self, timeout: float | None = None) -> Welcome:
        """Wait until a handshake has succeeded and return its Welcome.

        Raises LinkLost after `timeout` seconds, and AccessDenied as soon as the engine refuses the key.
        """
        try:
            async with asyncio.timeout(timeout):
                while self._session is None:
                    await self._attached.wait()
                    if self._denied:
                        raise AccessDenied(self._text)
                return self._session.welcome
        except TimeoutError:
            raise LinkLost(f"not attached within {timeout:g} s: {self._text}", sent=False) from None

    async def close(self) -> None:
        """Leave. The engine is not touched; commands without an end raise LinkLost."""
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.remove_done_callback(self._ended)
            runner.cancel()
            await asyncio.gather(runner, return_exceptions=True)
        self._commands.over("this console left before the engine answered")

    async def command(
        self,
        verb: Verb,
        *,
        epoch: str | None = None,
        on_progress: Progress | None = None,
        timeout: float | None = None,
        **options: Unpack[CommandOptions],
    ) -> Outcome | Refused:
        """See `Source.command`. A command is for the epoch that is attached now, and carried out once or not at all."""
        identity = command_id()
        if self.read_only:
            return Refused(id=identity, code="DENIED", text="this console is read-only")
        session = self._session
        if session is None:
            raise LinkLost(f"not sent, nothing happened: the link is down ({self._text})", sent=False)
        now = session.welcome.epoch
        if epoch not in (None, now):
            text = f"the engine was restarted: this was about epoch {epoch}, {now} runs; nothing was sent"
            return Refused(id=identity, code="STALE_EPOCH", text=text)
        command = Command(id=identity, epoch=now, verb=verb, by=self.user, **options)
        pending = self._commands.add(command, on_progress)
        try:
            async with asyncio.timeout(timeout):
                with contextlib.suppress(LinkLost):  # It is sent when the link is back.
                    await session.send_command(command)
                    pending.on_wire = True
                return await pending.answer
        except TimeoutError:
            known = "accepted, but its end" if pending.accepted else "sent, but an answer"
            text, sent = f"unknown outcome: {known} did not come within {timeout:g} s", pending.on_wire
            raise LinkLost(text if sent else f"not sent within {timeout:g} s, nothing happened", sent=sent) from None
        finally:
            self._commands.drop(identity)

    async def fetch(
        self, request: str, *, offset: int = 0, text_offset: int = 0, sample: int = 0, wait_ms: int = 1000
    ) -> Fetched:
        """See `Source.fetch`."""
        question = Fetch(
            nonce=0, request=request, offset=offset, text_offset=text_offset, sample=sample, wait_ms=wait_ms
        )
        answer = await self._ask(question, wait_ms / 1000)
        if not isinstance(answer, Fetched):
            raise QueryFailed("PROTOCOL", f"the engine answered a fetch with {type(answer).__name__}")
        return answer

    async def inspect(self, what: InspectWhat, **options: Unpack[InspectOptions]) -> Detail:
        """See `Source.inspect`. Once the engine has ended, its kept files answer."""
        if self._over is not None:
            return await asyncio.to_thread(kept_detail, self._over, what, options)
        answer = await self._ask(Inspect(nonce=0, what=what, **options))
        if not isinstance(answer, Inspected):
            raise QueryFailed("PROTOCOL", f"the engine answered an inspection with {type(answer).__name__}")
        try:
            detail: Detail = decode_as(DETAILS[what], bytes(answer.data))
        except ProtocolError as error:
            raise QueryFailed("PROTOCOL", str(error)) from None
        return detail

    async def ask_past(self, question: ListPast | ReadPast) -> PastListed | PastPart:
        """Return the list of past files, or a part of one. Raises LinkLost, QueryFailed."""
        if self._session is not None and CAPABILITY not in self._session.welcome.capabilities:
            text = "the engine is of an earlier version, which hands out no files of the past; see them on its host"
            raise QueryFailed("UNSUPPORTED", text)
        answer = await self._ask(question)
        if not isinstance(answer, PastListed | PastPart):
            raise QueryFailed("PROTOCOL", f"the engine answered about the past with {type(answer).__name__}")
        return answer

    async def newest_of(self, level: Level, most: int, until: int) -> list[Event]:
        """Return the newest events up to `until` of a level and above. Raises LinkLost, QueryFailed."""
        answer = await self._ask(Replay(nonce=0, after=0, until=until, level=level, most=most))
        found = answer.events if isinstance(answer, Replayed) else []
        # An engine of an earlier version answers with all levels.
        chosen = [event for event in found if event.seq <= until and is_at_least(event, level)]
        return chosen[-most:] if most > 0 else []

    async def _ask(self, question: ToBulk, wait_s: float = 0.0) -> Answer:
        session = self._session
        if session is None:
            raise LinkLost(f"not sent: the link is down ({self._text})", sent=False)
        return await session.ask(question, wait_s)

    async def _run(self) -> None:
        context = zmq.asyncio.Context()
        failures = 0
        self._emit(LinkState(state="connecting", text=f"connecting to {self.record.label}"))
        try:
            while True:
                denied = False
                try:
                    self._text = await self._once(context)
                except SessionOver as over:
                    self._text, denied = str(over), isinstance(over, KeyRefused)
                self._denied = denied
                if denied:
                    self._attached.set()
                else:
                    self._attached.clear()
                failures = 1 if self._up else failures + 1
                self._up = False
                self._commands.connection_lost(self._text)
                if not alive(self.record):
                    self._commands.over(f"engine {self.record.name} ({self.record.id}) ended before it answered")
                self._note_end()
                ceiling = min(self._timing.backoff_cap_s, self._timing.backoff_s * 2 ** min(failures - 1, 16))
                delay = ceiling * random.uniform(0.7, 1.0)
                if self._over is None:
                    self._emit(LinkState(state="lost", age_s=self._age(), retry_in_s=delay, text=self._text))
                await asyncio.sleep(delay)
        finally:
            context.destroy(linger=0)

    def _note_end(self) -> None:
        """Report, once, that the engine has ended; a successor of its name is looked for all the same."""
        known = self._over is not None or self.record.remote
        end = None if known else read_end(self.record.id)
        if end is not None:
            self._over = EndedEngine(self.record, end, engine_folder(self.record.id))
            self._emit(LinkState(state="ended", age_s=self._age(), text=end_words(end)))
        if self._over is not None:
            self._text = end_words(self._over.end)

    async def _once(self, context: zmq.asyncio.Context) -> str:
        """Attach once and stay until it breaks; return, or raise SessionOver with, the reason."""
        try:
            record = self._find()
        except RuntimeDirError as error:
            return str(error)
        if record is None:
            return f"no engine {self.record.name} ({self.record.id}) runs here"
        # The way to another host may be slow.
        packed = record.remote and self._topic == TOPIC_SNAPSHOT_SLOW
        session = await Session.open(
            context, record, user=self.user, read_only=self.read_only, passing=self._passing,
            topic=TOPIC_SNAPSHOT_PACKED if packed else self._topic,
            timing=self._timing, console=self._console,
        )  # fmt: skip
        self.record = _named(record, session.welcome)
        self._enter(session)
        handlers = Handlers(self._on_snapshot, self._events.take, self._commands.take, self._on_stale)
        try:
            with contextlib.suppress(LinkLost, TimeoutError):  # `run` sees that the link is broken
                async with asyncio.timeout(self._timing.ping_s):
                    for command in self._commands.attached(session.welcome.epoch):
                        await session.send_command(command)
            await session.run(handlers)
        finally:
            self._session = None
            self._attached.clear()
            await self._events.detach()
        return "the link broke"

    def _enter(self, session: Session) -> None:
        """Take up a fresh session: note a new epoch, and ask for the events that were missed."""
        welcome = session.welcome
        if self._epoch != welcome.epoch:
            if self._epoch is not None:
                text = f"engine {welcome.name} restarted: epoch {self._epoch[:8]} is now {welcome.epoch[:8]}"
                self._emit(LinkState(state="new-epoch", age_s=self._age(), text=text))
                self._snapshot_at = None
            self._epoch = welcome.epoch
            self._events.begin(max(welcome.event_seq - self._backlog, welcome.event_oldest - 1, 0))
        self._session, self._over, self._denied = session, None, False
        self._attached.set()
        self._events.attach(session, welcome.event_seq)

    def _on_snapshot(self, snapshot: Snapshot) -> None:
        now = time.monotonic()
        self._snapshot_at = now
        self._commands.see_snapshot(snapshot)
        role = None if self._session is None else self._session.role
        if not self._up or role != self._role:
            self._up, self._role = True, role
            self._emit(LinkState(state="live", age_s=0.0, role=role))
        self._emit(snapshot)
        self._events.reach(snapshot.event_seq, now)

    def _on_stale(self, age_s: float, text: str) -> None:
        self._up = False
        self._emit(LinkState(state="stale", age_s=age_s, text=f"no snapshot for {age_s:.0f} s; {text}"))

    def _deliver(self, event: Event) -> None:
        if event.kind == "link.gap":
            self._commands.events_gone()
        self._commands.see_event(event)
        self._emit(event)

    def _age(self) -> float | None:
        return None if self._snapshot_at is None else time.monotonic() - self._snapshot_at

    def _ended(self, runner: asyncio.Task[None]) -> None:
        """Report a fault of this program itself; the loop's own handler prints the traceback."""
        if not runner.cancelled() and (error := runner.exception()) is not None:
            self._emit(LinkState(state="lost", age_s=self._age(), text=f"the link failed: {error!r}; please report it"))


def far_link(source: object) -> EngineLink | None:
    """Return `source` if it is a link to an engine on another host: then its kept files are not here."""
    return source if isinstance(source, EngineLink) and source.record.remote else None


def _named(record: EngineRecord, welcome: Welcome) -> EngineRecord:
    """Return the record of an engine elsewhere with its id, name and epoch."""
    if not record.remote:
        return record
    return msgspec.structs.replace(record, id=welcome.engine, name=welcome.name, epoch=welcome.epoch)


def local_user() -> str:
    """Return the name that this process acts under."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid{os.getuid()}"
