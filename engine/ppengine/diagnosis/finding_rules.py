"""Findings of the live checks as verdicts: streams, buffers, numbers that are not finite."""

from __future__ import annotations

from collections.abc import Sequence

from ppengine.diagnosis.case import Case
from ppengine.protocol.reports import Finding
from ppengine.protocol.snapshot import Verdict

_ORDER = ("stream_owner", "stream_order", "stream_stuck", "corrupted", "non_finite", "mismatch")
"""Order in which one finding of a stage explains the others: a wrong stream also breaks the order, and so on down."""
FRESH_S = 10.0
"""A fault this soon after a finding is its consequence."""
_SUGGEST = {
    "stream_owner": "give each thread a stream of its own; compare `evidence` for both call sites",
    "stream_order": "let the consumer wait for the producer's event; check strict shows whether more is wrong",
    "stream_stuck": "ppconsole stacks{stage}",
    "corrupted": "{restart}ppconsole check ledger on",
    "non_finite": "{restart}ppconsole logs{stage}",
    "mismatch": "compare the tokens named in the evidence with the reference's",
}


def found(case: Case) -> list[Verdict]:
    """Return the findings that explain a fault of this moment: the recent ones, and those of a blocked stream."""
    return [verdict for verdict in _all(case) if _explains(verdict)]


def remembered(case: Case) -> list[Verdict]:
    """Return the findings of a while ago: they stand until their check is off, and what a stage is in now is first."""
    return [verdict for verdict in _all(case) if not _explains(verdict)]


def _explains(verdict: Verdict) -> bool:
    return verdict.since_s <= FRESH_S or verdict.cause == "stream_stuck"


def _all(case: Case) -> list[Verdict]:
    """Return one verdict a place."""
    places = {(finding.stage, finding.rank) for finding in case.evidence.findings}
    return [
        verdict_of([finding for finding in case.evidence.findings if (finding.stage, finding.rank) == place])
        for place in sorted(places, key=lambda place: tuple(-1 if number is None else number for number in place))
    ]


def verdict_of(findings: Sequence[Finding]) -> Verdict:
    """Return the verdict on the findings of one stage: the one that explains the others, then the others."""
    first, *others = sorted(findings, key=lambda finding: (_ORDER.index(finding.cause), -finding.since_s))
    stage, where, restart = first.stage, "", ""
    if stage is not None:
        where = f" --stage {stage}"
        restart = f"ppconsole restart-stage {stage} (reloads weights and drops all cached blocks); "
    return Verdict(
        stage=stage,
        rank=first.rank,
        cause=first.cause,
        summary=first.summary,
        since_s=first.since_s,
        evidence=[*first.evidence, *(f"also {other.cause}: {other.summary}" for other in others)]
        or ["reported by the live check"],
        suggest=_SUGGEST[first.cause].format(stage=where, restart=restart),
    )
