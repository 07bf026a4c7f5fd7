"""The key line: `?` stays at every width, and labels read as what the keys do."""

from __future__ import annotations

import pytest
from ppconsole.screens.detail_screens import EventsScreen, StacksScreen, StageScreen
from ppconsole.view import help_page, keys
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


def test_the_past_says_how_to_leave_it_at_80_columns() -> None:
    """An operator who came there by `h` must find the way back at once."""
    foot = text_of(keys.footer(keys.PAST_KEYS, 80, role="admin", note="the past"))
    assert foot.startswith("esc leave spc pause ←→ 10 s")
    shown = [text_of(line) for line in help_page.page("main", (), 80, past=True).rows]
    assert shown[0].startswith(" IN THE PAST") and any("back to the present" in line for line in shown[:8])
    assert not any("abort it" in line for line in shown), "no verb is possible"
    assert any("abort it" in text_of(line) for line in help_page.page("main", (), 80).rows)


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
