"""The ledger as an operator sees it: streams, hand-offs, buffers."""

from __future__ import annotations

import time

from ppengine.protocol.reports import LedgerBuffer, LedgerHandOff, LedgerStream, StageLedger
from ppengine.stage.ledger.actors import Access, Actor, Buffer
from ppengine.stage.ledger.ledger import Ledger

BUFFERS_MOST = 32


def picture(ledger: Ledger, *, stage: int, rank: int) -> StageLedger:
    """Return the ledger of a stage as it is at this moment."""
    now = time.monotonic_ns()
    used = [buffer for buffer in ledger.buffers if buffer.generation]
    used.sort(key=lambda buffer: buffer.writer.tick if buffer.writer else 0, reverse=True)
    return StageLedger(
        stage=stage,
        rank=rank,
        streams=[_stream(actor, now) for actor in ledger.actors if actor.owner is not None],
        handoffs=[
            LedgerHandOff(producer=_name(producer), consumer=_name(consumer), event=event, count=count)
            for producer, consumer, event, count in ledger.handoffs
        ],
        buffers=[_buffer(buffer) for buffer in used[:BUFFERS_MOST]],
        findings=ledger.findings(),
    )


def _name(actor: Actor) -> str:
    if actor.purpose == "stage":
        return actor.name
    return f"stream {actor.name}" if actor.is_stream else f"thread {actor.name}"


def _stream(actor: Actor, now: int) -> LedgerStream:
    assert actor.owner is not None
    current = next(iter(list(actor.open)), None)
    return LedgerStream(
        name=actor.name,
        owner=actor.owner.name,
        device=actor.device,
        purpose=actor.purpose,
        alive=actor.alive,
        op=current[2] if current else "",
        age_ms=(now - current[3]) / 1e6 if current else None,
        pending=len(actor.open),
    )


def _buffer(buffer: Buffer) -> LedgerBuffer:
    # The step loop goes on meanwhile: a second look may find another value.
    writer, readers = buffer.writer, list(buffer.readers.values())
    return LedgerBuffer(
        name=buffer.name,
        device=buffer.device,
        bytes=buffer.size,
        generation=buffer.generation,
        writer=_access(writer) if writer else "",
        readers=[_access(reader) for reader in readers],
        in_flight=[_access(reader) for reader in readers if not reader.actor.is_done(reader)],
        freed=buffer.freed is not None,
    )


def _access(access: Access) -> str:
    return f"{access.what} ({_name(access.actor)})"
