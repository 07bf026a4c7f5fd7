"""Known failures of engines, by name: the program of each runs once inside a stage, beside its work.

On a GPU it runs on streams, events and memory of the card, on a CPU on fakes of them; the memory is its own either way.
What it does goes to the stage's ledger, and from there all the way to the operator.
"""

from __future__ import annotations

import logging
import threading

from ppengine.drills.fake_streams import FakeRuntime
from ppengine.drills.fault_points import Site
from ppengine.drills.incident_programs import INCIDENTS
from ppengine.drills.registry import FaultError, Undo, arm
from ppengine.stage.ledger.ledger import Ledger
from ppengine.stage.ledger.runtime import Runtime

log = logging.getLogger("ppengine.stage")


@arm("wrong", "stream_order", clears=True, needs="ledger")
def stale_seqstart(site: Site) -> Undo:
    """Sequence offsets are read back on a metadata stream while their copy waits on the compute stream.

    Told: metadata reads seqstart without waiting for compute, which writes it; both call sites.
    """
    return _play(site, "stale-seqstart")


@arm("wrong", "stream_owner", "stream_order", clears=True, needs="ledger")
def global_stream(site: Site) -> Undo:
    """A KV connector's thread redirects the process-global current stream, and a collective follows it there.

    Told: a thread launches on stream kv-load, which thread kv-connector owns; who made it the current one, and where.
    """
    return _play(site, "global-stream")


@arm("wrong", "stream_owner", "stream_order", clears=True, needs="ledger")
def foreign_device(site: Site) -> Undo:
    """As global-stream, and the connector's thread never set its device: its stream is of device 0.

    Told: stream kv-load of one device is used with a thread of another. Between two cards the stage crashes of it.
    """
    return _play(site, "foreign-device")


@arm("wrong", "stream_order", clears=True, needs="ledger", held_out=True)
def overwritten_in_flight(site: Site) -> Undo:
    """A buffer that is kept is filled for the next micro-batch while the send stream still reads the last one.

    Told: compute rewrites hidden while send may still read it; both call sites, and the wait that is missing.
    """
    return _play(site, "overwritten-in-flight")


@arm("wrong", "stream_order", clears=True, needs="ledger", held_out=True)
def freed_in_flight(site: Site) -> Undo:
    """A buffer goes back to the allocator while the send stream still reads it, and is handed out anew.

    Told: compute frees hidden while send may still read it; both call sites, and what would keep the memory.
    """
    return _play(site, "freed-in-flight")


def _play(site: Site, name: str) -> Undo:
    ledger = site.runner._checks.ledger
    if not ledger.on:
        raise FaultError(f"{name} is told by the ledger, which is off: ppconsole check ledger on")
    # On a thread of its own: the program sets devices and current streams, which belong to a thread.
    thread = threading.Thread(target=_run, args=(site, name, ledger), name="step loop")
    thread.start()
    thread.join()
    return lambda: None  # It is over; what the ledger has found stays until that is switched off.


def _run(site: Site, name: str, ledger: Ledger) -> None:
    played = INCIDENTS[name](_runtime(site, ledger), False)
    log.warning("%s: got %s, right is %s", name, played.error or played.got, played.expected)


def _runtime(site: Site, ledger: Ledger) -> Runtime:
    if site.runner.card is None:
        return FakeRuntime(ledger)
    from ppengine.stage.backends.cuda.rehearsal import DeviceRuntime

    return DeviceRuntime(ledger, site.runner.card.device)
