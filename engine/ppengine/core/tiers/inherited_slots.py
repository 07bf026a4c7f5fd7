"""Slots that fetches of a core before this one may still write: none is used until each store is done with it.

A store says so with `StoreReady`: it connects to this core after its last job of the other one, or is another process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ppengine.core.tiers.open_pools import OpenPools
from ppengine.protocol.place import Place


@dataclass(eq=False)
class InheritedSlots:
    """Takes all slots until then, so that requests are recomputed in place of swapped."""

    _places: Sequence[Place]
    _left: set[Place] = field(init=False, default_factory=set)
    """Places whose store may have jobs of the core before this one."""
    _held: list[int] = field(init=False, default_factory=list)

    def begin(self) -> None:
        """Note that a core before this one has given jobs to the stores."""
        self._left = set(self._places)

    def hold(self, pools: OpenPools) -> None:
        """Take all slots out of use, if a store may write into them."""
        if self._left and not self._held:
            self._held = pools.host.reserve(pools.scheduler.blocks.host.free) or []

    def done(self, place: Place) -> None:
        """Note that the store of a place has no job of another core."""
        self._left.discard(place)

    def advance(self, pools: OpenPools) -> None:
        """Free the slots when no store is left."""
        if self._held and not self._left:
            held, self._held = self._held, []
            pools.host.release(held)

    @property
    def holds(self) -> bool:
        """Whether slots are taken, or will be."""
        return bool(self._held or self._left)

    @property
    def why(self) -> str:
        """Reason why slots are not used, in one line; empty if they are."""
        if not self._left:
            return ""
        return f"the store of stage {min(self._left).stage} may still write for the core before this one"
