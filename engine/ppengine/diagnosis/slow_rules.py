"""Work that is slow and not blocked: a declared phase over its budget, a link or a stage slower than before.

The ratios from which they count as slow are in `common/link_pace.py` and `agent/pace.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ppengine.diagnosis.budgets import (
    HELD_BACK,
    LINK_AFTER_S,
    LINK_WAITS_S,
    PHASE_BUDGET_S,
    SLOW_AFTER_S,
    STRAGGLER_AFTER_S,
    is_lost,
    is_unseen,
)
from ppengine.diagnosis.case import Case, thread_lines
from ppengine.diagnosis.evidence import StageEvidence
from ppengine.diagnosis.neighbours import neighbour_lines
from ppengine.diagnosis.phrases import percent, rate_text, seconds
from ppengine.diagnosis.rank_rules import rank_lines
from ppengine.protocol.operation_kinds import RANK_WAIT_WORDS
from ppengine.protocol.snapshot import Verdict
from ppengine.protocol.stage_samples import LinkPace

_MEETS = "collective"
"""Phase of a loaded stage that waits for its neighbours."""
_SERVES = frozenset({"receive", "token_return", "forward", "send"}) | RANK_WAIT_WORDS
"""Operations of a stage that serves: beside a phase of loading, the phase is the older half of a torn sample."""
_FRESH_MS = 4000.0
_ALL_SLOW = 1.2
"""If every stage is this much slower than before, the host is slow, and a stage only if it exceeds the others."""
_STANDS_OUT = 2.0
"""By so much more than another. A stage that gets fewer steps, because another is slow, is slower with each of them."""
_LOOK = "tc qdisc show; ss -tinp"


class _SlowLink(NamedTuple):
    """One link on which messages take longer than they did."""

    sender: StageEvidence
    peer: int
    pace: LinkPace

    @property
    def ends(self) -> tuple[int, int]:
        """Both stages: links of their ranks are one link."""
        return self.sender.stage, self.peer

    def name(self, nodes: Mapping[int, str]) -> str:
        """Return both stages, with their nodes if these differ."""
        ends = self.sender.node, nodes.get(self.peer, "")
        between = f" ({ends[0]} -> {ends[1]})" if all(ends) and ends[0] != ends[1] else ""
        return f"{self.sender.name} -> {self.sender.name_of(self.peer)}{between}"

    def text(self, nodes: Mapping[int, str]) -> str:
        """Return the link with the time that it costs and its rates."""
        rates = f"{rate_text(self.pace.rate)}, {rate_text(self.pace.usual_rate)} before"
        return f"link {self.name(nodes)}: its receiver waits {percent(self.pace.lost)} of the time; {rates}"


def slow_phases(case: Case) -> list[Verdict]:
    """Return the stages whose phase lasts longer than it may, but for those that wait for one known to be late."""
    stages = case.evidence.stages
    # One without a phase is being started, and whoever waits for one that is gone or stopped has a reason.
    expected = case.guilty or any(
        stage.phase is None or (stage.phase in PHASE_BUDGET_S and stage.op != _MEETS) for stage in stages
    )
    # A meeting begins when its last member arrives.
    whole_s = min((stage.phase_age_s or 0.0 for stage in stages), default=0.0)
    return [
        _slow_phase(stage)
        for stage in stages
        if _over_budget(stage) and not (stage.op == _MEETS and (expected or whole_s < PHASE_BUDGET_S["meet"]))
    ]


def slow_links(case: Case) -> list[Verdict]:
    """Return the links on which messages take longer than they did, each at its sender, unless a fault explains it.

    A busy host or network delays messages everywhere, and answers that come back late slow a healthy link down. So only
    a link that loses clearly more time than the others is named. Links that lose alike are one verdict.
    """
    if case.guilty or case.evidence.slowed:
        return []
    slow = [
        _SlowLink(stage, edge.peer, edge.pace)
        for stage in case.evidence.stages
        for edge in stage.edges
        if edge.pace is not None
    ]
    ripe = [link for link in slow if link.pace.slow_ms >= LINK_AFTER_S * 1e3 and not is_unseen(link.sender)]
    if not ripe:
        return []
    worst = max(ripe, key=lambda link: link.pace.lost)
    patient = all(link.pace.slow_ms < LINK_WAITS_S * 1e3 for link in ripe)
    if patient and any(link.pace.lost > worst.pace.lost for link in slow):
        return []  # The other one is slow for less long, or its sender has not been seen for a moment.
    alike = [link for link in ripe if link.pace.lost * _STANDS_OUT > worst.pace.lost]
    nodes = {stage.stage: stage.node for stage in case.evidence.stages}
    if len({link.ends for link in alike}) > 1:
        return [_links_alike(alike, nodes)]
    less = [f"also slow: {link.text(nodes)}" for link in slow if link not in alike]
    return [_slow_link(link, nodes, less) for link in alike]


def stragglers(case: Case) -> list[Verdict]:
    """Return the stages that are slower than their own past, unless something else explains it or all are alike."""
    if case.guilty or case.evidence.slowed:
        return []
    ratios = [ratio for stage in case.evidence.stages if (ratio := _ratio(stage)) is not None]
    return [_straggler(case, stage) for stage in case.evidence.stages if _is_slow(stage, ratios)]


def _over_budget(stage: StageEvidence) -> bool:
    # The core sends steps to stages that serve: a phase of loading is then that of an old sample.
    serves = stage.op in _SERVES or (is_unseen(stage) and stage.unretired_age_s is not None)
    budget = None if serves else PHASE_BUDGET_S.get(stage.phase or "")
    return budget is not None and (stage.phase_age_s or 0.0) > budget and not is_lost(stage)


def _slow_phase(stage: StageEvidence) -> Verdict:
    budget, age = PHASE_BUDGET_S[stage.phase or ""], stage.phase_age_s or 0.0
    return Verdict(
        stage=stage.stage,
        rank=stage.shown_rank,
        cause="undetermined",
        summary=f"{stage.name} is in phase {stage.phase} for {seconds(age)}; its budget is {seconds(budget)}",
        since_s=age - budget,
        evidence=[*thread_lines(stage), "missing: why it takes so long"],
        suggest=f"ppconsole stacks --stage {stage.stage}",
    )


def _slow_link(link: _SlowLink, nodes: Mapping[int, str], less: list[str]) -> Verdict:
    """Return the verdict on one link. `less`: lines on links that lose less."""
    sender, pace = link.sender, link.pace
    k, now, before = sender.stage, rate_text(pace.rate), rate_text(pace.usual_rate)
    name, other = sender.name, sender.name_of(link.peer)
    return Verdict(
        stage=k,
        rank=sender.shown_rank,
        cause="link",
        summary=f"link {link.name(nodes)} is slow: {now}, {before} before",
        since_s=pace.slow_ms / 1e3,
        evidence=[
            f"{other} waits {percent(pace.lost)} of the time for messages that {name} has sent",
            f"a message under way moves at {now}; messages of these sizes moved at {before} here before",
            "both processes live, and the receiver has posted what it waits for",
            *less,
        ],
        suggest=f"ppconsole restart-stage {k} (connects again; if it stays slow: {_LOOK})",
    )


def _links_alike(links: list[_SlowLink], nodes: Mapping[int, str]) -> Verdict:
    """Return the verdict on several links of which none is clearly slower than the others."""
    return Verdict(
        stage=None,
        cause="link",
        summary=f"{len(links)} links between stages are slow alike; none is clearly slower",
        since_s=max(link.pace.slow_ms for link in links) / 1e3,
        evidence=[
            *(link.text(nodes) for link in links),
            "missing: the one at fault; a busy host or network delays messages on all of them",
        ],
        suggest=f"look at the network between all stages: {_LOOK}",
    )


def _ratio(stage: StageEvidence) -> float | None:
    pace = stage.pace
    if pace is None or pace.age_ms > _FRESH_MS or is_lost(stage) or is_unseen(stage) or pace.baseline_ms <= 0:
        return None
    return pace.step_ms / pace.baseline_ms


def _is_slow(stage: StageEvidence, ratios: list[float]) -> bool:
    """Return whether a stage is a straggler. `ratios`: of all stages that are known, time to usual time."""
    pace, ratio = stage.pace, _ratio(stage)
    if pace is None or ratio is None:
        return False
    if pace.slow_ms < (SLOW_AFTER_S if ratio >= _STANDS_OUT else STRAGGLER_AFTER_S) * 1e3:
        return False
    if (pace.throttled or 0.0) > HELD_BACK:
        return True
    if max(ratios) >= _STANDS_OUT * ratio:
        return False
    if stage.neighbours:
        return True  # Stages that share a card are slowed alike by what else runs there.
    least = min(ratios)
    return len(ratios) == 1 or least < _ALL_SLOW or ratio >= _STANDS_OUT * least


def _straggler(case: Case, stage: StageEvidence) -> Verdict:
    pace, ratio = stage.pace, _ratio(stage)
    assert pace is not None and ratio is not None  # `_is_slow` has looked
    evidence = [
        f"own time of a step {pace.step_ms:.1f} ms; like steps took {pace.baseline_ms:.1f} ms here before",
    ]
    if pace.throttled is None:
        evidence.append("cpu quota of its cgroup: none, or not readable")
    else:
        evidence.append(f"held back by its cgroup's cpu quota {percent(pace.throttled)} of the time")
    why, suggest = _reason(stage)
    return Verdict(
        stage=stage.stage,
        rank=stage.shown_rank,
        cause="straggler",
        summary=f"{stage.name} is {ratio:.1f}x slower than it was" + (f": {why}" if why else ""),
        since_s=pace.slow_ms / 1e3,
        evidence=[*evidence, *rank_lines(case, stage), *neighbour_lines(stage), *thread_lines(stage)],
        suggest=suggest or f"ppconsole stacks --stage {stage.stage}",
    )


def _reason(stage: StageEvidence) -> tuple[str, str]:
    """Return why a straggler is slow, and the suggestion for it; both empty if nothing known explains it."""
    if stage.pace is not None and (stage.pace.throttled or 0.0) > HELD_BACK:
        return "its cgroup's cpu quota holds it back", "raise cpu.max of its cgroup"
    if stage.neighbours:
        most = stage.neighbours[0]
        return (
            f"{most.text} uses {percent(most.sm or 0.0)} of its card",
            f"move pid {most.pid} to another card",
        )
    return "", ""
