"""Known failures of engines, by name: the program of each runs once inside a stage, beside its work.

It runs on fake streams, events and memory, and declares its operations to the stage's ledger: the
operator reads the findings as those of a real failure.
"""

from __future__ import annotations

import logging
import threading

from ppengine.drills.fake_streams import FakeRuntime
from ppengine.drills.fault_points import StageParts
from ppengine.drills.incident_programs import INCIDENTS
from ppengine.drills.registry import FaultError, Undo, arm
from ppengine.stage.ledger.ledger import Ledger

log = logging.getLogger("ppengine.stage")


@arm("wrong", "stream_order", clears=True, needs="ledger")
def stale_seqstart(parts: StageParts) -> Undo:
    """Sequence offsets are read back on a metadata stream while their copy waits on the compute stream.

    Verdict: metadata reads seqstart without waiting for compute, which writes it; both call sites.
    """
    return _play(parts, "stale-seqstart")


@arm("wrong", "stream_owner", "stream_order", clears=True, needs="ledger")
def global_stream(parts: StageParts) -> Undo:
    """A KV connector's thread redirects the process-global current stream, and a collective follows it there.

    Verdict: a thread launches on stream kv-load, which thread kv-connector owns; and the call that
    made it current.
    """
    return _play(parts, "global-stream")


@arm("wrong", "stream_owner", "stream_order", clears=True, needs="ledger")
def foreign_device(parts: StageParts) -> Undo:
    """As global-stream, and the connector's thread never set its device: its stream is of device 0.

    Verdict: stream kv-load of one device is used with a thread of another.
    """
    return _play(parts, "foreign-device")


@arm("wrong", "stream_order", clears=True, needs="ledger", held_out=True)
def overwritten_in_flight(parts: StageParts) -> Undo:
    """A persistent buffer is filled for the next micro-batch while the send stream still reads the last one.

    Verdict: compute rewrites hidden while send may still read it; both call sites, and the wait that
    is missing.
    """
    return _play(parts, "overwritten-in-flight")


@arm("wrong", "stream_order", clears=True, needs="ledger", held_out=True)
def freed_in_flight(parts: StageParts) -> Undo:
    """A buffer goes back to the allocator while the send stream still reads it, and is handed out again.

    Verdict: compute frees hidden while send may still read it; both call sites, and what would keep
    the memory.
    """
    return _play(parts, "freed-in-flight")


def _play(parts: StageParts, name: str) -> Undo:
    ledger = parts.runner._checks.ledger
    if not ledger.on:
        raise FaultError(f"{name} is found by the ledger, which is off: ppconsole check ledger on")
    # On a thread of its own: the program sets devices and current streams, which belong to a thread.
    thread = threading.Thread(target=_run, args=(name, ledger), name="step loop")
    thread.start()
    thread.join()
    return lambda: None  # It is over; the findings stay until the ledger is switched off.


def _run(name: str, ledger: Ledger) -> None:
    played = INCIDENTS[name](FakeRuntime(ledger), False)
    log.warning("%s: got %s, right is %s", name, played.error or played.got, played.expected)
