"""The look of a state: letter, word and style. A letter always goes with a colour."""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

from ppengine.protocol.place import Place
from ppengine.protocol.snapshot import Snapshot, Verdict
from ppengine.protocol.stage_info import StageInfo

from ppconsole.model.facts import SUFFERERS
from ppconsole.model.ranks import place_of


class Mark(NamedTuple):
    """Letter or short word, and style name."""

    text: str
    style: str


STAGE: dict[str, Mark] = {
    "loading": Mark("L", "info"),
    "idle": Mark("I", "dim"),
    "receiving": Mark("R", "info"),
    "gathering": Mark("G", "info"),
    "computing": Mark("C", "ok"),
    "sending": Mark("T", "info"),
    "swapping": Mark("W", "swap"),
    "resizing": Mark("Z", "swap"),
    "blocked": Mark("B", "warn"),
    "starved": Mark("S", "warn"),
    "stopped": Mark("H", "bad"),
    "dead": Mark("D", "bad"),
}
FAULT = Mark("X", "bad")
CORDONED = "#"
"""The mark beside the letter of a cordoned stage."""
STAGE_WORDS = {mark.text: state for state, mark in STAGE.items()} | {FAULT.text: "faulty"}
"""States of a stage by letter, in the words of `status --json`."""

REQUEST: dict[str, Mark] = {
    "waiting": Mark("wait", "warn"),
    "running": Mark("run", "ok"),
    "swapped": Mark("swap", "swap"),
    "held": Mark("held", "info"),
    "loading": Mark("load", "info"),
    "finding": Mark("find", "info"),
    "fetching": Mark("fetch", "info"),
    "finished": Mark("done", "dim"),
}

ENGINE = {
    "loading": "chip.info", "serving": "chip.ok", "paused": "chip.warn", "draining": "chip.warn",
    "resizing": "chip.info", "degraded": "chip.bad", "stopped": "chip.bad",
}  # fmt: skip

LINK = {
    "live": "ok",
    "connecting": "info",
    "stale": "warn",
    "lost": "bad",
    "new-epoch": "warn",
    "ended": "bad",
    "REPLAY": "chip.info",
    "REPLAY end": "chip.info",
}


def request_mark(state: str) -> Mark:
    """Return the mark of a request state; one from a newer engine shows its first letters."""
    return REQUEST.get(state) or Mark(state[:4], "info")


def _faults(snapshot: Snapshot) -> list[Verdict]:
    """Return the verdicts that are the root of a fault at a stage."""
    return [
        verdict
        for verdict in snapshot.verdicts
        if verdict.root and verdict.stage is not None and verdict.cause not in SUFFERERS
    ]


def faulty_stages(snapshot: Snapshot) -> set[int]:
    """Return the stages that a root verdict names."""
    return {verdict.stage for verdict in _faults(snapshot) if verdict.stage is not None}


def faulty_places(snapshot: Snapshot) -> set[Place]:
    """Return the ranks that a root verdict names: all of the stage if it names none, or one that is not known."""
    found: set[Place] = set()
    for verdict in _faults(snapshot):
        ranks = {stage.tensor_rank for stage in snapshot.stages if stage.index == verdict.stage}
        meant = ranks if verdict.rank is None or verdict.rank not in ranks else {verdict.rank}
        found |= {Place(verdict.stage or 0, rank) for rank in meant}
    return found


def stage_mark(stage: StageInfo, faulty: Set[Place]) -> Mark:
    """Return the mark of a rank of a stage."""
    return state_mark(stage.state, place_of(stage) in faulty)


def state_mark(state: str, is_faulty: bool) -> Mark:
    """Return the mark of a state. A faulty stage shows X, unless its own state shows the fault."""
    if is_faulty and state not in ("dead", "stopped"):
        return FAULT
    return STAGE.get(state) or Mark(state[:1].upper(), "info")


def state_word(state: str, mark: Mark) -> str:
    """Return the word for the state of a stage with this mark."""
    return STAGE_WORDS[mark.text] if mark == FAULT else state
