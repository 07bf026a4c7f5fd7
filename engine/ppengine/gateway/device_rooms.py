"""Free memory of the devices of all stages, for the core's plan of a change of memory."""

from __future__ import annotations

from collections.abc import Mapping

from ppengine.diagnosis.neighbours import Own, others
from ppengine.protocol.gpu import DeviceRoom, DeviceRooms, GpuInfo, GpuProcess
from ppengine.protocol.reports import StageView

Timed = tuple[int | None, int]
"""Available bytes of a host, and the time of the reading."""


def device_rooms(
    now_ns: int,
    stages: list[StageView],
    gpus: Mapping[str, tuple[GpuInfo, int]],
    cards: Mapping[str, Mapping[int, int | None]],
    hosts: Mapping[str, Timed],
    own: Own,
) -> DeviceRooms:
    """Return the room of each device that a stage uses, as far as it is known. `cards`: see `with_neighbours`."""
    rooms: dict[str, DeviceRoom] = {}
    for view in stages:
        if view.device_uuid is None:
            free, read_ns = hosts.get(view.host, (None, 0))
            if free is not None:
                rooms[view.host] = DeviceRoom(device=view.host, free=free, age_ms=(now_ns - read_ns) / 1e6)
        elif view.device_uuid in gpus and view.device_uuid not in rooms:
            gpu, seen_ns = gpus[view.device_uuid]
            room = _card_room(gpu, (now_ns - seen_ns) / 1e6, others(gpu, cards.get(gpu.uuid, {}), own))
            if room is not None:
                rooms[gpu.uuid] = room
    return DeviceRooms(rooms=list(rooms.values()))


def _card_room(gpu: GpuInfo, late_ms: float, holders: list[GpuProcess] | None) -> DeviceRoom | None:
    if gpu.age_ms is None or gpu.memory_total is None or gpu.memory_used is None:
        return None
    free = gpu.memory_total - (gpu.memory_driver or 0) - gpu.memory_used
    if holders is not None:
        holders = sorted((each for each in holders if each.bytes), key=lambda each: -(each.bytes or 0))
    return DeviceRoom(device=gpu.uuid, free=max(0, free), age_ms=gpu.age_ms + late_ms, holders=holders)
