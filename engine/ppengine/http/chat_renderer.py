"""Chat templates for the HTTP process: a child of its own renders them, with limits of time and memory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from ppengine.common.config import EngineConfig
from ppengine.common.template_process import TemplateProcess, TooManyChatsError
from ppengine.http.api_errors import ApiError, invalid, unavailable
from ppengine.protocol.chat_messages import Chat, FromRenderer, Rendered, Tokenized
from ppengine.protocol.frames import MAX_FRAME_BYTES, Codec, ProtocolError

log = logging.getLogger("ppengine.http")

LOOK_S, CALM_S = 0.1, 1.0
"""Seconds between two looks at the child, for its end and its deadline: with a chat, and without one."""


class ChatRenderer:
    """Renders chats; `run` reads the child's answers until it is cancelled."""

    def __init__(self, config: EngineConfig, role: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        name = f"render-{role}"
        path = Path(config.endpoint(name).removeprefix("ipc://"))
        path.unlink(missing_ok=True)
        self._socket.bind(config.endpoint(name))
        self._codec = Codec(FromRenderer)
        self._begun = asyncio.Event()
        """Set by a chat."""
        self._process = TemplateProcess(Path(config.run_dir), self._give, time.monotonic, self._report, socket=name)

    async def render(self, chat: Chat, most: int) -> str:
        """Return the text of a chat, of `most` characters at most. Raises ApiError."""
        future: asyncio.Future[Rendered | Tokenized] = asyncio.get_running_loop().create_future()

        def end(rendered: Rendered | Tokenized) -> None:
            if not future.done():
                future.set_result(rendered)

        try:
            self._process.check_room()
        except TooManyChatsError as error:
            raise ApiError(429, "rate_limit_error", str(error), retry_after_s=1) from None
        self._process.render(chat, most, end)
        self._begun.set()
        rendered = await future
        if isinstance(rendered, Rendered) and not rendered.error:
            return rendered.text
        if rendered.code == "BUSY":
            raise unavailable(rendered.error)
        raise invalid(rendered.error, "messages")

    async def run(self, *, early: bool) -> None:
        """Serve the child until this is cancelled. `early`: chats may come, and the first should not wait for it."""
        reading = asyncio.create_task(self._read())
        try:
            if early:
                self._process.start_early()
            while not reading.done():
                self._begun.clear()
                wait_s = LOOK_S if self._process.busy else None if self._process.idle else CALM_S
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._begun.wait(), wait_s)
                self._process.advance()
            reading.result()
        finally:
            reading.cancel()
            self._process.close()
            self._context.destroy(linger=0)

    async def _read(self) -> None:
        """Take the answers of the child."""
        while True:
            name, *frames = await self._socket.recv_multipart()
            try:
                self._process.take(name, self._codec.decode(frames[-1]))
            except ProtocolError as error:
                log.warning("from the process of chat templates: %s", error)

    def _give(self, name: bytes, payload: bytes) -> None:
        task = asyncio.ensure_future(self._socket.send_multipart([name, payload]))
        _sending.add(task)
        task.add_done_callback(_sending.discard)

    def _report(self, kind: str, text: str) -> None:
        log.warning("%s: %s", kind, text)


_sending: set[asyncio.Future[Any]] = set()
"""Messages on their way: a loop keeps only weak references to its tasks."""
