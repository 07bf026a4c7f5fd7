"""`python -m ppengine.store --engine FILE --role ROLE`: keeps KV blocks in backends until its lifeline closes."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from queue import SimpleQueue

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from ppengine.common.begin_process import begin
from ppengine.common.call_page import CallPage, page_path
from ppengine.common.config import EngineConfig
from ppengine.common.sockets import readable
from ppengine.protocol.frames import Codec, ProtocolError, encode
from ppengine.protocol.place import Place
from ppengine.protocol.store_messages import BackendSpec, StoreReady, ToStore, Weights
from ppengine.store import weight_hash
from ppengine.store.backend_kinds import known_kinds, make_backend
from ppengine.store.job import Home
from ppengine.store.lane import Lane
from ppengine.store.store import Store

log = logging.getLogger("ppengine.store")

FIGURES_S = 0.5
TURN_MS = 20
"""Milliseconds between two looks at deadlines while a job is open."""
RECONNECT_MS = 20
LEAVE_S = 1.0
"""Seconds for calls under way when the engine stops in order."""
UNSENT_MOST = 10_000
"""Messages that wait for a core that does not read; later figures are dropped."""


def main() -> int:
    """Serve until a signal comes or the parent is gone."""
    parser = argparse.ArgumentParser(prog="python -m ppengine.store")
    parser.add_argument("--role", required=True, help="name of this process in the engine, as store0.1")
    arguments, config = begin(parser)
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    place = next((place for place in config.groups.places if place.store_role == arguments.role), None)
    if place is None:
        print(f"error: --role {arguments.role}: this engine has no such place", file=sys.stderr)
        return 1
    # Its parent, which has the log, reads the page.
    calls = CallPage(page_path(arguments.engine.parent / f"{arguments.role}.log"))
    process = Process(config, place, calls)
    signal.signal(signal.SIGTERM, lambda *_: process.stop())
    if place == (0, 0):
        weight_hash.start(config, process.note_weights)
    try:
        process.run()
    finally:
        calls.close()
    # A thread in a call that hangs would keep the process.
    logging.shutdown()
    os._exit(0)


class Process:
    """The loop. Threads of backends hand functions over to it, and wake it by a pipe."""

    def __init__(self, config: EngineConfig, place: Place, calls: CallPage) -> None:
        self._config, self._place, self._calls = config, place, calls
        self._codec = Codec(ToStore)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._posted: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._wake_read, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._wake_read, False)
        self._store = Store(place, len(config.groups), self._send, self.post, time.monotonic, self._make_lane)
        self._weights: Weights | None = None
        self._kinds = known_kinds()
        self._stopped = False
        self._connected = False
        self._lost = False
        self._connect()

    def stop(self) -> None:
        """End `run` soon. Called by a handler of signals."""
        self._stopped = True
        self._wake_up()

    def post(self, function: Callable[[], None]) -> None:
        """Call a function on the loop. From any thread."""
        self._posted.put(function)
        self._wake_up()

    def note_weights(self, weights: Weights) -> None:
        """Report the hash of the weights, now and to each later core. From any thread."""

        def note() -> None:
            self._weights = weights
            log.info("weights: %s", weights.error or weights.digest.hex())
            self._send(weights)

        self.post(note)

    def run(self) -> None:
        """Serve until `stop`."""
        log.info("started as %s", self._place.store_role)
        due = 0.0
        while not self._stopped:
            self._turn(TURN_MS if self._store.busy or self._lost else int(FIGURES_S * 1000))
            now = time.monotonic()
            if now >= due:
                due = now + FIGURES_S
                if self._connected:
                    self._send(self._store.figures())
        log.info("leaving")
        self._store.close()
        deadline = time.monotonic() + LEAVE_S
        while time.monotonic() < deadline and not self._store.closed:
            self._call_posted()
            self._store.tick()
            time.sleep(0.005)

    def _turn(self, wait_ms: int) -> None:
        for source, _ in self._poller.poll(wait_ms):
            if source == self._wake_read:
                while self._drain():
                    pass
            elif source is self._monitor:
                self._look(recv_monitor_message(self._monitor)["event"])
        self._call_posted()
        while not self._lost and readable(self._socket):
            self._take(self._socket.recv())
        self._store.tick()
        if self._lost and not self._store.busy:
            # Another socket: nothing that the older core sent, or would get, reaches the next one.
            self._disconnect()
            self._store.resume()
            self._connect()

    def _take(self, body: bytes) -> None:
        try:
            message = self._codec.decode(body)
        except ProtocolError as error:
            log.error("a message of the core is dropped: %s", error)
            return
        self._store.take(message)

    def _call_posted(self) -> None:
        for _ in range(self._posted.qsize()):
            self._posted.get()()

    def _drain(self) -> bool:
        try:
            return len(os.read(self._wake_read, 4096)) == 4096
        except BlockingIOError:
            return False

    def _wake_up(self) -> None:
        # A full pipe wakes the loop, too.
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake, b"x")

    # --- the socket -----------------------------------------------------------------------------------------

    def _connect(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, self._place.store_role.encode())
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, UNSENT_MOST)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 10 * RECONNECT_MS)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        self._poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._wake_read):
            self._poller.register(source, zmq.POLLIN)
        self._lost = self._connected = False
        self._config.connect(self._socket, "stores")
        self._send(StoreReady(*self._place, os.getpid(), self._config.node, self._kinds))
        if self._weights is not None:
            self._send(self._weights)

    def _disconnect(self) -> None:
        self._socket.disable_monitor()
        self._socket.close()

    def _look(self, event: int) -> None:
        if event == zmq.EVENT_CONNECTED:
            self._connected = True
        elif self._connected:
            log.info("the core is gone")
            self._connected, self._lost = False, True
            self._poller.unregister(self._socket)
            self._store.reset()

    def _send(self, message: msgspec.Struct) -> None:
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            log.warning("the core does not read: a %s is dropped", type(message).__name__)

    def _make_lane(self, spec: BackendSpec, home: Home) -> Lane:
        lane = Lane(spec, home.layout, lambda: make_backend(spec.kind), self.post, time.monotonic, self._calls)
        lane.start()
        return lane


if __name__ == "__main__":
    sys.exit(main())
