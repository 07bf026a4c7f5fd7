"""A queue of chats, and the process that renders one of them at a time by the checkpoint's template.

Its parent, the core or an HTTP process, never waits for it. The process is started at the first chat, is killed at the
deadline of one, and is replaced at the next. A chat that has ended two processes is refused, and no other.
"""

from __future__ import annotations

import logging
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ppengine.common.child_process import Child, spawn
from ppengine.common.one_line import one_line
from ppengine.protocol.chat_messages import Chat, Render, Rendered, RendererReady
from ppengine.protocol.frames import encode

log = logging.getLogger("ppengine.templates.parent")

MODULE = "ppengine.templates"
CPU_S = 2
"""Processor seconds for one chat: the kernel ends the process. A template takes a thousandth."""
RENDER_S = 10.0
"""Seconds for one chat, in case that the process is stopped, or that the machine is too busy."""
START_S = 30.0
"""Seconds for the start of the process, which imports Jinja on a machine that may be busy."""
DEFER_S = 0.2
"""Seconds after which a chat that still waits is reported as deferred."""
WAITING_MOST = 256
"""Chats that wait; later ones are refused."""


class TooManyChatsError(Exception):
    """As many chats wait as may; one line."""


@dataclass(eq=False, slots=True)
class _Chat:
    """One chat, and the functions that take its end and the reason of its wait."""

    message: Render
    end: Callable[[Rendered], None]
    defer: Callable[[str], None] | None
    since: float
    """Time at which it came, in seconds of the clock."""
    repeated: bool = False
    """Its first process has ended, so this is the second."""


@dataclass(eq=False)
class TemplateProcess:
    """Renders chats in order, each in the child or with a refusal."""

    _run_dir: Path
    _send: Callable[[bytes, bytes], None]
    """Sends a message to the routing id of a process."""
    _clock: Callable[[], float]
    _event: Callable[[str, str], None]
    """Reports an event: its kind and text."""
    socket: str = "render"
    """Name of the parent's socket in the run folder."""
    _child: Child | None = field(init=False, default=None)
    _name: bytes = field(init=False, default=b"")
    """Routing id of the child; each has its own."""
    _start_error: str = field(init=False, default="")
    """Reason why there is no child for the present chat."""
    _ready: bool = field(init=False, default=False)
    _deadline: float = field(init=False, default=0.0)
    """Time at which the child must be ready, or its chat rendered."""
    _chat: _Chat | None = field(init=False, default=None)
    """The chat that the child has, or begins with."""
    _queue: deque[_Chat] = field(init=False, default_factory=deque)
    _killed: list[Child] = field(init=False, default_factory=list)
    """Children that were killed and whose exit status has not come."""
    _count: int = field(init=False, default=0)

    def check_room(self) -> None:
        """Raise TooManyChatsError if no further chat may wait."""
        if len(self._queue) >= WAITING_MOST:
            raise TooManyChatsError(f"{WAITING_MOST} chats wait for the chat template; submit it again later")

    def render(
        self, chat: Chat, most: int, end: Callable[[Rendered], None], defer: Callable[[str], None] | None = None
    ) -> None:
        """Queue a chat. `end` takes its text of `most` characters at most, or the reason why there is none.

        `defer` takes the reason of a wait that is longer than usual.
        """
        self._count += 1
        message = Render(number=self._count, chat=chat, most=most, cpu_s=CPU_S)
        self._queue.append(_Chat(message, end, defer, self._clock()))
        self._go_on()

    def take(self, name: bytes, message: object) -> None:
        """Take an answer of the child; those of earlier children are dropped."""
        if self._child is None or name != self._name:
            return
        if isinstance(message, RendererReady):
            self._ready = True
            if self._chat is not None:
                self._give(self._chat)
        elif isinstance(message, Rendered) and self._chat is not None and message.number == self._chat.message.number:
            self._end(message)
        self._go_on()

    def advance(self) -> None:
        """Replace a child that has ended or is past its deadline, and report long waits."""
        self._killed = [child for child in self._killed if child.poll() is None]
        chat, code = self._chat, None if self._child is None else self._child.poll()
        if chat is None:
            if code is not None:
                self._report_end("the next chat starts another one")
                self._drop()
            return
        if self._child is None:
            self._fail(f"its process cannot start: {self._start_error}")
        elif code is not None:
            if code == -signal.SIGXCPU:
                self._fail(f"it takes more than {CPU_S} s of processor time")
            else:
                self._fail_or_repeat(chat)
        elif self._clock() > self._deadline:
            self._fail(
                f"it runs longer than {RENDER_S:g} s" if self._ready
                else f"its process has not started within {START_S:g} s"
            )  # fmt: skip
        self._report_waits()

    def close(self) -> None:
        """Refuse all chats and end the child."""
        waiting = [self._chat] if self._chat is not None else []
        waiting += self._queue
        self._chat = None
        self._queue.clear()
        self._drop()
        for chat in waiting:
            chat.end(Rendered(number=chat.message.number, error="the engine stops", code="BUSY"))

    def _go_on(self) -> None:
        """Begin with the next chat, if the last one has ended."""
        if self._chat is not None or not self._queue:
            return
        self._chat = self._queue.popleft()
        if self._child is None:
            self._start()
        elif self._ready:
            self._give(self._chat)

    def _start(self) -> None:
        self._count += 1
        name = f"t{self._count}"
        arguments = ["--engine", str(self._run_dir / "engine.json"), "--socket", self.socket, "--name", name]
        try:
            self._child = spawn(MODULE, arguments, log=self._run_dir / "templates.log")
        except OSError as error:  # No process or descriptor is left; `advance` refuses the chat.
            self._start_error = str(error)
            return
        self._name, self._ready, self._deadline = name.encode(), False, self._clock() + START_S

    def _give(self, chat: _Chat) -> None:
        self._deadline = self._clock() + RENDER_S
        self._send(self._name, encode(chat.message))

    def _fail_or_repeat(self, chat: _Chat) -> None:
        """Give a chat to a second process: the end of the first may have another cause, or be older."""
        if chat.repeated:
            self._fail(f"its process has ended: {self._report_end('its chat is refused')}")
            return
        self._report_end("another one renders its chat")
        chat.repeated = True
        self._drop()
        self._start()

    def _report_end(self, then: str) -> str:
        """Report the end of the child and what follows; return how it ended."""
        assert self._child is not None
        info = self._child.info("templates")
        why = one_line(info.detail or "exit code 0")
        log.warning("the process of chat templates has ended: %s", why)
        self._event("templates.ended", f"the process of chat templates (pid {info.pid}) has ended, {why}; {then}")
        return why

    def _fail(self, why: str) -> None:
        """Refuse the present chat, end the child and go on with the next chat."""
        assert self._chat is not None
        log.warning("the process of chat templates is replaced: %s", one_line(why))
        self._drop()
        self._end(Rendered(number=self._chat.message.number, error=one_line(f"chat template: {why}")))
        self._go_on()

    def _drop(self) -> None:
        """End the child without waiting for its exit status."""
        if self._child is not None:
            self._child.kill()
            self._child.close()
            self._killed.append(self._child)
            self._child = None

    def _end(self, rendered: Rendered) -> None:
        """End the present chat."""
        chat, self._chat = self._chat, None
        if chat is not None:
            chat.end(msgspec.structs.replace(rendered, error=one_line(rendered.error)))

    def _report_waits(self) -> None:
        horizon = self._clock() - DEFER_S
        for chat in [*([self._chat] if self._chat is not None else []), *self._queue]:
            if chat.since > horizon:
                break  # Those behind it came later.
            if chat.defer is not None:
                chat.defer("waits for its chat template")
                chat.defer = None
