"""What the live checks of the stages found, as verdicts: streams, buffers, numbers that are not finite."""

from __future__ import annotations

from collections.abc import Sequence

from ppengine.diagnosis.case import Case
from ppengine.protocol.reports import Finding
from ppengine.protocol.snapshot import Verdict

_ORDER = ("stream_owner", "stream_order", "stream_stuck", "non_finite", "mismatch")
"""Which of several of one stage is told: who used the wrong stream also broke the order, and so on down."""
FRESH_S = 10.0
"""What else goes wrong so soon after a finding is its consequence."""
_SUGGEST = {
    "stream_owner": "give each thread a stream of its own; compare `evidence` for both call sites",
    "stream_order": "let the consumer wait for the producer's event; strict order tells whether that is all",
    "stream_stuck": "ppconsole stacks{stage}",
    "non_finite": "{restart}ppconsole logs{stage}",
    "mismatch": "compare the tokens named in the evidence with the reference's",
}


def found(case: Case) -> list[Verdict]:
    """Return the findings that explain what goes wrong now: those of a moment ago, and of a stream that stands."""
    return [verdict for verdict in _all(case) if _explains(verdict)]


def remembered(case: Case) -> list[Verdict]:
    """Return the findings of a while ago: they stand until their check is off, and what a stage is in now is first."""
    return [verdict for verdict in _all(case) if not _explains(verdict)]


def _explains(verdict: Verdict) -> bool:
    return verdict.since_s <= FRESH_S or verdict.cause == "stream_stuck"


def _all(case: Case) -> list[Verdict]:
    """Return one verdict a stage."""
    stages = {finding.stage for finding in case.evidence.findings}
    return [
        verdict_of([finding for finding in case.evidence.findings if finding.stage == stage])
        for stage in sorted(stages, key=lambda k: -1 if k is None else k)
    ]


def verdict_of(findings: Sequence[Finding]) -> Verdict:
    """Return what the findings of one stage tell: the one that explains the others, and those behind it."""
    first, *others = sorted(findings, key=lambda finding: (_ORDER.index(finding.cause), -finding.since_s))
    stage, where, anew = first.stage, "", ""
    if stage is not None:
        where = f" --stage {stage}"
        anew = f"ppconsole restart-stage {stage} (weights anew, and nothing stays cached that was computed); "
    return Verdict(
        stage=stage,
        cause=first.cause,
        summary=first.summary,
        since_s=first.since_s,
        evidence=[*first.evidence, *(f"also {other.cause}: {other.summary}" for other in others)]
        or ["told by the live check"],
        suggest=_SUGGEST[first.cause].format(stage=where, restart=anew),
    )
