"""Host slots of fetched prefixes: pinned until their request starts, so that nothing evicts them before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ppengine.core.scheduler.request import Request
from ppengine.core.tiers.fetch_under_way import FetchUnderWay
from ppengine.core.tiers.open_pools import OpenPools

KEEP_S = 30.0
"""Seconds until the slots of a request that does not start may be evicted."""
SHARE = 0.5
"""Share of the host slots that fetches may take together with pinned ones."""


class _Kept(NamedTuple):
    before: list[int]
    """Slots of the prefix before the fetched chunks."""
    until: float


@dataclass(eq=False)
class KeptPrefixes:
    """Pins of requests that wait. The scheduler ends those of fetched chunks when their request starts or ends."""

    _clock: Callable[[], float]
    _kept: dict[Request, _Kept] = field(init=False, default_factory=dict)

    def __len__(self) -> int:
        return len(self._kept)

    def room(self, pools: OpenPools) -> int:
        """Return the number of slots that a further fetch may take."""
        return max(0, int(pools.scheduler.blocks.host.size * SHARE) - self.busy(pools))

    def busy(self, pools: OpenPools) -> int:
        """Return the number of slots that fetches, copies and starting requests give back soon."""
        return pools.host.moving + pools.host.cached - len(pools.scheduler.blocks.host.spare)

    def keep(self, pools: OpenPools, request: Request, fetch: FetchUnderWay) -> None:
        """Pin the chunks that a fetch has brought, and the slots before them."""
        size = pools.chunk_blocks
        before, slots = pools.present(fetch.digests[: fetch.first * size])
        if before < fetch.first * size:
            return
        pools.host.pin(slots)
        self._kept[request] = _Kept(slots, self._clock() + KEEP_S)
        left = fetch.good
        for run in fetch.runs:
            for chunk in run.chunks[: min(run.good, left)]:
                pools.copies.keep_for(request, pools.host.lookup(chunk.digests), run.backend)
            left -= min(run.good, left)

    def advance(self, pools: OpenPools) -> None:
        """Unpin the prefixes of requests that have started or ended, and of those that take too long."""
        now = self._clock()
        for request, kept in list(self._kept.items()):
            if request.state != "waiting" or kept.until <= now:
                self._drop(pools, request)

    def stop(self, pools: OpenPools) -> None:
        """Unpin all."""
        for request in list(self._kept):
            self._drop(pools, request)

    def _drop(self, pools: OpenPools, request: Request) -> None:
        pools.host.unpin(self._kept.pop(request).before)
        if request.state == "waiting":
            pools.copies.let_go(request)
