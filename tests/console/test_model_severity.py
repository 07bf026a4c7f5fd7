"""The level of events, and how the screens and `ppconsole events` show it."""

from __future__ import annotations

from typing import get_args

import pytest
from ppconsole.cli.render import event_line
from ppconsole.view.cells import text_of
from ppconsole.view.events import event_row, mark_of
from ppengine.protocol.severity import level_of
from ppengine.protocol.snapshot import Cause, Event


def event(kind: str, text: str = "text") -> Event:
    return Event(seq=1, wall=0.0, kind=kind, text=text)


@pytest.mark.parametrize(
    ("kind", "text", "level"),
    [
        ("stage.dead", "stage 1 (pid 9) is dead: killed by SIGKILL", "error"),
        ("stage.lost", "stage 1: killed by SIGKILL", "error"),
        ("verdict.raised", "dead: stage 1 was killed by SIGKILL", "error"),
        ("verdict.raised", "starved: stage 0 is starved by stage 1", "warning"),
        ("verdict.cleared", "dead after 3.3s: stage 1 was killed", "info"),
        ("stage.restart", "stage 1 restarted, generation 2", "warning"),
        ("stage.stopped", "stage 1 is stopped", "warning"),
        ("op.refused", "BUSY", "warning"),
        ("op.failed", "no", "error"),
        ("audit.failed", "disk full", "error"),
        ("agent.ended", "the agent has ended", "warning"),
        ("check.stream_order", "an access", "error"),
        ("op.applied", "pause: dead", "info"),
        ("stage.ready", "stage 1 is ready", "info"),
        ("console.attached", "attached", "info"),
    ],
)
def test_the_level_of_an_event(kind: str, text: str, level: str) -> None:
    assert level_of(event(kind, text)) == level
    letter = {"error": "E", "warning": "W", "info": "●"}[level]
    assert f" {letter} " in text_of(event_row(event(kind, text), 80))
    assert f" {letter} #1" in text_of(event_row(event(kind, text), 80, full=True))
    assert f"1 {level.upper():<7} {kind}" in event_line(event(kind, text))
    assert mark_of(event(kind, text)).style in {"E": ("bad",), "W": ("warn",), "●": ("ok", "info")}[letter]


@pytest.mark.parametrize("cause", get_args(Cause))
def test_a_verdict_is_no_information(cause: str) -> None:
    assert level_of(event("verdict.raised", f"{cause}: summary")) != "info"
