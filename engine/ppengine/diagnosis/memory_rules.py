"""Memory that grows without end: named before the out-of-memory killer ends the stage.

`agent/growth_watch.py` has the definition of such a growth.
"""

from __future__ import annotations

from ppengine.common.sizes import size_text
from ppengine.diagnosis.budgets import is_lost, is_stopped, is_unseen
from ppengine.diagnosis.case import Case
from ppengine.diagnosis.evidence import StageEvidence
from ppengine.diagnosis.phrases import duration, seconds
from ppengine.protocol.snapshot import Verdict
from ppengine.protocol.stage_samples import GrowthSample


def growing(case: Case) -> list[Verdict]:
    """Return the stages whose memory will meet a limit soon, though each batch and block has had its memory before.

    It comes before a held GIL: a thread that allocates holds it.
    """
    return [
        _verdict(stage, stage.growth, stage.growth.left / stage.growth.rate)
        for stage in case.evidence.stages
        if stage.growth is not None and not (is_lost(stage) or is_unseen(stage) or is_stopped(stage))
    ]


def _verdict(stage: StageEvidence, growth: GrowthSample, until_s: float) -> Verdict:
    rate = f"{growth.rate / 2**20:.1f} MiB/s"
    limit = f"the limit of its cgroup ({growth.file})" if growth.file else "the end of the host's memory"
    short = "its cgroup's limit" if growth.file else "the host's memory"
    left, grown = size_text(growth.left), size_text(growth.grown)
    return Verdict(
        stage=stage.stage,
        rank=stage.shown_rank,
        cause="leak",
        summary=f"{stage.name} leaks memory: +{rate}, {short} is used up in {duration(until_s)}",
        since_s=growth.for_ms / 1e3,
        evidence=[
            f"memory beside KV cache and swap space grows evenly: +{grown} in {seconds(growth.over_s)}",
            f"{left} are left until {limit}: {duration(until_s)} at {rate}",
            f"it has grown for {seconds(growth.for_ms / 1e3)}, to more than it ever had",
        ],
        suggest=f"ppconsole restart-stage {stage.stage} (frees it; in-flight requests are recomputed)",
    )
