"""Safe text and units."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from ppconsole.model.safe import clean
from ppconsole.model.units import age_text, bytes_text, count_text, ms_text, percent_text, ratio
from ppconsole.view.figures import millis

HOSTILE = st.lists(
    st.one_of(
        st.text(),
        st.sampled_from(
            ["\x1b[31m", "\x1b]0;title\x07", "\x1b]52;c;aGk=\x1b\\", "\x9b2J", "\u202e", "\u2066", "\r", "\x07", "\x1b"]
        ),
        st.characters(categories=["Cc", "Cf", "Cs", "Zl", "Zp"]),
    )
).map("".join)


@given(HOSTILE, st.booleans())
def test_nothing_that_moves_a_cursor_is_left(text: str, newlines: bool) -> None:
    result = clean(text, newlines=newlines)
    allowed = "\n\t\u200c\u200d" if newlines else "\u200c\u200d"
    for character in result:
        assert character in allowed or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
    assert clean(result, newlines=newlines) == result
    result.encode()


@given(st.text(st.characters(categories=["L", "N", "P", "S"])))
def test_printable_text_is_untouched(text: str) -> None:
    assert clean(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\x1b[31mred\x1b[0m", "ared"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("a\r\nb\tc", "a b c"),
        ("abc\u202edcba", "abcdcba"),
        ("[bold]not markup[/]", "[bold]not markup[/]"),
        ("naïve 森 👩\u200d🚀", "naïve 森 👩\u200d🚀"),
        ("\ud800x", "x"),
    ],
)
def test_examples(text: str, expected: str) -> None:
    assert clean(text) == expected


def test_newlines_may_stay() -> None:
    assert clean("a\r\nb\rc\n\x1bd", newlines=True) == "a\nb\nc\n"


@given(st.one_of(st.floats(0, 1e15), st.floats(0, 2000)))
@example(997.0)
def test_widths_hold(value: float) -> None:
    assert len(bytes_text(value)) <= 5
    assert len(count_text(value)) <= 5
    assert len(age_text(value)) <= 4
    assert len(ms_text(min(value, 1e12))) <= 5
    assert len(millis(value)) <= 4


def test_unknown_is_not_zero() -> None:
    assert {bytes_text(None), count_text(None), age_text(None), ms_text(None), percent_text(None)} == {"?"}
    assert ratio(None, 4) is None
    assert ratio(1, 0) is None


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (bytes_text(512), "512B"),
        (bytes_text(57 * 2**20), "57.0M"),
        (bytes_text(1000), "1.0K"),
        (bytes_text(1536 * 2**20), "1.5G"),
        (bytes_text(120 * 2**30), "120G"),
        (count_text(1024), "1024"),
        (count_text(18412), "18.4k"),
        (age_text(0.12), "0.1s"),
        (age_text(41), "41s"),
        (age_text(9.96), "10s"),
        (age_text(59.9), "59s"),
        (age_text(102), "1m42"),
        (age_text(149.9), "2m29"),
        (age_text(180), "3m00"),
        (age_text(599.9), "9m59"),
        (age_text(17 * 60 + 33), "17m"),
        (age_text(99 * 60 + 59), "99m"),
        (age_text(100 * 60), "1h"),
        (age_text(3.9 * 3600), "3h"),
        (age_text(100 * 3600 - 1), "99h"),
        (age_text(100 * 3600), "4d"),
        (ms_text(21.6), "22ms"),
        (ms_text(6200), "6.2s"),
        (percent_text(0.577), "58%"),
    ],
)
def test_units(got: str, expected: str) -> None:
    assert got == expected
