"""`python -m ppengine.templates --engine FILE --socket SOCKET --name NAME`: renders chats, tokenizes long texts."""

from __future__ import annotations

import argparse
import logging
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from ppengine.checkpoint.chat_template import ChatTemplate, TooLongError
from ppengine.common.begin_process import begin
from ppengine.common.config import ConfigError
from ppengine.common.one_line import one_line
from ppengine.common.thread_priority import yield_to_others
from ppengine.protocol.chat_messages import Chat, Render, Rendered, RendererReady, Tokenize, Tokenized, ToRenderer
from ppengine.protocol.frames import MAX_FRAME_BYTES, Codec, encode

if TYPE_CHECKING:
    from ppengine.checkpoint.tokenizer import Tokenizer

log = logging.getLogger("ppengine.templates")

MEMORY_BYTES = 512 * 2**20
"""Address space of the process while a template runs, without the tokenizer; it begins with a tenth of that."""
TOKENS_MOST = (MAX_FRAME_BYTES - 1024) // 5
"""Tokens of one answer, which is one message; a token has at most five bytes."""
FILES = 32
"""Open files and sockets."""


def main() -> int:
    """Render what the parent sends."""
    parser = argparse.ArgumentParser(prog="python -m ppengine.templates")
    parser.add_argument("--socket", required=True, help="name of the parent's socket in the run folder")
    parser.add_argument("--name", required=True, help="routing id on that socket")
    arguments, config = begin(parser)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, arguments.name.encode())
    socket.connect(config.endpoint(arguments.socket))
    limit(resource.RLIMIT_AS, MEMORY_BYTES)
    limit(resource.RLIMIT_NOFILE, FILES)
    limit(resource.RLIMIT_CORE, 0)
    work, renderer = Codec(ToRenderer), Renderer(Path(config.model_path))
    socket.send(encode(RendererReady()))
    log.info("started, with %d MiB of memory", MEMORY_BYTES // 2**20)
    while True:
        message = work.decode(socket.recv())
        assert isinstance(message, Render | Tokenize)
        socket.send(encode(renderer.answer(message)))


class Renderer:
    """Answers chats by the template of one checkpoint, and texts by its tokenizer. Both are read at first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._template: ChatTemplate | None = None
        self._tokenizer: Tokenizer | None = None
        # Steps of the stages come first on busy cores, and so do chats of other processes.
        self._long_texts = ThreadPoolExecutor(1, "texts", yield_to_others)
        # Opened once: a chat must not fail where no descriptor is left.
        self._statm = Path("/proc/self/statm").open("rb", buffering=0)  # noqa: SIM115 - for the life of the process
        self._tokenizer_bytes = 0
        """Address space that the tokenizer has."""
        self._rendered_bytes = 0
        """Address space after the newest chat."""
        # Jinja compiles its own expressions at the first template; the first chat need not wait for that.
        ChatTemplate("", {}).render(Chat(messages=[]), 0)
        self._rendered_bytes = self._address_bytes()

    def answer(self, message: Render | Tokenize) -> Rendered | Tokenized:
        """Return the text of a chat, or tokens, or why there are none."""
        # The limit is on the whole life of a process: it moves on with each message.
        limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + message.cpu_s)
        return self._rendered(message) if isinstance(message, Render) else self._tokenized(message)

    def _rendered(self, chat: Render) -> Rendered:
        if self._tokenizer is not None:
            # Between two chats only the tokenizer's share changes, and it may become smaller.
            self._tokenizer_bytes = max(0, self._tokenizer_bytes + self._address_bytes() - self._rendered_bytes)
        limit(resource.RLIMIT_AS, MEMORY_BYTES + self._tokenizer_bytes)
        try:
            if self._template is None:
                self._template = ChatTemplate.load(self._folder)
            return Rendered(number=chat.number, text=self._template.render(chat.chat, chat.most))
        except TooLongError as error:
            return Rendered(number=chat.number, error=str(error), code="DOES_NOT_FIT")
        except ConfigError as error:
            return Rendered(number=chat.number, error=one_line(str(error)))
        finally:
            self._rendered_bytes = self._address_bytes()

    def _address_bytes(self) -> int:
        """Return the address space of this process."""
        self._statm.seek(0)
        return int(self._statm.read().split()[0]) * resource.getpagesize()

    def _tokenized(self, message: Tokenize) -> Tokenized:
        """Return the tokens of texts: the work of a library, which needs no limit of memory."""
        number = message.number
        limit(resource.RLIMIT_AS, resource.RLIM_INFINITY)
        try:
            ids = self._long_texts.submit(self._encoded, message).result()
        except ConfigError as error:
            return Tokenized(number=number, error=one_line(str(error)))
        if (count := sum(map(len, ids))) > TOKENS_MOST:
            text = f"the prompt has {count} tokens; at most {TOKENS_MOST} are taken at once"
            return Tokenized(number=number, error=text, code="DOES_NOT_FIT")
        return Tokenized(number=number, token_ids=ids)

    def _encoded(self, message: Tokenize) -> list[list[int]]:
        """Return the tokens of texts. Raises ConfigError."""
        if self._tokenizer is None:
            from ppengine.checkpoint.tokenizer import Tokenizer  # An HTTP process's child never needs it.

            self._tokenizer = Tokenizer.load(self._folder)
        one = self._tokenizer.encode if message.special else self._tokenizer.encode_chat
        return [one(text) for text in message.texts]


def limit(kind: int, most: int) -> None:
    """Set a limit of this process; a lower one that it has inherited stays."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        most = hard if most == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, hard))


if __name__ == "__main__":
    sys.exit(main())
