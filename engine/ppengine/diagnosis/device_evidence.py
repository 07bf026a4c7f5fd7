"""Evidence from a stage's device: the progress of its streams, and errors that its driver reported."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ppengine.diagnosis.budgets import SPINS, wants_core
from ppengine.diagnosis.evidence import StageEvidence
from ppengine.diagnosis.phrases import seconds
from ppengine.protocol.gpu import GpuInfo
from ppengine.protocol.stage_info import StreamInfo

STREAM_AFTER_S = 1.0
"""Least age of a stream without progress that makes it the cause of blocked work."""
XID_TOLD_MS = 30_000.0
"""An older report of the driver is no evidence for a fault of this moment."""
_LAUNCHES = ("forward", "sample", "mask")
"""Operations of a host inside the launches of a step."""
_XIDS = {
    13: "an exception of a kernel", 31: "a kernel touched memory that is not there", 43: "a channel was ended",
    45: "it ended work after an error", 48: "a memory error that cannot be corrected", 62: "it halted by itself",
    63: "a memory row is remapped", 64: "a memory row cannot be remapped", 74: "an error of NVLink",
    79: "it has fallen off the bus", 94: "a memory error, contained", 95: "a memory error, not contained",
    109: "a context switch timed out", 119: "its system processor timed out", 120: "its system processor failed",
}  # fmt: skip
"""In words for an operator; the numbers are NVIDIA's."""


def stuck_stream(stage: StageEvidence) -> StreamInfo | None:
    """Return the stream that has begun a piece of work and does not end it; None: none, or a stage without a device.

    A stream begins after all that it waits for, so one that has begun is blocked by itself. Among several, the stream
    of the layers comes first, then the one without progress for longest.
    """
    standing = [
        each
        for each in stage.streams
        if each.op is not None
        and (each.age_ms or 0.0) >= STREAM_AFTER_S * 1e3
        and not _is_launched_in_part(stage, each)
    ]
    return max(standing, key=lambda each: (each.name == "compute", each.age_ms or 0.0), default=None)


def _is_launched_in_part(stage: StageEvidence, stream: StreamInfo) -> bool:
    """Return whether a stream may have done all that its host has launched of a step: the host sleeps in launching it.

    A host that spins may wait for room behind launches of which none ends.
    """
    inside = stage.op in _LAUNCHES and stage.op_step == stream.begun_step and stream.pending == 1
    return stream.name == "compute" and inside and stage.cpu is not None and wants_core(stage.cpu) < SPINS


def device_lines(stage: StageEvidence) -> list[str]:
    """Return one line per stream with pending work, and one per XID."""
    lines = []
    for each in stage.streams:
        if each.begun_step is None or (each.name != "compute" and not each.pending):
            continue
        age = f", {seconds((each.age_ms or 0.0) / 1e3)} without a move" if each.pending else ""
        done = "none" if each.done_step is None else f"m{each.done_step}"
        far = f"the device began m{each.begun_step}, done {done}, pending {each.pending}"
        lines.append(f"stream {each.name}: {far}{age}")
    for xid in stage.xids:
        what = f" ({_XIDS[xid.code]})" if xid.code in _XIDS else ""
        lines.append(f"driver: XID {xid.code} of its card {seconds(xid.age_ms / 1e3)} ago{what}")
    return lines


def aged_stream(stream: StreamInfo, late_ms: float) -> StreamInfo:
    """Return a stream as it is `late_ms` after it was looked at, if it has not moved since."""
    return stream if stream.age_ms is None else msgspec.structs.replace(stream, age_ms=stream.age_ms + late_ms)


def with_xids(now_ns: int, stage: StageEvidence, gpus: Mapping[str, tuple[GpuInfo, int]]) -> StageEvidence:
    """Return a stage with the newest XIDs of its card, aged to this moment; `gpus` by UUID, with report times."""
    if stage.card is None or stage.card not in gpus:
        return stage
    gpu, seen_ns = gpus[stage.card]
    late_ms = (now_ns - seen_ns) / 1e6
    aged = (msgspec.structs.replace(xid, age_ms=xid.age_ms + late_ms) for xid in gpu.xids)
    return msgspec.structs.replace(stage, xids=tuple(xid for xid in aged if xid.age_ms <= XID_TOLD_MS))
