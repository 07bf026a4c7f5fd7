"""Late ranks of collectives on GPUs: the claims of all ranks of a stage, compared with each other.

A rank claims from its own memory who has not sent the part of its next call. It does not know whether it is in that
call: it may as well hang before it. Two cases show that it is not, and the claim is dropped.

- Both claim each other. Each would have sent its part before it waits.
- The other one has done the step. So it has sent all parts of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ppengine.common.device_page import LAYERS
from ppengine.protocol.stage_info import StreamInfo
from ppengine.protocol.stage_samples import StageSample

_HALF = 1 << 31
"""Steps are counted modulo twice that."""


def settle(samples: Sequence[StageSample]) -> None:
    """Drop the claims that do not hold, and write the others where an operator sees them."""
    streams = {(sample.index, sample.rank): _layers(sample) for sample in samples}
    claims = {key: list(stream.late_ranks) for key, stream in streams.items() if stream is not None}
    for (stage, rank), late in claims.items():
        stream = streams[stage, rank]
        if stream is None or not late:
            continue
        stream.late_ranks = [
            peer
            for peer in late
            if rank not in claims.get((stage, peer), ()) and not _has_done(streams.get((stage, peer)), stream)
        ]
        if stream.late_ranks:
            ranks = ", ".join(map(str, stream.late_ranks))
            stream.waits_for = f"stage {stage} rank{'s' * (len(stream.late_ranks) > 1)} {ranks}"


def _layers(sample: StageSample) -> StreamInfo | None:
    return next((stream for stream in sample.streams if stream.on_device and stream.name == LAYERS), None)


def _has_done(theirs: StreamInfo | None, ours: StreamInfo) -> bool:
    """Return whether the other rank has done the step that this one is in."""
    if theirs is None or theirs.done_step is None or ours.begun_step is None:
        return False
    return (theirs.done_step - ours.begun_step) % (2 * _HALF) < _HALF
