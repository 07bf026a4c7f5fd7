"""Trials: chunks of a backend are read beside the request that has found them, so that its rate is known.

A backend has a trial before the first request waits for it, and now and then while it is too slow, so that its rate can
recover.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ppengine.core.tiers.backends import Backends
from ppengine.core.tiers.chunks import Chunk
from ppengine.core.tiers.fetch_costs import Costs
from ppengine.core.tiers.fetch_under_way import Run
from ppengine.core.tiers.jobs import Job, Jobs
from ppengine.core.tiers.kept_prefixes import KeptPrefixes
from ppengine.core.tiers.open_pools import OpenPools, Send
from ppengine.protocol.store_messages import FoundChunk


@dataclass(eq=False)
class RateTrials:
    """At most one trial a backend; no request waits for it, and what it reads is dropped."""

    _jobs: Jobs
    _costs: Costs
    _backends: Backends
    _kept: KeptPrefixes
    _send: Send
    _note_failures: Callable[[OpenPools, Run], None]
    _seconds: float
    """Most seconds of a trial."""
    _clock: Callable[[], float]
    _open: dict[str, Run] = field(init=False, default_factory=dict)

    def begin(self, pools: OpenPools, chunks: Sequence[Chunk], found: Sequence[FoundChunk]) -> None:
        """Read the first chunks, all of one backend, into free slots; without any there is no trial.

        They take half of its threads, so that questions of other requests are answered meanwhile.
        """
        backend, size, known = found[0].backend, pools.chunk_blocks, self._backends.get(found[0].backend)
        half = 1 if known is None else max(1, known.threads // 2)
        most = min(len(found), half, self._kept.room(pools) // size)
        slots = pools.host.reserve(most * size) if most and backend not in self._open else None
        if slots is None:
            return
        each = [slots[at : at + size] for at in range(0, len(slots), size)]
        run = Run(
            backend, list(chunks[:most]), list(found[:most]), each, pools.size_of(most), self._costs.ahead(backend)
        )
        self._open[backend] = run
        self._costs.begun(backend, run.size)
        self._backends.note_read(backend)
        run.ask(pools, self._jobs, self._send, self._seconds, partial(self._ended, pools, run))

    def stop(self, why: str) -> None:
        """End all trials: their slots go to quarantine."""
        for run in list(self._open.values()):
            if run.job is not None:
                self._jobs.cancel(run.job, why)

    def _ended(self, pools: OpenPools, run: Run, job: Job) -> None:
        del self._open[run.backend]
        run.judge(len(pools.places))
        self._costs.ended(run.backend, run.size, run.sample_s(self._clock()), run.ahead)
        self._note_failures(pools, run)
        run.leave_slots(pools)
