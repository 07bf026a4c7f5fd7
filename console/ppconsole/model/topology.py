"""Topology of an engine: its places, their neighbours, the ways of messages, and the links of its cards.

A pure function of a snapshot. Places that the snapshot lacks are listed, too: they are those of its sizes.
"""

from __future__ import annotations

import msgspec
from ppengine.protocol.gpu import GpuInfo, GpuPeer
from ppengine.protocol.place import Place
from ppengine.protocol.snapshot import Snapshot
from ppengine.protocol.stage_info import DeviceInfo, StageInfo, SumRoute

from ppconsole.model.ranks import place_of

SHARED_MEMORY, TCP, DEVICE_MEMORY, UNKNOWN = "shared memory", "TCP", "device memory", "?"


class PlaceRef(msgspec.Struct, kw_only=True, frozen=True):
    """Name of a place."""

    stage: int
    rank: int


class PlaceInfo(msgspec.Struct, kw_only=True, frozen=True):
    """One place; None: not known."""

    stage: int
    rank: int
    state: str | None = None
    node: str | None = None
    pid: int | None = None
    device: DeviceInfo | None = None
    layers: list[int] = []
    tensor_peers: list[PlaceRef] = []
    """The other ranks of its stage, which compute each step with it."""
    previous: PlaceRef | None = None
    """The place that sends hidden states to it."""
    next: PlaceRef | None = None
    """The place that receives hidden states from it."""
    token_source: PlaceRef | None = None
    """The place whose sampled tokens it receives; only on the first stage."""


class Way(msgspec.Struct, kw_only=True, frozen=True):
    """Messages between two places. `both`: they go both ways."""

    source: PlaceRef
    target: PlaceRef
    carries: str
    way: str
    """`shared memory`, `TCP`, `RDMA`, `device memory`, or `?`."""
    both: bool = False


class SumTimes(msgspec.Struct, kw_only=True, frozen=True):
    """Sums of parts of `bytes` that went one way, as each place that measured them found."""

    bytes: int
    way: str | None = None
    """As a place reports it, `one shot`; None: not known."""
    us: float
    """Microseconds of a call at the slowest place."""
    gb_s: float
    """Bytes of a part by that time, in GB/s."""


class CardInfo(msgspec.Struct, kw_only=True, frozen=True):
    """One card with the places on it. Peers are the cards of the engine on the same host."""

    uuid: str
    name: str
    node: str
    places: list[PlaceRef]
    bus_id: str | None = None
    pcie_generation: int | None = None
    pcie_generation_most: int | None = None
    pcie_width: int | None = None
    pcie_width_most: int | None = None
    nvlinks: int | None = None
    nvlinks_active: int | None = None
    peers: list[GpuPeer] = []


class Topology(msgspec.Struct, kw_only=True, frozen=True):
    """Everything of one engine."""

    pipeline_parallel_size: int
    tensor_parallel_size: int
    places: list[PlaceInfo]
    ways: list[Way]
    sum_routes: list[SumRoute] = []
    """Ways of the sums between ranks, by the size of a part; the first that fits is taken."""
    sum_times: list[SumTimes] = []
    cards: list[CardInfo] = []


def topology_of(snapshot: Snapshot) -> Topology:
    """Return the topology of the engine of a snapshot."""
    known = {place_of(stage): stage for stage in snapshot.stages}
    # An engine whose snapshot has more than its sizes say is shown whole.
    pipeline = max(snapshot.engine.pipeline_parallel_size, *(place.stage + 1 for place in known), 1)
    tensor = max(snapshot.engine.tensor_parallel_size, *(place.rank + 1 for place in known), 1)
    places = [Place(stage, rank) for stage in range(pipeline) for rank in range(tensor)]
    return Topology(
        pipeline_parallel_size=pipeline,
        tensor_parallel_size=tensor,
        places=[_place(each, known.get(each), pipeline, tensor) for each in places],
        ways=_ways(known, pipeline, tensor),
        sum_routes=next((stage.sums.routes for stage in snapshot.stages if stage.sums is not None), []),
        sum_times=_sum_times(snapshot),
        cards=_cards(snapshot),
    )


def _sum_times(snapshot: Snapshot) -> list[SumTimes]:
    """Return the time of the slowest place for each size and way, from small to large."""
    slowest: dict[tuple[int, str | None], float] = {}
    for stage in snapshot.stages:
        for each in stage.sums.times if stage.sums is not None else []:
            slowest[each.bytes, each.way] = max(slowest.get((each.bytes, each.way), 0.0), each.us)
    return [
        SumTimes(bytes=size, way=way, us=us, gb_s=size / us / 1e3)
        for (size, way), us in sorted(slowest.items(), key=lambda item: (item[0][0], item[0][1] or ""))
        if us > 0
    ]


def _ref(place: Place) -> PlaceRef:
    return PlaceRef(stage=place.stage, rank=place.rank)


def _place(place: Place, known: StageInfo | None, pipeline: int, tensor: int) -> PlaceInfo:
    """Return one place with its neighbours: a rank talks to the same rank of the neighbouring stages."""
    stage, rank = place
    info = PlaceInfo(
        stage=stage, rank=rank, tensor_peers=[_ref(Place(stage, other)) for other in range(tensor) if other != rank],
        previous=_ref(Place(stage - 1, rank)) if stage else None,
        next=_ref(Place(stage + 1, rank)) if stage + 1 < pipeline else None,
        token_source=_ref(Place(pipeline - 1, rank)) if not stage and pipeline > 1 else None,
    )  # fmt: skip
    if known is None:
        return info
    return msgspec.structs.replace(
        info, state=known.state, node=known.host, pid=known.pid, device=known.device, layers=known.layers
    )


def _ways(known: dict[Place, StageInfo], pipeline: int, tensor: int) -> list[Way]:
    """Return the ways between places: ranks of a stage, neighbouring stages, and the tokens back to the first stage."""
    ways = [
        Way(source=_ref(Place(stage, one)), target=_ref(Place(stage, other)), carries="all-reduce", both=True,
            way=_way(known.get(Place(stage, one)), known.get(Place(stage, other))))
        for stage in range(pipeline) for one in range(tensor) for other in range(one + 1, tensor)
    ]  # fmt: skip
    for rank in range(tensor):
        hops = [(stage, stage + 1, "hidden states") for stage in range(pipeline - 1)]
        hops += [(pipeline - 1, 0, "tokens")] if pipeline > 1 else []
        for start, end, carries in hops:
            source, target = Place(start, rank), Place(end, rank)
            way = _way(known.get(source), known.get(target))
            if way == TCP and carries == "hidden states":
                way = known[target].carrier or TCP
            ways.append(Way(source=_ref(source), target=_ref(target), carries=carries, way=way))
    return ways


def _way(one: StageInfo | None, other: StageInfo | None) -> str:
    """Return the way between two places, as far as the snapshot shows it."""
    if one is None or other is None:
        return UNKNOWN
    cards = one.device.kind, other.device.kind
    if one.index == other.index:
        return SHARED_MEMORY if set(cards) == {"cpu"} else DEVICE_MEMORY if "cpu" not in cards else UNKNOWN
    if "cpu" in cards or one.host != other.host:
        return TCP
    if one.device.uuid is not None and one.device.uuid == other.device.uuid:
        return DEVICE_MEMORY
    peers = (one.gpu.peers or []) if one.gpu is not None else []
    reaches = next((peer.reaches for peer in peers if peer.uuid == other.device.uuid), None)
    return UNKNOWN if reaches is None else DEVICE_MEMORY if reaches else TCP


def _cards(snapshot: Snapshot) -> list[CardInfo]:
    """Return the cards of the engine, in the order of their places."""
    found: dict[str, tuple[StageInfo, list[Place]]] = {}
    for stage in snapshot.stages:
        if stage.device.kind != "cpu" and stage.device.uuid is not None:
            places = found.setdefault(stage.device.uuid, (stage, []))[1]
            places.append(place_of(stage))
    cards = []
    for uuid, (stage, places) in found.items():
        gpu = stage.gpu or GpuInfo(uuid=uuid)
        cards.append(
            CardInfo(
                uuid=uuid, name=gpu.name or stage.device.name, node=stage.host, places=[_ref(each) for each in places],
                bus_id=gpu.bus_id, pcie_generation=gpu.pcie_generation, pcie_generation_most=gpu.pcie_generation_most,
                pcie_width=gpu.pcie_width, pcie_width_most=gpu.pcie_width_most, nvlinks=gpu.nvlinks,
                nvlinks_active=gpu.nvlinks_active, peers=[each for each in gpu.peers or [] if each.uuid in found],
            )
        )  # fmt: skip
    return cards
