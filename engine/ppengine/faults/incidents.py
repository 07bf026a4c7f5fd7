"""Known failures of other engines, by name: the program of each report runs once inside a stage, on fake streams.

A CPU stage has no stream to confuse, and a GPU's memory is not to be spoiled: what the program does goes to the stage's
own ledger, and from there all the way to the operator, as it would on a device. The stage's work is left alone.
"""

from __future__ import annotations

import threading

from ppengine.faults.points import Site
from ppengine.faults.registry import FaultError, Undo, arm
from ppengine.streams.incidents import INCIDENTS


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

    Told: stream kv-load of cuda:0 is used with a thread of cuda:2.
    """
    return _play(site, "foreign-device")


def _play(site: Site, name: str) -> Undo:
    ledger = site.runner._checks.ledger
    if not ledger.on:
        raise FaultError(f"{name} is told by the ledger, which is off: ppconsole check ledger on")
    # On a thread of its own: the program sets devices and current streams, which belong to a thread.
    thread = threading.Thread(target=INCIDENTS[name], args=(ledger, False), name="step loop")
    thread.start()
    thread.join()
    return lambda: None  # It is over; what the ledger has found stays until that is switched off.
