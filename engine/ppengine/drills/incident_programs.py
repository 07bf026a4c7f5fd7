"""Known failures of pipeline engines, replayed: the program with its mistake, and the same program put right.

Each incident runs a few lines as the engine of its report had them, on fake streams, and declares
everything to the ledger of its runtime. It returns the numbers that it computed, and the right
ones. `fixed` adds the missing wait or argument; the rest stays as it is. As a fault, a program runs
once inside a stage, beside its work: the operator reads the findings as those of a real failure.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

from ppengine.drills.fake_streams import HOME, FakeError, FakeMemory, FakeRuntime, FakeStream, LifoPool
from ppengine.drills.fault_points import StageParts
from ppengine.drills.registry import FaultError, Undo, arm
from ppengine.protocol.snapshot import Cause
from ppengine.stage.ledger.ledger import Ledger

log = logging.getLogger("ppengine.stage")


@dataclass(frozen=True)
class Played:
    """The result of one run. `error` is the error of a call that did no work."""

    got: list[float]
    expected: list[float]
    error: str = ""

    @property
    def corrupt(self) -> bool:
        """Whether the result is wrong (a NaN is never right), or was never computed."""
        return bool(self.error) or self.got != self.expected


Program = Callable[..., Played]
INCIDENTS: dict[str, Program] = {}
"""Programs by name; the first three are those of public reports."""


def incident(*expects: Cause, **more: Any) -> Callable[[Program], Program]:
    """Register `program(runtime, fixed)` under its name, and as a fault that runs it without `fixed`."""

    def register(program: Program) -> Program:
        name = program.__name__.replace("_", "-")

        @wraps(program)
        def play(parts: StageParts) -> Undo:
            return _play(parts, name, program)

        arm("wrong", *expects, clears=True, needs="ledger", **more)(play)
        INCIDENTS[name] = program
        return program

    return register


def _play(parts: StageParts, name: str, program: Program) -> Undo:
    ledger = parts.runner._checks.ledger
    if not ledger.on:
        raise FaultError(f"{name} is found by the ledger, which is off: ppconsole check ledger on")
    # On a thread of its own: the program sets devices and current streams, which belong to a thread.
    thread = threading.Thread(target=_run, args=(name, program, ledger), name="step loop")
    thread.start()
    thread.join()
    return lambda: None  # It is over; the findings stay until the ledger is switched off.


def _run(name: str, program: Program, ledger: Ledger) -> None:
    played = program(FakeRuntime(ledger))
    log.warning("%s: got %s, right is %s", name, played.error or played.got, played.expected)


@incident("stream_order")
def stale_seqstart(runtime: FakeRuntime, fixed: bool = False) -> Played:
    """Sequence offsets are read back on a metadata stream while their copy waits on the compute stream.

    Verdict: metadata reads seqstart without waiting for compute, which writes it; both call sites.
    """
    # The copy is queued on the compute stream behind the first layer. Pickling on the metadata stream reads the memory
    # at once, finds an earlier step's offsets there, and broadcasts them; the next stages index with them.
    prompts = [[5.0, 9.0, 2.0], [4.0, 4.0, 6.0]]
    pool = LifoPool(runtime)
    compute = runtime.stream("compute", "compute", lag=True)
    metadata = runtime.stream("metadata", "metadata broadcast")
    broadcast: list[float] = []
    offsets: list[float] = []
    for step, lengths in enumerate(prompts):
        offsets = [0.0, *(sum(lengths[: index + 1]) for index in range(len(lengths)))]
        seqstart = pool.take(len(offsets), "seqstart", compute)
        hidden = pool.take(8, "hidden", compute)
        compute.launch(f"layer 0 of m{step}", lambda: None, writes=[hidden])
        _copy_to_device(compute, seqstart, offsets)
        if fixed:
            metadata.wait(compute.record("seqstart copied"))
        broadcast = []
        _pickle(metadata, seqstart, broadcast)
        metadata.synchronize()  # Only of its own stream, as the blocking copy that pickling makes.
        compute.synchronize()
        pool.give(hidden, compute)
        pool.give(seqstart, compute)
    runtime.close()
    return Played(broadcast, offsets)


def _copy_to_device(stream: FakeStream, target: FakeMemory, values: list[float]) -> None:
    stream.launch("copy of seqstart", lambda: target.set(values), writes=[target])


def _pickle(stream: FakeStream, source: FakeMemory, into: list[float]) -> None:
    stream.launch("pickling of seqstart", lambda: source.read(into), reads=[source])


class _Global:
    """A current stream that is one for the whole process: the mistake."""

    def __init__(self, ledger: Ledger, stream: FakeStream) -> None:
        self._ledger = ledger
        self.stream = stream
        ledger.make_current(stream.actor, depth=1)

    def set(self, stream: FakeStream) -> None:
        self.stream = stream
        self._ledger.make_current(stream.actor, depth=1)


def _all_reduce(current: _Global, stream: FakeStream | None, parts: FakeMemory, total: FakeMemory) -> None:
    """Sum over ranks, on the current stream unless one is given: the default that the report blames."""
    into = stream or current.stream
    into.launch("all_reduce", lambda: total.double(parts), reads=[parts], writes=[total], depth=1)


def _redirected(runtime: FakeRuntime, foreign: bool, fixed: bool) -> Played:
    """A main thread whose collective takes the current stream, which a connector's thread has set to its own."""
    ledger = runtime.ledger
    runtime.set_device(HOME)
    pool = LifoPool(runtime)
    compute = runtime.stream("compute", "compute", lag=True)
    current = _Global(ledger, compute)
    streams: list[FakeStream] = []

    def connector() -> None:
        ledger.thread("kv-connector")
        runtime.set_device(0 if foreign else HOME)  # a thread that sets no device is on 0
        streams.append(runtime.stream("kv-load", "loading of KV blocks"))
        current.set(streams[0])  # `with torch.cuda.stream(...)` of the connector, still inside of it.
        ledger.leave()

    worker = threading.Thread(target=connector, name="kv-connector")
    worker.start()
    worker.join()
    parts, total = pool.take(3, "partial sums", compute), pool.take(3, "summed", compute)
    parts.set([math.nan] * 3)  # Left in that memory by an earlier owner.
    compute.launch("row-parallel layer", lambda: parts.set([1.0, 2.0, 3.0]), writes=[parts])
    error, result = "", [math.nan] * 3
    try:
        _all_reduce(current, compute if fixed else None, parts, total)
        (compute if fixed else streams[0]).synchronize()
        result = list(total.data)
    except FakeError as problem:
        error = str(problem)
    compute.synchronize()
    runtime.close()
    return Played(result, [2.0, 4.0, 6.0], error)


@incident("stream_owner", "stream_order")
def global_stream(runtime: FakeRuntime, fixed: bool = False) -> Played:
    """A KV connector's thread redirects the process-global current stream, and a collective follows it there.

    Verdict: a thread launches on stream kv-load, which thread kv-connector owns; and the call that
    made it current.
    """
    # The collective runs without an order to the kernels that write its input and gives NaN.
    return _redirected(runtime, foreign=False, fixed=fixed)


@incident("stream_owner", "stream_order")
def foreign_device(runtime: FakeRuntime, fixed: bool = False) -> Played:
    """As global-stream, and the connector's thread never set its device: its stream is of device 0.

    Verdict: stream kv-load of one device is used with a thread of another.
    """
    # In the main thread, on another device, that handle is invalid.
    return _redirected(runtime, foreign=True, fixed=fixed)


@contextmanager
def _send_stream(runtime: FakeRuntime) -> Iterator[tuple[LifoPool, FakeStream, FakeStream]]:
    compute = runtime.stream("compute", "compute")
    send = runtime.stream("send", "send to the next stage", lag=True)
    yield LifoPool(runtime), compute, send
    runtime.close()


@incident("stream_order", held_out=True)
def overwritten_in_flight(runtime: FakeRuntime, fixed: bool = False) -> Played:
    """A persistent buffer is filled for the next micro-batch while the send stream still reads the last one.

    Verdict: compute rewrites hidden while send may still read it; both call sites, and the wait that
    is missing.
    """
    sent: list[float] = []
    with _send_stream(runtime) as (pool, compute, send):
        buffer, delivered = pool.take(2, "hidden", compute), None
        for step in (1.0, 2.0):
            if fixed and delivered is not None:
                compute.wait(delivered)
            compute.launch(f"forward of m{step:.0f}", partial(buffer.set, [step, step]), writes=[buffer])
            send.wait(compute.record("filled"))
            compute.synchronize()
            send.launch(f"send of m{step:.0f}", partial(buffer.read, sent), reads=[buffer])
            delivered = send.record("delivered")
        send.synchronize()
    return Played(sent, [1.0, 1.0, 2.0, 2.0])


@incident("stream_order", held_out=True)
def freed_in_flight(runtime: FakeRuntime, fixed: bool = False) -> Played:
    """A buffer goes back to the allocator while the send stream still reads it, and is handed out again.

    Verdict: compute frees hidden while send may still read it; both call sites, and what would keep
    the memory.
    """
    sent: list[float] = []
    with _send_stream(runtime) as (pool, compute, send):
        first = pool.take(2, "hidden", compute)
        compute.launch("forward of m1", partial(first.set, [1.0, 1.0]), writes=[first])
        send.wait(compute.record("filled"))
        send.launch("send of m1", partial(first.read, sent), reads=[first])
        if fixed:
            compute.wait(send.record("delivered"))
        pool.give(first, compute)
        second = pool.take(2, "logits", compute)
        compute.launch("head", partial(second.set, [7.0, 7.0]), writes=[second])
        compute.synchronize()
        send.synchronize()
    return Played(sent, [1.0, 1.0])
