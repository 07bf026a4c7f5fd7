"""`python -m ppengine.templates --engine FILE --socket SOCKET --name NAME`: renders chats until its lifeline closes."""

from __future__ import annotations

import argparse
import logging
import resource
import sys
import time
from pathlib import Path

import zmq

from ppengine.checkpoint.chat_template import ChatTemplate, TooLongError
from ppengine.common import lifeline, logs
from ppengine.common.config import ConfigError, EngineConfig
from ppengine.common.one_line import one_line
from ppengine.protocol.chat_messages import Chat, Render, Rendered, RendererReady
from ppengine.protocol.frames import Codec, encode

log = logging.getLogger("ppengine.templates")

MEMORY_BYTES = 512 * 2**20
"""Address space of the process; without a template it takes a tenth."""
FILES = 32
"""Open files and sockets."""


def main() -> int:
    """Render what the parent sends."""
    parser = argparse.ArgumentParser(prog="python -m ppengine.templates")
    parser.add_argument("--engine", type=Path, required=True, help="engine.json of the run folder")
    parser.add_argument("--socket", required=True, help="name of the parent's socket in the run folder")
    parser.add_argument("--name", required=True, help="routing id on that socket")
    lifeline.add_argument(parser)
    arguments = parser.parse_args()
    lifeline.adopt(arguments.lifeline)
    logs.start()
    config = EngineConfig.load(arguments.engine)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, arguments.name.encode())
    socket.connect(config.endpoint(arguments.socket))
    limit(resource.RLIMIT_AS, MEMORY_BYTES)
    limit(resource.RLIMIT_NOFILE, FILES)
    limit(resource.RLIMIT_CORE, 0)
    chats, renderer = Codec(Render), Renderer(Path(config.model_path))
    socket.send(encode(RendererReady()))
    log.info("started, with %d MiB of memory", MEMORY_BYTES // 2**20)
    while True:
        chat = chats.decode(socket.recv())
        assert isinstance(chat, Render)
        socket.send(encode(renderer.answer(chat)))


class Renderer:
    """Answers chats by the template of one checkpoint, read at the first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._template: ChatTemplate | None = None
        # Jinja compiles its own expressions at the first template; the first chat need not wait for that.
        ChatTemplate("", {}).render(Chat(messages=[]), 0)

    def answer(self, chat: Render) -> Rendered:
        """Return the text of a chat, or why there is none."""
        # The limit is on the whole life of a process: it moves on with each chat.
        limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + chat.cpu_s)
        try:
            if self._template is None:
                self._template = ChatTemplate.load(self._folder)
            return Rendered(number=chat.number, text=self._template.render(chat.chat, chat.most))
        except TooLongError as error:
            return Rendered(number=chat.number, error=str(error), code="DOES_NOT_FIT")
        except ConfigError as error:
            return Rendered(number=chat.number, error=one_line(str(error)))


def limit(kind: int, most: int) -> None:
    """Set a limit of this process; a lower one that it has inherited stays."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    sys.exit(main())
