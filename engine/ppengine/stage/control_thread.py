"""The control thread: acts for its stage while the step loop computes, waits or is stuck.

It never touches tensors or a device. Its tick about ten times a second separates a process that
holds the GIL from one that merely waits, and its probe counts how often the GIL is held. Its socket
reports findings of the live checks, and takes Shutdown and NewGeneration when the step loop cannot.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from ppengine.common.config import EngineConfig
from ppengine.protocol.frames import Codec, ProtocolError, encode
from ppengine.protocol.stage_lifecycle import NewGeneration, Shutdown
from ppengine.protocol.steps import ToStage
from ppengine.stage.core_link import RECONNECT_MS
from ppengine.stage.generations import Generations
from ppengine.stage.gil_probe import GilProbe
from ppengine.stage.recorder import Recorder, open_recorder

GRACE_S = 1.0
"""Time that the step loop has after Shutdown, before this thread ends the process."""


class ControlThread(threading.Thread):
    """Start it first, `close` it last. `stop` is set when Shutdown came here; the step loop looks at it."""

    def __init__(
        self,
        context: zmq.Context[Any],
        config: EngineConfig,
        stage: int,
        rank: int,
        generations: Generations,
        main: Recorder,
        news: Callable[[], Sequence[msgspec.Struct]],
    ) -> None:
        super().__init__(name="control", daemon=True)
        self.stop = threading.Event()
        self._closed = threading.Event()
        self._context = context
        self._config = config
        self._stage, self._rank, self._generations = stage, rank, generations
        self._main = main
        self._news = news

    def run(self) -> None:
        """Tick, report and take orders until closed."""
        ring = open_recorder(self._config, self._stage, self._rank, "control", self._generations.current)
        ring.name_thread(threading.get_native_id())
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, f"c{self._stage}.{self._rank}".encode())
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._config.connect(socket, "steps")
        codec, probe = Codec(ToStage), GilProbe(ring)
        deadline: float | None = None
        try:
            while not self._closed.is_set():
                # Both headers: readers of one ring need not find the other.
                ring.thread_tick()
                self._main.thread_tick()
                if deadline is not None and time.monotonic() > deadline:
                    os._exit(0)
                for news in self._news():
                    with contextlib.suppress(zmq.Again):
                        socket.send(encode(news), zmq.NOBLOCK)
                sleep_ms = probe.sleep_ms()
                with probe.asleep(sleep_ms):
                    come = socket.poll(sleep_ms)
                if come:
                    message = _decode(codec, socket.recv())
                    if isinstance(message, NewGeneration):
                        self._generations.announce(message.generation, message.started)
                    elif isinstance(message, Shutdown) and deadline is None:
                        deadline = time.monotonic() + GRACE_S
                        self.stop.set()
        finally:
            probe.close()
            socket.close()
            ring.close()

    def close(self) -> None:
        """End the thread; returns within a tick or two."""
        self._closed.set()
        self.join()


def _decode(codec: Codec, body: bytes) -> object:
    try:
        return codec.decode(body)
    except ProtocolError as error:
        # Only the core connects here: a message it should not have sent must not silence the thread.
        os.write(2, f"control thread: {error}\n".encode())
        return None
