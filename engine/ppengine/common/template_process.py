"""A queue of chats and long texts, and the process that renders or tokenizes one of them at a time.

Its parent, `texts` or an HTTP process, never waits for it. The process is started at the first of them or before, is
killed at the deadline of one, and is replaced at the next. One that has ended two processes is refused, and no other.
"""

from __future__ import annotations

import logging
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ppengine.common.helper_child import HelperChild
from ppengine.common.one_line import one_line
from ppengine.protocol.chat_messages import Chat, Render, Rendered, RendererReady, Tokenize, Tokenized
from ppengine.protocol.frames import encode

log = logging.getLogger("ppengine.templates.parent")

MODULE = "ppengine.templates"
CPU_S = 2
"""Processor seconds for one chat: the kernel ends the process. A template takes a thousandth."""
RENDER_S = 10.0
"""Seconds for one chat, in case that the process is stopped, or that the machine is too busy."""
TEXT_CPU_S, TEXT_S = 20, 60.0
"""The same for the tokens of a text, with the load of the tokenizer; a megabyte takes about 0.5 s."""
START_S = 30.0
"""Seconds for the start of the process, which imports Jinja on a machine that may be busy."""
WAITING_MOST = 256
"""Chats and texts that wait; later ones are refused."""
WAITING_CHARACTERS = 2**26
"""Characters of the chats and texts that wait; later ones are refused."""


class TooManyChatsError(Exception):
    """As many chats wait as may; one line."""


@dataclass(eq=False, slots=True)
class _Chat:
    """One chat, or texts, and the function that takes the end."""

    message: Render | Tokenize
    end: Callable[[Rendered | Tokenized], None]
    characters: int
    """Characters of its texts."""
    repeated: bool = False
    """Its first process has ended, so this is the second."""

    @property
    def name(self) -> str:
        """The work in words."""
        return "chat template" if isinstance(self.message, Render) else "tokenizer"

    @property
    def most_s(self) -> float:
        """Seconds that the child may take."""
        return RENDER_S if isinstance(self.message, Render) else TEXT_S

    def refusal(self, error: str, code: Literal["INVALID", "BUSY"] = "INVALID") -> Rendered | Tokenized:
        """Return the answer without a text or tokens."""
        kind = Rendered if isinstance(self.message, Render) else Tokenized
        return kind(number=self.message.number, error=error, code=code)


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
    child: HelperChild = field(init=False)
    _start_error: str = field(init=False, default="")
    """Reason why there is no child for the present chat."""
    _deadline: float = field(init=False, default=0.0)
    """Time at which the child must be ready, or its chat rendered."""
    _chat: _Chat | None = field(init=False, default=None)
    """The chat that the child has, or begins with."""
    _queue: deque[_Chat] = field(init=False, default_factory=deque)
    _count: int = field(init=False, default=0)
    """Number of the newest chat."""

    def __post_init__(self) -> None:
        self.child = HelperChild(self._run_dir / "templates.log", self._send)

    @property
    def idle(self) -> bool:
        """Whether there is no chat and no child, so that `advance` does nothing."""
        return self._chat is None and self.child.gone

    @property
    def busy(self) -> bool:
        """Whether there is a chat, so that the child has a deadline."""
        return self._chat is not None

    def start_early(self) -> None:
        """Start the child before the first chat, which would wait for it."""
        if self.child.process is None:
            self._start()

    def check_room(self) -> None:
        """Raise TooManyChatsError if no further chat or text may wait."""
        if len(self._queue) >= WAITING_MOST:
            raise TooManyChatsError(f"{WAITING_MOST} chats wait for the chat template; submit it again later")
        if (waiting := sum(one.characters for one in self._queue)) > WAITING_CHARACTERS:
            raise TooManyChatsError(f"prompts of {waiting} characters wait for the tokenizer; submit it again later")

    def render(
        self, chat: Chat, most: int, end: Callable[[Rendered | Tokenized], None]
    ) -> None:  # fmt: skip
        """Queue a chat. `end` takes its text of `most` characters at most, or the reason why there is none."""
        self._add(Render(number=self._next(), chat=chat, most=most, cpu_s=CPU_S), end)

    def tokenize(
        self, texts: list[str], end: Callable[[Rendered | Tokenized], None], *, special: bool = True
    ) -> None:  # fmt: skip
        """Queue texts. `end` takes the tokens of each, with the `special` ones of a prompt."""
        self._add(Tokenize(number=self._next(), texts=texts, special=special, cpu_s=TEXT_CPU_S), end)

    def _next(self) -> int:
        self._count += 1
        return self._count

    def _add(self, message: Render | Tokenize, end: Callable[[Rendered | Tokenized], None]) -> None:
        texts = message.texts if isinstance(message, Tokenize) else [message.chat.messages, message.chat.tools]
        self._queue.append(_Chat(message, end, _characters(texts)))
        self._go_on()

    def take(self, name: bytes, message: object) -> None:
        """Take an answer of the child; those of earlier children are dropped."""
        chat = self._chat
        if not self.child.is_sender(name):
            return
        if isinstance(message, RendererReady):
            self.child.ready = True
            if chat is not None:
                self._give(chat)
        elif isinstance(message, Rendered | Tokenized) and chat is not None and message.number == chat.message.number:
            self._end(message)
        self._go_on()

    def advance(self) -> None:
        """Replace a child that has ended or is past its deadline, and report long waits."""
        self.child.reap()
        chat, process = self._chat, self.child.process
        code = None if process is None else process.poll()
        if chat is None:
            if code is not None:
                self._report_end("the next chat starts another one")
                self.child.drop()
            return
        if process is None:
            self._fail(f"its process cannot start: {self._start_error}")
        elif code is not None:
            if code == -signal.SIGXCPU:
                self._fail(f"it takes more than {chat.message.cpu_s} s of processor time")
            else:
                self._fail_or_repeat(chat)
        elif self._clock() > self._deadline:
            self._fail(
                f"it runs longer than {chat.most_s:g} s" if self.child.ready
                else f"its process has not started within {START_S:g} s"
            )  # fmt: skip

    def close(self) -> None:
        """Refuse all chats and end the child."""
        waiting = [self._chat] if self._chat is not None else []
        waiting += self._queue
        self._chat = None
        self._queue.clear()
        self.child.drop()
        for chat in waiting:
            chat.end(chat.refusal("the engine stops", "BUSY"))

    def _go_on(self) -> None:
        """Begin with the next chat, if the last one has ended."""
        while self._chat is None and self._queue:
            self._chat = self._queue.popleft()
            if self.child.process is None:
                self._start()
            elif self.child.ready:
                self._give(self._chat)

    def _start(self) -> None:
        arguments = ["--engine", str(self._run_dir / "engine.json"), "--socket", self.socket]
        try:
            self.child.start(MODULE, "t", arguments)
        except OSError as error:  # No process or descriptor is left; `advance` refuses the chat.
            self._start_error = str(error)
            return
        self._deadline = self._clock() + START_S

    def _give(self, chat: _Chat) -> None:
        """Send the present chat to the child, or refuse it: JSON has larger numbers and more depth than a message."""
        try:
            payload = encode(chat.message)
        except (OverflowError, RecursionError, ValueError) as error:
            self._end(chat.refusal(f"{chat.name}: {error}"))
            return
        self._deadline = self._clock() + chat.most_s
        self.child.send(payload)

    def _fail_or_repeat(self, chat: _Chat) -> None:
        """Give a chat to a second process: the end of the first may have another cause, or be older."""
        if chat.repeated:
            self._fail(f"its process has ended: {self._report_end('its chat is refused')}")
            return
        self._report_end("another one renders its chat")
        chat.repeated = True
        self.child.drop()
        self._start()

    def _report_end(self, then: str) -> str:
        """Report the end of the child and what follows; return how it ended."""
        process = self.child.process
        assert process is not None
        info = process.info("templates")
        why = one_line(info.detail or "exit code 0")
        log.warning("the process of chat templates has ended: %s", why)
        self._event("templates.ended", f"the process of chat templates (pid {info.pid}) has ended, {why}; {then}")
        return why

    def _fail(self, why: str) -> None:
        """Refuse the present chat, end the child and go on with the next chat."""
        assert self._chat is not None
        log.warning("the process of chat templates is replaced: %s", one_line(why))
        self.child.drop()
        self._end(self._chat.refusal(one_line(f"{self._chat.name}: {why}")))
        self._go_on()

    def _end(self, answer: Rendered | Tokenized) -> None:
        """End the present chat."""
        chat, self._chat = self._chat, None
        if chat is not None:
            answer.error = one_line(answer.error)
            chat.end(answer)


def _characters(value: object) -> int:
    """Return the characters of all texts in a value of JSON, which may be deep."""
    left, count = [value], 0
    while left:
        one = left.pop()
        if isinstance(one, str):
            count += len(one)
        elif isinstance(one, list):
            left += one
        elif isinstance(one, dict):
            left += one.values()
    return count
