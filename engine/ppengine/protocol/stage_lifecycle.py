"""The life of a stage process: it loads, meets its neighbours in a generation, leaves for the next one, and ends."""

from __future__ import annotations

import msgspec

from ppengine.protocol.stage_info import PlaceLinks

FIRST_GENERATION = 1
"""Generation of a boot; each restart of a stage adds one."""


class StageReady(msgspec.Struct, tag="ready", array_like=True, kw_only=True):
    """Weights are loaded and the profile run is done. Bytes; `peak` = weights + largest activations + other."""

    stage: int
    rank: int
    generation: int
    pid: int
    host: str
    layers: list[int]
    device_kind: str
    device_name: str
    device_uuid: str | None
    total_bytes: int
    weights_bytes: int
    peak_bytes: int
    block_bytes: int
    quantum_blocks: int
    """Mapping granularity in blocks."""
    reserved_blocks: int
    """Blocks for which addresses are reserved (what utilization 1.0 allows)."""
    swap_blocks: int
    slots_fd: int = -1
    """Descriptor of the memory of its host slots in its process, for the store of its place; -1: it is private."""
    slot_bytes: int = 0
    """Bytes of a host slot: one block in all layers."""
    slot_layout: str = ""
    """Name of the order of the bytes in a slot; the same name, shape and dtype mean the same bytes."""
    links: PlaceLinks = PlaceLinks()
    """Empty until it has met other places."""


class StageProgress(msgspec.Struct, tag="progress", array_like=True, kw_only=True):
    """A line about loading, for the operator."""

    stage: int
    rank: int
    text: str
    generation: int = 1
    """Newest generation that the stage knows; the core announces a newer one."""
    phase: str = "start"
    """Name of the ring's phase."""


class StageFailed(msgspec.Struct, tag="stage-failed", array_like=True, kw_only=True):
    """The stage cannot start or go on; one line with the numbers. The process exits after it."""

    stage: int
    rank: int
    text: str
    generation: int = 1
    """The one that its process was started for."""


class NewGeneration(msgspec.Struct, tag="new-generation", array_like=True):
    """A stage was lost: leave the edges, drop requests and steps, keep weights and mappings, and meet the others again.

    Sent to both sockets of a stage, and again to a stage that still speaks of an older one.
    """

    generation: int
    started: int
    """Generation for which the newest process of this place was started: an older one is about to end, and ignores it.

    Otherwise it could meet neighbours once more, and they would not meet its successor.
    """


class Drained(msgspec.Struct, tag="drained", array_like=True):
    """The stage has left the older generations and touches no edge of theirs any more; `StageReady` follows."""

    generation: int
    stage: int
    rank: int


class EdgeAddress(msgspec.Struct, tag="edge-address", array_like=True):
    """Address of an edge's receiver in a generation: to the core, and from there to the edge's sender."""

    generation: int
    name: str
    host: str
    port: int
    key: bytes
    """Secret of this edge and generation: both ends prove that they have it."""


class EdgeSought(msgspec.Struct, tag="edge-sought", array_like=True):
    """Question for the address of edge `name`, sent again until the core answers with `EdgeAddress`."""

    generation: int
    stage: int
    rank: int
    name: str


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True):
    """Leave the step loop and exit 0."""

    generation: int
