"""The `state` socket: snapshots, events and a heartbeat, each topic with its own sequence."""

from __future__ import annotations

from collections import Counter

import msgspec

from ppengine.gateway.gateway_sockets import Socket, drain, send
from ppengine.protocol import frames
from ppengine.protocol.control import Pong
from ppengine.protocol.snapshot import Event, Events, Snapshot

_MOST_EVENTS = 1000
"""Most events in one message."""
_TOPICS = (
    frames.TOPIC_SNAPSHOT, frames.TOPIC_SNAPSHOT_SLOW, frames.TOPIC_SNAPSHOT_PACKED, frames.TOPIC_EVENT,
    frames.TOPIC_HEARTBEAT,
)  # fmt: skip


class Publisher:
    """Sends `[topic][header][body]`. Never waits for a subscriber."""

    def __init__(self, socket: Socket, engine: str, epoch: str) -> None:
        self._socket, self._engine, self._epoch = socket, engine, epoch
        self._sequences: Counter[bytes] = Counter()
        self._prefixes: set[bytes] = set()
        self._events: list[Event] = []

    def use(self, socket: Socket) -> None:
        """Publish on another socket, which has no subscriber yet."""
        self._socket = socket
        self._prefixes.clear()

    def read_subscriptions(self) -> set[bytes]:
        """Read the subscriptions; return the newly subscribed topics."""
        fresh = set()
        for parts in drain(self._socket):
            first = parts[0][:1]
            # The library reports every subscription, and the end of the last one to a prefix; the rest is ignored.
            prefix = parts[0][1:]
            if first == b"\x01" and any(topic.startswith(prefix) for topic in _TOPICS):
                self._prefixes.add(prefix)
                fresh.add(prefix)
            elif first == b"\x00":
                self._prefixes.discard(prefix)
        return fresh

    def wanted(self, topic: bytes) -> bool:
        """Return whether `topic` has a subscriber; subscriptions are prefixes."""
        return any(topic.startswith(prefix) for prefix in self._prefixes)

    def snapshot(self, snapshot: Snapshot, topics: list[bytes]) -> None:
        """Publish one snapshot under each of `topics`, after the events that it includes."""
        self.flush()
        body = frames.encode(snapshot)
        for topic in topics:
            self._send(topic, frames.pack(body) if topic == frames.TOPIC_SNAPSHOT_PACKED else body)

    def event(self, event: Event) -> None:
        """Publish one event at the next `flush`: a busy engine has a hundred a second, most of them in bursts."""
        self._events.append(event)
        if len(self._events) >= _MOST_EVENTS:
            self.flush()

    def flush(self) -> None:
        """Publish the events so far as one message; the sequence of the last one is the topic's."""
        if self._events:
            events, self._events = self._events, []
            self._sequences[frames.TOPIC_EVENT] = events[-1].seq - 1
            self._send(frames.TOPIC_EVENT, frames.encode(Events(events)))

    def heartbeat(self, step: int, core_age_ms: float | None) -> None:
        """Publish a heartbeat."""
        self._send(frames.TOPIC_HEARTBEAT, frames.encode(Pong(nonce=0, step=step, core_age_ms=core_age_ms)))

    def _send(self, topic: bytes, body: bytes) -> None:
        self._sequences[topic] += 1
        head = frames.header(self._engine, self._epoch, topic.decode(), self._sequences[topic])
        send(self._socket, [topic, frames.encode(head), body])


class Answerer:
    """Sends `[routing id][header][body]` on a ROUTER; a client that is gone or full loses the message."""

    def __init__(self, socket: Socket, engine: str, epoch: str) -> None:
        self._socket, self._engine, self._epoch = socket, engine, epoch

    def __call__(self, client: bytes, message: msgspec.Struct) -> None:
        """Send `message` to `client`."""
        head = frames.header(self._engine, self._epoch)
        send(self._socket, [client, frames.encode(head), frames.encode(message)])
