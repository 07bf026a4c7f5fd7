"""Chats of the offline API: their texts, from the process `templates` of this program."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from ppengine.common.child_process import until
from ppengine.common.template_process import TemplateProcess
from ppengine.http.api_errors import ApiError
from ppengine.http.chat_fields import Message
from ppengine.http.tool_fields import Tool, for_template, functions_of
from ppengine.offline.launch import EngineError
from ppengine.protocol.chat_messages import CHAT_MOST, Chat, FromRenderer, Rendered, Tokenized
from ppengine.protocol.error_text import shown
from ppengine.protocol.frames import MAX_FRAME_BYTES, Codec

log = logging.getLogger("ppengine.offline")

SOCKET = "render-offline"
LOOK_S = 0.1
"""Seconds between two looks at the child, for its end and its deadline."""
END_S = 2.0
"""Seconds to wait for the end of the child, which was killed."""
WAITING_MOST = 64
"""Chats that the child has at once; the next ones wait here."""
_RIGHT = 'a conversation is a list of messages, such as {"role": "user", "content": "Hi"}'
Conversation = Sequence[Mapping[str, Any]]


def chats_of(
    messages: Conversation | Sequence[Conversation],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    add_generation_prompt: bool,
    options: Mapping[str, Any] | None,
) -> list[Chat]:
    """Return the chats of one conversation or several. Raises ValueError for a message that is none."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise ValueError(f"messages is {shown(messages)}; {_RIGHT}")
    listed = list(messages)
    several = [listed] if any(isinstance(one, Mapping) for one in listed) else listed
    try:
        functions = for_template(functions_of(_converted("tools", tools or [], list[Tool]), None))
    except ApiError as error:
        raise ValueError(error.body.message) from None
    chats = []
    for number, conversation in enumerate(several):
        if isinstance(conversation, str | bytes | Mapping) or not isinstance(conversation, Iterable):
            raise ValueError(f"conversation {number} is {shown(conversation)}; {_RIGHT}")
        converted = _converted(f"conversation {number}", conversation, list[Message])
        if not converted:
            raise ValueError(f"conversation {number} is empty; give at least one message")
        try:
            own = [one.for_template() for one in converted]
        except ApiError as error:
            raise ValueError(f"conversation {number}: {error.body.message}") from None
        chats.append(
            Chat(
                messages=own, tools=functions, add_generation_prompt=add_generation_prompt, options=dict(options or {})
            )
        )
    return chats


def _converted(name: str, value: Any, kind: type) -> Any:
    """Return messages or tools of a program as those that the HTTP port reads. Raises ValueError."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{name}: {error}") from None


class ConversationRenderer:
    """Renders chats by the template of the checkpoint. Close it before the engine."""

    def __init__(self, run_dir: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        path = Path(run_dir) / SOCKET
        path.unlink(missing_ok=True)
        self._socket.bind(f"ipc://{path}")
        self._codec = Codec(FromRenderer)
        self._process = TemplateProcess(Path(run_dir), self._give, time.monotonic, _report, socket=SOCKET)

    def texts(self, chats: Sequence[Chat]) -> list[str]:
        """Return the text of each chat, in order. Raises ValueError for one that cannot be rendered, EngineError."""
        try:
            made: list[str] = []
            for begin in range(0, len(chats), WAITING_MOST):
                made += self._portion(begin, chats[begin : begin + WAITING_MOST])
            return made
        except BaseException:
            # Chats of this call must not come before those of the next one.
            self._process.close()
            raise

    def _portion(self, first: int, chats: Sequence[Chat]) -> list[str]:
        answers: list[Rendered | Tokenized] = []
        for chat in chats:
            self._process.render(chat, CHAT_MOST, answers.append)
        texts: list[str] = []
        for number in range(len(chats)):
            rendered = self._next(answers, number)
            if rendered.error or not isinstance(rendered, Rendered):
                text = f"conversation {first + number}: {rendered.error}"
                raise EngineError(text) if rendered.code == "BUSY" else ValueError(text)
            texts.append(rendered.text)
        return texts

    def _next(self, answers: list[Rendered | Tokenized], number: int) -> Rendered | Tokenized:
        """Wait for an answer of the child, or for a refusal in its place."""
        while len(answers) <= number:
            if self._socket.poll(int(1e3 * LOOK_S)):
                name, *frames = self._socket.recv_multipart()
                self._process.take(name, self._codec.decode(frames[-1]))
            else:
                self._process.advance()
        return answers[number]

    def close(self) -> None:
        """End the process of the templates, and wait until it has ended."""
        self._process.close()
        until(self._has_ended, END_S)
        self._socket.close(0)
        self._context.term()

    def _has_ended(self) -> bool:
        self._process.advance()
        return self._process.idle

    def _give(self, name: bytes, payload: bytes) -> None:
        self._socket.send_multipart([name, payload])


def _report(kind: str, text: str) -> None:
    log.warning("%s: %s", kind, text)
