"""The key line: `?` stays at every width, and labels read as what the keys do."""

from __future__ import annotations

import pytest
from ppconsole.screens.detail_screens import EventsScreen, StacksScreen, StageScreen
from ppconsole.view import keys
from ppconsole.view.cells import text_of, width_of
from ppengine.protocol.verb_table import ROWS, Role

LINES = {
    "requests": keys.REQUEST_KEYS,
    "marks": keys.MARKED_KEYS,
    "stages": keys.stage_keys(1),
    "folded stages": keys.stage_keys(None),
    "diagnosis": keys.diagnosis_keys("", None),
    "a long suggestion": keys.diagnosis_keys("restart-stage 12 --reason 'a reason of many words'", 12),
    "streams": keys.STREAMS_KEYS,
    "request": keys.REQUEST_SCREEN_KEYS,
    "stage": keys.reader_keys(StageScreen.first_keys, 1),
    "stacks": keys.reader_keys(StacksScreen.first_keys, None),
    "events": EventsScreen.keys,
    "options": keys.READER_KEYS,
    "past": keys.PAST_KEYS,
    "incidents": keys.INCIDENT_KEYS,
}


@pytest.mark.parametrize("role", ["operator", "viewer", None])
@pytest.mark.parametrize("name", LINES)
def test_help_stays_in_the_key_line_at_every_width(name: str, role: Role | None) -> None:
    for width in range(60, 201):
        for note in ("", "leaving stops the demo", "n" * (width // 2)):
            text = text_of(keys.footer(LINES[name], width, role=role, note=note))
            assert "? help " in text and width_of(text) <= width, (width, note)


def test_help_is_the_last_to_go() -> None:
    assert text_of(keys.footer(LINES["requests"], 7, role="admin")) == "? help "
    assert text_of(keys.footer(LINES["requests"], 6, role="admin")) == ""


def test_a_label_has_a_word_of_its_verb() -> None:
    """`out` and `in` read as output and input."""
    for row in ROWS.values():
        if row.key is not None:
            assert row.key.label in (row.name.replace("-", " "), *row.name.split("-")) and row.key.label not in (
                "in",
                "out",
            )
