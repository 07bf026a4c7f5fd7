"""Text of tokens that come in pieces: that of transformers for the whole, cut at stop texts wherever pieces end."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ppengine.checkpoint.piece_text import PieceText
from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.common.config import profiles_dir
from transformers import AutoTokenizer

TINY = profiles_dir() / "models" / "tiny"
PROMPT = "Once upon a time"
TEXTS = [
    " the king said: go to the river.",
    " naïve café, “quote” and 漢字が並ぶ",
    "🙂🚀👩‍👩‍👧 and Zürich\n\tagain",
]


def made(tokenizer: Tokenizer, stops: list[str], min_tokens: int = 0) -> PieceText:
    return PieceText(tokenizer.stream(tokenizer.encode(PROMPT)), stops, min_tokens)


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return Tokenizer.load(Path(TINY))


@pytest.fixture(scope="module")
def theirs() -> Any:
    return AutoTokenizer.from_pretrained(TINY)


def pieces_of(tokens: list[int], cuts: list[int]) -> list[list[int]]:
    places = sorted({0, len(tokens), *(cut % (len(tokens) + 1) for cut in cuts)})
    return [tokens[begin:end] for begin, end in pairwise(places)]


@given(text=st.sampled_from(TEXTS), cuts=st.lists(st.integers(0, 200), max_size=12), lost=st.integers(0, 5))
def test_the_pieces_join_to_the_text_of_transformers(
    ours: Tokenizer, theirs: Any, text: str, cuts: list[int], lost: int
) -> None:
    """Most characters are split over tokens. The last one may lack some: it becomes U+FFFD at the end alone."""
    tokens = theirs.encode(text, add_special_tokens=False)
    tokens = tokens[: len(tokens) - lost]
    sample, shown = made(ours, []), ""
    pieces = pieces_of(tokens, cuts)
    for number, piece in enumerate(pieces, 1):
        more, spoken, kept, reason = sample.take(piece, "length" if number == len(pieces) else None)
        assert (spoken, kept, reason is not None) == (len(piece), len(piece), sample.over)
        shown += more
        assert sample.over or "\ufffd" not in more, "half a character is no text yet"
    assert sample.given == len(shown)
    assert shown == theirs.decode(tokens, skip_special_tokens=True)


@given(text=st.sampled_from(TEXTS), at=st.integers(1, 20), size=st.integers(1, 6), cuts=st.lists(st.integers(0, 200)))
def test_a_stop_text_over_borders_of_tokens_cuts_text_and_tokens(
    ours: Tokenizer, theirs: Any, text: str, at: int, size: int, cuts: list[int]
) -> None:
    tokens = theirs.encode(text, add_special_tokens=False)
    stop = text[at : at + size]
    sample, shown, kept_all = made(ours, ["never", stop]), "", list[int]()
    pieces = pieces_of(tokens, cuts)
    for number, piece in enumerate(pieces, 1):
        more, spoken, kept, reason = sample.take(piece, "length" if number == len(pieces) else None)
        shown, kept_all = shown + more, kept_all + piece[:kept]
        assert spoken == kept and text[: text.index(stop)].startswith(shown), "nothing is given that a stop takes back"
        if sample.over:
            assert reason == "stop"
            break
    assert (shown, sample.stop_text) == (text[: text.index(stop)], stop)
    whole = [theirs.decode(tokens[:count], skip_special_tokens=True) for count in range(len(tokens) + 1)]
    assert kept_all == tokens[: next(count for count, part in enumerate(whole) if stop in part)], "up to its last token"


@pytest.mark.parametrize("stops", [[], ["never"]])
def test_a_stop_token_has_no_text_and_half_a_character_before_it_is_dropped(
    ours: Tokenizer, theirs: Any, stops: list[str]
) -> None:
    tokens = theirs.encode("so 漢", add_special_tokens=False)
    sample = made(ours, stops)
    found = [sample.take(tokens[:-1], None), sample.take([7], "stop")]
    assert [text for text, *_ in found] == ["so ", ""]
    assert [(spoken, kept) for _, spoken, kept, _ in found] == [(len(tokens) - 1, len(tokens) - 1), (0, 1)]
    assert sample.over and sample.stop_text is None


def test_a_stop_text_counts_from_min_tokens_on(ours: Tokenizer, theirs: Any) -> None:
    tokens = theirs.encode(" a a a a", add_special_tokens=False)
    sample = made(ours, [" a"], min_tokens=3)
    assert sample.take(tokens, None) == (" a a", 3, 3, "stop")


@given(
    text=st.sampled_from(TEXTS), cuts=st.lists(st.integers(0, 200), max_size=6), min_tokens=st.integers(0, 12),
    stops=st.lists(st.text("a said: 漢🚀the", min_size=1, max_size=3), min_size=1, max_size=3),
)  # fmt: skip
def test_tokens_that_come_together_end_as_one_by_one(
    ours: Tokenizer, text: str, cuts: list[int], min_tokens: int, stops: list[str]
) -> None:
    tokens = ours.encode_chat(text)

    def run(pieces: list[list[int]]) -> tuple[str, int, int, str | None]:
        sample, shown, kept_all = made(ours, stops, min_tokens), "", 0
        for number, piece in enumerate(pieces, 1):
            more, _, kept, reason = sample.take(piece, "length" if number == len(pieces) else None)
            shown, kept_all = shown + more, kept_all + kept
            if reason is not None:
                break
        return shown, kept_all, sample.given, sample.stop_text

    assert run(pieces_of(tokens, cuts)) == run([[token] for token in tokens])
