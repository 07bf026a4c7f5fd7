"""One story in three forms: a connector loads KV blocks while a stage computes and sums over its ranks.

Two are the incidents `global-stream` and `foreign-device`: a thread of the connector, in the process of the stage, has
a stream of its own. The third is this engine's: a store without CUDA fills a host slot, and the stage copies it in.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial

from ppengine.drills.fake_streams import HOME, FakeMemory, FakeRuntime, FakeStream, LifoPool
from ppengine.drills.incident_programs import INCIDENTS, Played
from ppengine.protocol.reports import Finding
from ppengine.stage.ledger.actors import HOST, Buffer, Mark
from ppengine.stage.ledger.ledger import Ledger

_BLOCK = [1.0, 2.0, 3.0]


def by_store(runtime: FakeRuntime, *, waits: bool = True) -> Played:
    """Return the sums that a stage makes of a block which a store has loaded.

    `waits`: compute waits for the copy, as `BlockMover` has it. Without, the lane is an unordered one like any other.
    """
    ledger = runtime.ledger
    runtime.set_device(HOME)
    pool = LifoPool(runtime)
    compute = runtime.stream("compute", "compute", lag=True)
    lane = runtime.stream("swap in", "swap", lag=True)
    slot = FakeMemory(Buffer("host slot 7", HOST, len(_BLOCK)), len(_BLOCK))
    block, total = pool.take(3, "KV block 4", compute), pool.take(3, "summed", compute)
    block.set([math.nan] * 3)  # Left in that memory by an earlier owner.
    ledger.acquire(_filled(ledger, slot))  # The store's answer, and then the core's step, bring the order.
    lane.wait(compute.record("compute before swap"))
    lane.launch("swap in", lambda: block.set(slot.data), reads=[slot], writes=[block])
    arrived = lane.record("swapped in")
    if waits:
        compute.wait(arrived)
    _all_reduce(compute, block, total)
    compute.synchronize()
    result = list(total.data)
    arrived.synchronize()  # Before the stage acknowledges the step: the slot may be filled again then.
    runtime.close()
    return Played(result, [2 * value for value in _BLOCK])


def _filled(ledger: Ledger, slot: FakeMemory) -> Mark:
    """Let the store fill a slot, beside the stage's thread; return the mark of its answer. It has no stream to set."""
    answer: list[Mark] = []

    def store() -> None:
        slot.set(_BLOCK)
        answer.append(ledger.peer_does(ledger.peer("store 2"), "fill of host slot 7", writes=[slot.buffer]))

    process = threading.Thread(target=store, name="store 2")
    process.start()
    process.join()
    return answer[0]


def _all_reduce(stream: FakeStream, parts: FakeMemory, total: FakeMemory) -> None:
    """Sum over ranks. Its stream is an argument without a default: no current stream can take its place."""
    stream.launch("all_reduce", partial(total.double, parts), reads=[parts], writes=[total], depth=1)


FORMS: dict[str, Callable[[FakeRuntime], Played]] = {
    "a thread with a stream, in the stage": INCIDENTS["global-stream"],
    "the same, its device never set": INCIDENTS["foreign-device"],
    "a store, and a declared lane": by_store,
}


def play(form: Callable[[FakeRuntime], Played], stage: int = HOME) -> tuple[Played, list[Finding]]:
    """Run a form with the ledger on; return its result and the findings."""
    ledger = Ledger(stage)
    ledger.thread("step loop")
    ledger.switch(True)
    return form(FakeRuntime(ledger)), ledger.findings()
