"""Recent deaths: a stage that died counts as dead until its successor serves.

The supervisor starts a successor within a moment, and new reports are of the successor. Without this memory the
verdict would go before an operator has read it. A process that was replaced on purpose is no fault. A stage that
reports that it cannot go on counts as dead too, for it is replaced as soon.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from ppengine.diagnosis.evidence import Key, StageEvidence
from ppengine.diagnosis.finding_rules import FRESH_S
from ppengine.diagnosis.tracker import newest_process
from ppengine.protocol.reports import Finding, ProcessInfo, StageSample

_SHOWN_NS = 2_000_000_000
"""Least time for which an end is reported: a stage is back in less, and an operator must have time to read it."""
_REPORTED_S = 0.5
"""Error of the ages of findings, which are those of the newest report; the age of an end is exact."""


@dataclass(slots=True)
class _End:
    """Evidence of a process that is dead or cannot go on, its time, and the count of OOM kills before."""

    evidence: StageEvidence
    at_ns: float
    oom_base: int | None


@dataclass(slots=True)
class _Found:
    """Findings in process `pid`, which has ended."""

    pid: int | None
    findings: tuple[Finding, ...] = ()
    not_its_own: set[tuple[str, str]] = field(default_factory=set)
    """Findings of its predecessor, as long as the core reports them."""


class RecentDeaths:
    """Keeps the evidence of ends until a successor serves."""

    def __init__(self) -> None:
        self._ends: dict[Key, _End] = {}
        self._oom_base: dict[Key, tuple[int, int]] = {}
        self._findings: dict[Key, _Found] = {}
        self._seen: dict[Key, StageEvidence] = {}
        """Newest evidence of each stage, from any of its processes; with streams if it cannot go on."""
        self._told: dict[Key, int] = {}
        """The newest generation whose end was reported."""

    def keep(
        self,
        now_ns: int,
        stages: tuple[StageEvidence, ...],
        samples: Mapping[Key, StageSample],
        listed: list[ProcessInfo],
        findings: Iterable[Finding] = (),
    ) -> tuple[StageEvidence, ...]:
        """Return `stages` for the judgement at `now_ns`. `samples`: the newest of each, also of predecessors.

        `findings`: those of the live checks, which a restart of stages clears.
        """
        judged = []
        for stage in stages:
            one = self._one(now_ns, stage, samples.get((stage.stage, stage.rank)), listed)
            judged.append(self._with_findings(one, findings))
        return tuple(judged)

    def _one(
        self, now_ns: int, stage: StageEvidence, sample: StageSample | None, listed: list[ProcessInfo]
    ) -> StageEvidence:
        key = stage.stage, stage.rank
        process = newest_process(listed, "stage", key)
        if process is not None and process.replaced and process.pid == stage.pid:
            stage = StageEvidence(stage=stage.stage, rank=stage.rank, pid=stage.pid, generation=stage.generation)
        self._note_oom(key, stage, sample)
        stage = self._own(now_ns, key, stage)
        end = self._ends.get(key)
        if stage.dead_for_s is not None or stage.lost:
            return self._ended(now_ns, key, stage)
        if end is None:
            return stage
        followed = stage.pid != end.evidence.pid
        back = stage.phase == "serving" and (followed or bool(end.evidence.lost))
        if back and now_ns - end.at_ns >= _SHOWN_NS:
            del self._ends[key]
            if not followed:
                del self._told[key]  # The same process serves again, and may be lost again.
            return stage
        told = self._as_of(end, now_ns, sample)
        return msgspec.structs.replace(told, successor=stage.pid, successor_phase=stage.phase) if followed else told

    def _with_findings(self, stage: StageEvidence, findings: Iterable[Finding]) -> StageEvidence:
        """Return a stage that has ended with the findings shortly before, even if these are cleared by now."""
        key = stage.stage, stage.rank
        if key not in self._ends:
            self._findings.pop(key, None)
            return stage
        there = {_name(one): one for one in findings if one.stage == stage.stage}
        known = self._findings.setdefault(key, _Found(stage.pid))
        if known.pid != stage.pid:
            # The core tells of it until all stages have begun anew: a successor that dies before has not done it.
            known = self._findings[key] = _Found(
                stage.pid, not_its_own={*known.not_its_own, *map(_name, known.findings)}
            )
        known.not_its_own &= there.keys()
        past_s = max(stage.dead_for_s or 0.0, stage.lost_for_s or 0.0)
        mine = tuple(
            one
            for name, one in there.items()
            if name not in known.not_its_own and -_REPORTED_S <= one.since_s - past_s <= FRESH_S
        )
        known.findings = max(known.findings, mine, key=len)
        return msgspec.structs.replace(stage, findings=known.findings)

    def _ended(self, now_ns: int, key: Key, stage: StageEvidence) -> StageEvidence:
        """Note the end of a process and return its evidence, with that of samples before."""
        before, since_s = self._ends.get(key), stage.lost_for_s or 0.0
        if stage.dead_for_s is not None:
            since_s = stage.dead_for_s
            if stage.sample_age_s is None and before is not None and before.evidence.pid == stage.pid:
                # Its successor is sampled already: what was seen of it stays.
                stage = msgspec.structs.replace(
                    before.evidence,
                    dead_for_s=since_s, exit_code=stage.exit_code, exit_detail=stage.exit_detail,
                )  # fmt: skip
        pid, base = self._oom_base.get(key, (None, None))
        self._ends[key] = _End(stage, now_ns - since_s * 1e9, base if pid == stage.pid else None)
        self._told[key] = max(stage.generation, self._told.get(key, 0))
        return stage

    def _own(self, now_ns: int, key: Key, stage: StageEvidence) -> StageEvidence:
        """Return a stage with the last report of its own process; that of another process is an end, reported once.

        A fork may serve in its place before the first sample.
        """
        before = self._seen.get(key)
        if stage.lost and stage.lost_generation != stage.generation:
            if self._told.get(key, 0) < stage.lost_generation < stage.generation:
                gone = StageEvidence(
                    stage=stage.stage, rank=stage.rank, card=stage.card, generation=stage.lost_generation
                )
                if before is not None and before.generation == stage.lost_generation:
                    gone = before
                self._ended(now_ns, key, msgspec.structs.replace(gone, lost=stage.lost, lost_for_s=stage.lost_for_s))
            stage = msgspec.structs.replace(stage, lost="", lost_for_s=None)
        elif stage.lost and not stage.streams and before is not None and before.pid == stage.pid:
            stage = msgspec.structs.replace(stage, streams=before.streams)
        self._seen[key] = stage
        return stage

    def _note_oom(self, key: Key, stage: StageEvidence, sample: StageSample | None) -> None:
        """Note from where the kills of a process are counted."""
        known = self._oom_base.get(key)
        if stage.pid is None or stage.oom_kills is None or (known is not None and known[0] == stage.pid):
            return
        if sample is not None and sample.pid == stage.pid and sample.oom_kills is not None:
            self._oom_base[key] = stage.pid, sample.oom_kills - stage.oom_kills

    @staticmethod
    def _as_of(end: _End, now_ns: int, sample: StageSample | None) -> StageEvidence:
        """Return the evidence of an end at this moment: the count of a dead one's cgroup may come after it."""
        evidence, since_s = end.evidence, (now_ns - end.at_ns) / 1e9
        if evidence.dead_for_s is None:
            return msgspec.structs.replace(evidence, lost_for_s=since_s)
        kills, count = evidence.oom_kills, None
        if sample is not None:
            counts = dict([(sample.pid, sample.oom_kills), *([sample.before] if sample.before else [])])
            count = counts.get(evidence.pid or 0)
        if count is not None and end.oom_base is not None:
            kills = count - end.oom_base
        return msgspec.structs.replace(evidence, dead_for_s=since_s, oom_kills=kills)


def _name(finding: Finding) -> tuple[str, str]:
    return finding.cause, finding.summary
