"""The rules that the ledger checks at each access: a launch by the right thread, and an order between accesses.

The caller holds the ledger's lock.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from ppengine.stage.ledger.actors import HOST, Access, Actor, Buffer
from ppengine.stage.ledger.order_findings import Kind, Trouble, Troubles


class OrderRules:
    """Applies the accesses of buffers, and adds those that break a rule to `troubles`."""

    def __init__(self, troubles: Troubles) -> None:
        self._troubles = troubles

    def check_launch(self, thread: Actor, stream: Actor, access: Access) -> bool:
        """Find a launch that its thread must not make; return whether stream and thread are on one device."""
        if not stream.alive:
            self._troubles.add(Trouble(Kind.DEAD, access, stream=stream))
        if stream.owner is not thread:
            self._troubles.add(Trouble(Kind.OWNER, access, stream=stream))
        # A connection is a stream of the host, whatever the thread's device.
        on_one_device = stream.device in (HOST, thread.device)
        if not on_one_device:
            self._troubles.add(Trouble(Kind.DEVICE, access, stream=stream))
        return on_one_device

    def check_device(self, stream: Actor, buffer: Buffer, access: Access) -> None:
        """Find a buffer of another device than the stream's. Pinned memory of the host is every device's."""
        if buffer.device not in (HOST, stream.device):
            self._troubles.add(Trouble(Kind.DEVICE, access, stream=stream, buffer=buffer))

    def read(self, buffer: Buffer, access: Access) -> None:
        """Note a read of `buffer`, which must be ordered behind its write."""
        writer, actor = buffer.writer, access.actor
        if buffer.freed is not None:
            self._troubles.add(Trouble(Kind.USED_FREED, access, buffer.freed[0], buffer=buffer))
        if writer is not None and not actor.has_seen(writer):
            self._troubles.add(Trouble(Kind.UNORDERED, access, writer, buffer=buffer))
        buffer.readers[actor.id] = access

    def write(self, buffer: Buffer, access: Access) -> None:
        """Note a write of `buffer`, which must be ordered behind all reads and the write of the last generation."""
        if buffer.freed is not None:
            self._troubles.add(Trouble(Kind.USED_FREED, access, buffer.freed[0], buffer=buffer))
        self.check_unfinished(Kind.REWRITTEN, buffer, access)
        buffer.generation += 1
        buffer.writer = access
        buffer.readers.clear()

    def check_unfinished(self, kind: Kind, buffer: Buffer, access: Access) -> None:
        """Find readers, and the writer, that `access` does not wait for."""
        actor, writer = access.actor, buffer.writer
        for reader in buffer.readers.values():
            if not actor.has_seen(reader):
                self._troubles.add(Trouble(kind, access, reader, buffer=buffer))
        if writer is not None and not actor.has_seen(writer):
            self._troubles.add(Trouble(kind, access, writer, buffer=buffer, writes=True))
        if kind is Kind.FREED:
            # Reported once, here: the next owner of the memory must not be blamed for it.
            buffer.readers = {key: reader for key, reader in buffer.readers.items() if actor.has_seen(reader)}
            buffer.writer = writer if writer is not None and actor.has_seen(writer) else None

    def check_stuck(self, actors: Iterable[Actor], limit_s: float) -> None:
        """Find streams for computing whose oldest operation is not done `limit_s` after it was launched.

        Transfers are not judged here: they take as long as the other stage does. Nor are the
        streams of a card: the card itself writes how far they are (`ppengine.common.device_page`).
        """
        now = time.monotonic_ns()
        for actor in actors:
            if actor.purpose != "compute" or not actor.alive or not actor.open:
                continue
            tick, site, what, since_ns = actor.open[0]
            if now - since_ns > limit_s * 1e9:
                access = Access(actor, tick, what, site)
                self._troubles.add(Trouble(Kind.STUCK, access, stream=actor, where=f"{limit_s:g}"))
