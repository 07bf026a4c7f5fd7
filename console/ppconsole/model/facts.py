"""Conclusions from the state: how old it is, whether verbs are possible, what the banner says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ppengine.protocol.snapshot import Snapshot, Verdict

from ppconsole.model.safe import clean
from ppconsole.model.state import ConsoleState
from ppconsole.model.units import age_text

STALE_S = 2.0


@dataclass(frozen=True, slots=True)
class Freshness:
    """`grey`: what is shown is not the present. `text` for the status line: `live 0.1s`, `stale 3.2s`, `lost ...`."""

    state: str
    grey: bool
    age_s: float | None
    text: str


@dataclass(frozen=True, slots=True)
class Banner:
    """One line over everything; `level` decides the colour, and the text says it without colour too."""

    level: Literal["fault", "warning", "info"]
    text: str


def freshness(state: ConsoleState, now: float) -> Freshness:
    """Return how old the picture is at `now`; a live link that is silent for 2 s counts as stale."""
    age = None if state.snapshot_at is None else max(0.0, now - state.snapshot_at)
    name = state.link.state
    if name == "live" and age is not None and age > STALE_S:
        name = "stale"
    text = f"{name} {age_text(age)}" if age is not None else name
    return Freshness(name, name != "live", age, text)


def verbs_enabled(state: ConsoleState, now: float) -> bool:
    """Whether a verb may be offered: a live link to an engine, and not read-only."""
    return state.live_source and not state.read_only and not freshness(state, now).grey


def why_no_verbs(state: ConsoleState, now: float) -> str:
    """Return why verbs are off, in a few words; empty when they are on."""
    if not state.live_source:
        return "this is a recording"
    if state.read_only:
        return "this console is read-only"
    fresh = freshness(state, now)
    return f"the link is {fresh.text}" if fresh.grey else ""


def root_verdicts(snapshot: Snapshot) -> list[Verdict]:
    """Return the verdicts that are causes and not consequences, longest first."""
    return sorted((verdict for verdict in snapshot.verdicts if verdict.root), key=lambda verdict: -verdict.since_s)


def verdict_text(verdict: Verdict) -> str:
    """Return one verdict as a line: `STAGE 2 stopped 6.2s: summary`."""
    where = "DRIVER" if verdict.stage is None else f"STAGE {verdict.stage}"
    return f"{where} {verdict.cause} {age_text(verdict.since_s)}: {clean(verdict.summary)}"


def banner(state: ConsoleState, now: float) -> Banner | None:
    """Return what must be seen first: a lost link, then a fault, then an engine that does not serve; else None."""
    fresh = freshness(state, now)
    if fresh.state in ("lost", "stale", "new-epoch", "connecting"):
        retry = f"; trying again in {state.link.retry_in_s:.1f} s" if state.link.retry_in_s is not None else ""
        text = f"{fresh.text.replace('lost', 'LOST', 1)} {clean(state.link.text)}{retry}".strip()
        return Banner("warning" if fresh.state in ("lost", "stale") else "info", text)
    if state.snapshot is None:
        return None
    roots = root_verdicts(state.snapshot)
    if roots:
        more = f" (+{len(roots) - 1} more)" if len(roots) > 1 else ""
        return Banner("fault", f"!{verdict_text(roots[0])}{more}")
    engine = state.snapshot.engine
    if engine.state != "serving":
        message = f": {clean(engine.message)}" if engine.message else ""
        return Banner("info", f"{engine.state}{message}")
    return None
