"""Stop texts that may begin at the end of a growing text: as by a look at all of it, in a bounded time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ppengine.checkpoint.stop_text import StopPrefixes, may_begin

LETTERS = st.text("ab", min_size=1, max_size=7)


@settings(max_examples=500, deadline=None)
@given(stops=st.lists(LETTERS, min_size=1, max_size=4), pieces=st.lists(st.text("abc", max_size=6), max_size=12))
def test_pieces_give_the_same_as_the_whole_text(stops: list[str], pieces: list[str]) -> None:
    """The text may have a whole stop text: it is ignored before `min_tokens`."""
    growing, text = StopPrefixes(stops), ""
    for piece in pieces:
        text += piece
        assert growing.push(piece) == may_begin(text, stops)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("stop", ["a" + "c" * 255, "a" * 128 + "c" * 128, "a" * 100 + "c" + "a" * 155])
def test_a_text_of_one_letter_costs_little(stop: str) -> None:
    """A look at all of the text took 4 to 10 ms for each token, so this took a minute or two."""
    growing = StopPrefixes([f"{stop[:-1]}{number}" for number in range(64)])
    for _ in range(10_000):
        held = growing.push("a")
    assert held == len(stop) - len(stop.lstrip("a"))
