"""`python -m ppengine.texts --engine FILE --role ROLE`: tokens and text for consoles, until its lifeline closes."""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import msgspec
import zmq

from ppengine.checkpoint.model_spec import read_spec
from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.common.begin_process import begin
from ppengine.common.config import ConfigError, EngineConfig
from ppengine.common.sockets import NOBLOCK, Bindings, readable
from ppengine.common.template_process import TemplateProcess
from ppengine.protocol.chat_messages import FromRenderer
from ppengine.protocol.control import Failed, Fetch, Inspect, Inspected
from ppengine.protocol.frames import MAX_FRAME_BYTES, Codec, ProtocolError, encode
from ppengine.protocol.offline import FromFront, News
from ppengine.protocol.text_messages import Encode, OutputPart, TextsAlive, TextsEvent, ToTexts
from ppengine.texts.core_questions import CoreQuestions
from ppengine.texts.detail_reader import DetailReader
from ppengine.texts.output_reader import OutputReader
from ppengine.texts.stop_finder import StopFinder
from ppengine.texts.submission_encoder import SubmissionEncoder
from ppengine.texts.text_store import TextStore

log = logging.getLogger("ppengine.texts")

LOOK_S = 0.1
"""Seconds between two looks at the child, for its end and its deadline."""
ALIVE_S = 1.0
"""Seconds between two signs of life."""
UNSENT_MOST = 10_000
"""Messages that wait for a gateway that is restarted; later ones are dropped, and it asks again."""
BURST = 64
"""Messages taken from one socket before the next socket's turn."""


def main() -> NoReturn:
    """Serve until the engine ends. Exit code 1: it cannot start, with one line."""
    parser = argparse.ArgumentParser(prog="python -m ppengine.texts")
    parser.add_argument("--role", required=True, help="name of this process in the engine")
    arguments, config = begin(parser)
    try:
        folder = Path(config.model_path)
        loop = Loop(config, arguments.role, Tokenizer.load(folder), read_spec(folder).eos_token_ids)
    except (ConfigError, zmq.ZMQError) as error:
        sys.exit(f"error: {error}")
    log.info("started as %s", arguments.role)
    loop.run()


class Loop:
    """The sockets, and turns of the parts."""

    def __init__(self, config: EngineConfig, role: str, tokenizer: Tokenizer, eos: list[int]) -> None:
        """Open the sockets. Raises zmq.ZMQError."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gateway = self._context.socket(zmq.DEALER)
        self._gateway.setsockopt(zmq.IDENTITY, role.encode())
        self._gateway.setsockopt(zmq.SNDHWM, UNSENT_MOST)
        self._gateway.setsockopt(zmq.RECONNECT_IVL, 20)
        self._gateway.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        self._front = self._context.socket(zmq.DEALER)
        self._front.setsockopt(zmq.SNDHWM, 0)
        self._front.setsockopt(zmq.RCVHWM, 0)
        self._front.setsockopt(zmq.RECONNECT_IVL, 20)
        self._render = self._context.socket(zmq.ROUTER)
        for socket in (self._gateway, self._front, self._render):
            socket.setsockopt(zmq.LINGER, 0)
        # The core sends the tokens of all requests at once: libzmq would end the connection at each try.
        for socket in (self._gateway, self._render):
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._bindings = Bindings()
        path = Path(config.endpoint("render").removeprefix("ipc://"))
        # It is that of a process before this one.
        path.unlink(missing_ok=True)
        self._bindings.bind(self._render, config.endpoint("render"))
        self._gateway.connect(config.endpoint("texts"))
        self._front.connect(config.endpoint("front"))
        self._to_texts, self._from_renderer, self._from_front = Codec(ToTexts), Codec(FromRenderer), Codec(FromFront)
        self._templates = TemplateProcess(Path(config.run_dir), self._send_renderer, time.monotonic, self._report)
        self._encoder = SubmissionEncoder(tokenizer, config.max_model_len, self._templates, self._send)
        clock = time.monotonic
        self._core = CoreQuestions(self._send_core, clock)
        store = TextStore(tokenizer, eos)
        self._stops = StopFinder(store, self._core, clock)
        self._outputs = OutputReader(store, self._core, self._send, self._stops.end, clock)
        self._details = DetailReader(tokenizer, eos, self._core, self._send, clock)

    def run(self) -> NoReturn:
        """Serve until a signal ends the process, which has nothing to write."""
        poller = zmq.Poller()
        for socket in (self._gateway, self._front, self._render):
            poller.register(socket, zmq.POLLIN)
        due = 0.0
        while True:
            wait_s = ALIVE_S / 2 if self._templates.idle else LOOK_S
            at = min(due, self._outputs.next_due or due) - time.monotonic()
            poller.poll(max(0, math.ceil(1e3 * min(wait_s, at))))
            self._on_gateway()
            self._on_front()
            self._on_renderer()
            self._templates.advance()
            self._stops.turn()
            self._outputs.turn()
            self._core.turn()
            if (now := time.monotonic()) >= due:
                due = now + ALIVE_S
                self._send(TextsAlive(pid=os.getpid()))
                self._bindings.look()

    def _on_gateway(self) -> None:
        for message in _messages(self._gateway, self._to_texts):
            if isinstance(message, Encode):
                self._encoder.take(message)
            elif isinstance(message, Fetch):
                self._outputs.fetch(message)
            elif isinstance(message, Inspect):
                self._details.inspect(message)

    def _on_front(self) -> None:
        for message in _messages(self._front, self._from_front):
            if isinstance(message, News):
                self._stops.take(message)
            elif isinstance(message, OutputPart | Inspected | Failed):
                self._core.take(message)

    def _on_renderer(self) -> None:
        while readable(self._render):
            name, *frames = self._render.recv_multipart(NOBLOCK)
            try:
                self._templates.take(name, self._from_renderer.decode(frames[-1]))
            except ProtocolError as error:
                log.warning("from the process of chat templates: %s", error)

    def _send_renderer(self, name: bytes, payload: bytes) -> None:
        self._render.send_multipart([name, payload], NOBLOCK)

    def _send_core(self, message: msgspec.Struct) -> None:
        """Send to the core; a message waits in the queue while the core is away."""
        self._front.send(encode(message), NOBLOCK)

    def _send(self, message: msgspec.Struct) -> None:
        try:
            self._gateway.send(encode(message), NOBLOCK)
        except zmq.Again:
            log.warning("the gateway does not read: a %s is dropped", type(message).__name__)

    def _report(self, kind: str, text: str) -> None:
        self._send(TextsEvent(kind=kind, text=text))


def _messages(socket: zmq.Socket[bytes], codec: Codec) -> Iterator[object]:
    """Yield the messages that wait, as many as a turn may take; those that cannot be decoded are dropped."""
    for _ in range(BURST):
        if not readable(socket):
            return
        try:
            yield codec.decode(socket.recv(NOBLOCK))
        except ProtocolError as error:
            log.error("a message is dropped: %s", error)


if __name__ == "__main__":
    main()
