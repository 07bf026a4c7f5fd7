"""Messages of the supervisor: reports to gateway and core, orders from the core."""

from __future__ import annotations

import contextlib
import time
from collections import deque

import zmq

from ppengine.common.config import EngineConfig
from ppengine.protocol.facts import Exited
from ppengine.protocol.frames import Codec, encode
from ppengine.protocol.offline import FromFront, StateAnswer, StateQuery
from ppengine.protocol.place import Place
from ppengine.protocol.reports import ProcessInfo, ProcessReport, StartStage

_QUEUE = 64
_FACTS_KEPT = 1000
"""Most facts that are pushed again to a new gateway."""
_STATE_WAIT_MS = 1000


class Link:
    """Sockets to `collect` and `front`. Nothing here blocks; a report that finds a queue full is dropped."""

    def __init__(self, config: EngineConfig) -> None:
        self._context = zmq.Context()
        self._collect = self._connect(zmq.PUSH, config.endpoint("collect"))
        # A fact is sent once to each gateway: its queue has no limit.
        self._endpoint = config.endpoint("collect")
        self._facts = self._connect(zmq.PUSH, self._endpoint, most=0)
        self._noted: deque[bytes] = deque(maxlen=_FACTS_KEPT)
        self.front = self._connect(zmq.DEALER, config.endpoint("front"))
        self._codec = Codec(FromFront)
        self._asked_at: float | None = None
        self._nonce = 0

    def _connect(self, kind: int, endpoint: str, most: int = _QUEUE) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.sndhwm = most
        # The other side binds a moment later; zmq would try again after 100 ms.
        socket.reconnect_ivl = 20
        socket.connect(endpoint)
        return socket

    def report(self, processes: list[ProcessInfo]) -> None:
        """Report every process to gateway and core."""
        message = encode(ProcessReport(mono_ns=time.monotonic_ns(), processes=processes))
        for socket in (self._collect, self.front):
            with contextlib.suppress(zmq.Again):
                socket.send(message, zmq.NOBLOCK)

    def note_end(self, info: ProcessInfo) -> None:
        """Note that a process ended by itself."""
        fact = Exited(
            mono_ns=time.monotonic_ns(), role=info.role, generation=info.generation, pid=info.pid,
            place=None if info.stage is None else Place(info.stage, info.rank or 0),
            exit_code=info.exit_code or 0, detail=info.detail, calls=info.calls,
        )  # fmt: skip
        self._noted.append(encode(fact))
        self._facts.send(self._noted[-1], zmq.NOBLOCK)

    def repeat_facts(self) -> None:
        """Push all facts again, to a gateway that replaces another one.

        A fresh socket connects to the new one alone: what the old one had received is gone with it.
        """
        try:
            fresh = self._connect(zmq.PUSH, self._endpoint, most=0)
        except zmq.ZMQError:  # No descriptor is left: the present socket connects to the new one, too.
            fresh = self._facts
        if fresh is not self._facts:
            self._facts.close(linger=0)
            self._facts = fresh
        for fact in self._noted:
            self._facts.send(fact, zmq.NOBLOCK)

    def ask_state(self) -> None:
        """Ask the core for the engine's state, unless a question is open; it answers when loading is over."""
        now = time.monotonic()
        if self._asked_at is None or now - self._asked_at > 3 * _STATE_WAIT_MS / 1000:
            self._asked_at = now
            self._nonce += 1
            with contextlib.suppress(zmq.Again):
                self.front.send(encode(StateQuery(nonce=self._nonce, wait_ms=_STATE_WAIT_MS)), zmq.NOBLOCK)

    def read(self) -> tuple[StateAnswer | None, list[StartStage]]:
        """Return the newest state that the core reported, None if there is none, and its orders. Raises ProtocolError.

        The newest of several orders for one place counts.
        """
        newest, orders = None, dict[Place, StartStage]()
        while self.front.poll(0):
            message = self._codec.decode(self.front.recv())
            if isinstance(message, StateAnswer):
                newest, self._asked_at = message, None
            elif isinstance(message, StartStage):
                orders[message.place] = message
        return newest, list(orders.values())

    def close(self) -> None:
        """Close both sockets at once."""
        self._context.destroy(linger=0)
