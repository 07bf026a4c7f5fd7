"""Whether the devices have room for more blocks now: their free memory, as the gateway last sent it."""

from __future__ import annotations

from collections.abc import Callable

from ppengine.common.sizes import size_text
from ppengine.core.capacity import Capacity, Demand
from ppengine.protocol.gpu import DeviceRoom, DeviceRooms

FRESH_S = 3.0
"""Age in seconds from which free memory is not known any more."""
_NAMED = 3
"""Holders of memory that a refusal names."""


class RoomBook:
    """Keeps the free memory of the devices with the time of its reading."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: dict[str, tuple[DeviceRoom, float]] = {}
        self._changed = float("-inf")

    def take(self, message: DeviceRooms) -> None:
        """Take the gateway's figures, in place of the older ones."""
        self._known = {room.device: (room, self._clock() - room.age_ms / 1e3) for room in message.rooms}

    def note_change(self) -> None:
        """Note that stages have changed their memory: older figures are no longer true."""
        self._changed = self._clock()

    def shortage(self, capacity: Capacity, mapped: int, wanted: int) -> str:
        """Return why devices lack room to grow from `mapped` to `wanted` blocks; empty: they have it, or none knows."""
        short = [
            (demand, known[0])
            for demand in capacity.demands(wanted - mapped)
            if (known := self._known.get(demand.device)) and not self._doubt(demand) and demand.bytes > known[0].free
        ]
        if not short:
            return ""
        demand, room = max(short, key=lambda pair: pair[0].bytes - pair[1].free)
        fits = min(room.free * (wanted - mapped) // demand.bytes for demand, room in short)
        most = capacity.utilization_of(mapped + fits)
        verb = "needs" if len(demand.stages) == 1 else "need"
        need = f"{demand.stages_text} {verb} {size_text(demand.bytes)} more for {wanted} blocks"
        have = f"{demand.device_text} has {size_text(room.free)} free{_holders_text(demand, room)}"
        return f"{need}, {have}" + ("" if most is None else f"; at most {most:g} would fit")

    def line(self, capacity: Capacity, more: int) -> str:
        """Return a plan's line about the room for `more` blocks: the tightest device, or the missing figures."""
        demands = capacity.demands(more)
        if doubts := [doubt for demand in demands if (doubt := self._doubt(demand))]:
            return f"{doubts[0]}: planned without it"
        rooms = [(demand, self._known[demand.device][0].free) for demand in demands]
        demand, free = min(rooms, key=lambda pair: pair[1] - pair[0].bytes)
        return f"{demand.stages_text}: {size_text(demand.bytes)} more; {demand.device_text} has {size_text(free)} free"

    def _doubt(self, demand: Demand) -> str:
        """Return why the free memory of a device is not known; empty if it is."""
        known = self._known.get(demand.device)
        free = f"free memory of {demand.stages_text} is not known"
        if known is None:
            return f"{free} (no figures)"
        age = self._clock() - known[1]
        if age > FRESH_S:
            return f"{free} (its figures are {age:.1f} s old)"
        return f"{free} (its figures are older than the last change)" if known[1] < self._changed else ""


def _holders_text(demand: Demand, room: DeviceRoom) -> str:
    """Return who else holds memory of a card; empty for a host."""
    if not demand.card:
        return ""
    if room.holders is None:
        return ", who holds the rest is not known"
    named = [f"{each.text} holds {size_text(each.bytes or 0)}" for each in room.holders[:_NAMED]]
    if (more := len(room.holders) - _NAMED) > 0:
        named.append(f"{more} others hold {size_text(sum(each.bytes or 0 for each in room.holders[_NAMED:]))}")
    return ", " + (", ".join(named) or "no other process is known to hold any")
