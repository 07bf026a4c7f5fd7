"""Conclusions from the state: its age, whether verbs are possible, the roots of faults."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ppengine.protocol.snapshot import OUTSIDE_STEPS, Cause, Snapshot, Verdict
from ppengine.protocol.stage_info import StageInfo
from ppengine.protocol.verb_table import ROWS, covers

from ppconsole.model.ranks import of_snapshot, words
from ppconsole.model.safe import clean
from ppconsole.model.state import ConsoleState
from ppconsole.model.units import age_text

STALE_S = 2.0
REPLAY, REPLAY_END = "REPLAY", "REPLAY end"
"""States of a recording or an export. It is the past: it is never live and never stale."""


@dataclass(frozen=True, slots=True)
class Freshness:
    """`grey`: the figures are old. `text` for the status line: `live 0.1s`, `stale 3.2s`, `lost ...`."""

    state: str
    grey: bool
    age_s: float | None
    text: str


def freshness(state: ConsoleState, now: float) -> Freshness:
    """Return how old the picture is at `now`; a live link that is silent for 2 s counts as stale."""
    age = None if state.snapshot_at is None else max(0.0, now - state.snapshot_at)
    name: str = state.link.state
    if not state.live_source:
        past = name if name == "ended" else REPLAY_END if name == "recorded" else REPLAY
        return Freshness(past, False, None, past)
    if name == "live" and age is not None and age > STALE_S:
        name = "stale"
    if name == "ended":
        age = None  # its time is in the text
    text = f"{name} {age_text(age)}" if age is not None else name
    return Freshness(name, name != "live", age, text)


def why_no_verbs(state: ConsoleState, now: float) -> str:
    """Return why verbs are off, in a few words; empty when they are on."""
    if state.link.state == "ended":
        return "the engine has ended"
    if not state.live_source:
        return state.past
    if state.read_only:
        return "this console is read-only"
    fresh = freshness(state, now)
    return f"the link is {fresh.text}" if fresh.grey else ""


def may_submit(state: ConsoleState) -> bool:
    """Return whether this console may send prompts at all: no key, option, past or end forbids it."""
    return (
        state.live_source
        and state.link.state != "ended"
        and not state.read_only
        and covers(state.role, ROWS["submit"].role)
    )


SUFFERERS = ("starved", "blocked", "undetermined")
"""Causes that are never the root of a fault."""
_STUCK: tuple[Cause, ...] = ("stopped", "self_stuck", "gil_held", "deadlock", "stream_stuck", "core")
_ENDS: tuple[Cause, ...] = ("dead", "crashed", "killed_oom")
STOPPING = (*_STUCK, *_ENDS)
"""Causes with which no step goes on."""
FAULT_WORDS: dict[Cause, str] = {
    **dict.fromkeys(_STUCK, "stuck"), "straggler": "slow", "store": "store", "process": "process",
    "undetermined": "stuck?",
}  # fmt: skip
"""Words for a root verdict while the engine's own state says that it works; `fault` for the others."""


def root_verdict(snapshot: Snapshot) -> Verdict | None:
    """Return the verdict to show first: a root if there is any, else the oldest. Those outside of steps come last.

    One that stops all steps comes first: an older slow stage or full disk must not hide it.
    """
    roots = [verdict for verdict in snapshot.verdicts if verdict.root]
    steps = [verdict for verdict in roots if verdict.cause not in OUTSIDE_STEPS]
    stopping = [verdict for verdict in steps if _stops(verdict, snapshot)]
    causes = [verdict for verdict in steps if verdict.cause not in SUFFERERS]
    return max(stopping or causes or steps or roots or snapshot.verdicts, key=lambda each: each.since_s, default=None)


def _stops(verdict: Verdict, snapshot: Snapshot) -> bool:
    return verdict.cause in STOPPING and not serves_again(verdict, snapshot)


def fault_word(snapshot: Snapshot) -> str:
    """Return the effect of a fault in a word; empty without one, and where the engine's state says it already.

    A core that waits for a stuck stage says `serving`. While steps go on, a state of an operator's verb comes first,
    as `paused` and `draining`: it is the reason why requests wait.
    """
    verdict = root_verdict(snapshot)
    if verdict is None or not verdict.root or snapshot.engine.state in ("degraded", "stopped", "loading"):
        return ""
    if snapshot.engine.state != "serving" and verdict.cause not in (*STOPPING, *SUFFERERS):
        return ""
    return FAULT_WORDS.get(verdict.cause, "fault")


def root_verdicts(snapshot: Snapshot) -> list[Verdict]:
    """Return the verdicts that are causes and not consequences, in the order of `root_verdict`."""
    roots = (verdict for verdict in snapshot.verdicts if verdict.root)
    return sorted(roots, key=lambda each: (each.cause in OUTSIDE_STEPS, not _stops(each, snapshot), -each.since_s))


def cordon_text(stage: StageInfo) -> str:
    """Return `stage 1 is cordoned by eve 3m (reason)`; empty where it is not, and for all but its first rank."""
    cordon = stage.cordon
    if cordon is None or stage.tensor_rank:
        return ""
    reason = f" ({clean(cordon.reason)})" if cordon.reason else ""
    return f"stage {stage.index} is cordoned by {clean(cordon.by)} {age_text(cordon.since_s)}{reason}"


_UNSEEN_MS = 2000.0
"""From here on the diagnosis does not judge by a sample either."""


def unseen_stages(snapshot: Snapshot) -> str:
    """Return the stages without a sample for too long, `stages 0, 1 for 12s`; empty: none, or the reason is known."""
    unseen = [
        stage
        for stage in snapshot.stages
        if (stage.sample_age_ms or 0.0) > _UNSEEN_MS and stage.state not in ("dead", "loading")
    ]
    if not unseen:
        return ""
    names = ", ".join(of_snapshot(snapshot, stage) for stage in unseen)
    oldest = max(stage.sample_age_ms or 0.0 for stage in unseen)
    return f"stage{'s' * (len(unseen) > 1)} {names} for {age_text(oldest / 1e3)}"


def place(verdict: Verdict) -> str:
    """Return where a fault is: `STAGE 2 RANK 1`, `CORE`, `TIERS`, `HTTP0`; `ENGINE` if it has no known place."""
    if verdict.stage is not None:
        return words(verdict.stage, verdict.rank).upper()
    if verdict.cause == "process":
        return clean(verdict.subject).upper() or "PROCESS"
    return {"core": "CORE", "store": "TIERS"}.get(verdict.cause, "ENGINE")


def headline(verdict: Verdict, *, over: bool = False) -> str:
    """Return place and cause: `STAGE 2 stopped`, or `CORE` or `HTTP0` alone.

    `over`: `STAGE 2 was stopped`.
    """
    if verdict.cause in ("core", "process"):
        return f"{place(verdict)} was the cause" if over else place(verdict)
    return f"{place(verdict)} was {verdict.cause}" if over else f"{place(verdict)} {verdict.cause}"


def verdict_text(verdict: Verdict, *, over: bool = False) -> str:
    """Return one verdict as a line: `STAGE 2 stopped 6.2s: summary`; `over`: `STAGE 2 was stopped: summary`.

    The age of a verdict counts on after the end of its fault, until it is reported no more.
    """
    age = "" if over else f" {age_text(verdict.since_s)}"
    return f"{headline(verdict, over=over)}{age}: {clean(verdict.summary)}"


def evidence_lines(verdict: Verdict) -> list[str]:
    """Return the evidence of a verdict, with a line for each further process, store or backend."""
    also = [f"also: {one.summary}{f' ({one.suggest})' if one.suggest else ''}" for one in verdict.further]
    return [*verdict.evidence, *also]


def brief_text(verdict: Verdict, snapshot: Snapshot) -> str:
    """Return a verdict as a line that does not name its stage twice: `STAGE 2 stopped 6.2s: by a signal (pid 7)`.

    A stage that has been restarted is reported for a moment longer: `STAGE 2 was dead 1.6s ago, serves again: ...`.
    """
    name = "" if verdict.stage is None else words(verdict.stage, verdict.rank)
    summary = clean(verdict.summary)
    rest = (
        re.sub(rf"^{re.escape(name)}(?: is| was|:) (?:{re.escape(verdict.cause)} )?", "", summary) if name else summary
    )
    age = age_text(verdict.since_s)
    if serves_again(verdict, snapshot):
        return f"{headline(verdict, over=True)} {age} ago, serves again: {rest}"
    return f"{headline(verdict)} {age}: {rest}"


def serves_again(verdict: Verdict, snapshot: Snapshot) -> bool:
    """Return whether the dead stage of a verdict runs again, and the engine with it."""
    ranks = [
        stage for stage in snapshot.stages
        if stage.index == verdict.stage and verdict.rank in (None, stage.tensor_rank)
    ]  # fmt: skip
    back = bool(ranks) and all(stage.state not in ("dead", "loading", "stopped") for stage in ranks)
    return verdict.cause in _ENDS and back and snapshot.engine.state == "serving"
