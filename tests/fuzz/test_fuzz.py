"""A short run of what `tests/fuzz/feed.py` does for hours; and a reader with a defect is found."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "engine")]

import feed  # noqa: E402 - the folders must be in the path first
import pytest  # noqa: E402
from targets import Target  # noqa: E402

READERS = [
    "messages", "recording", "export", "event journal", "past", "JSON", "profile", "console", "config", "safe", "index",
]  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_only_the_errors_of_a_reader_leave_it(name: str) -> None:
    for tally in feed.fuzz(1_000, 1, [name]):
        assert not tally.findings, f"{tally.target.name}: {tally.findings[0]}"
        assert tally.read, f"{tally.target.name}: no input was right, so most of the reader was not seen"
        assert tally.read < tally.inputs or not tally.target.errors


def test_a_core_acts_on_whatever_is_sent() -> None:
    (tally,) = feed.fuzz(1_000, 1, ["core"])
    assert not tally.findings, tally.findings[0]
    assert tally.read > 500


def test_a_defect_is_found_with_its_input() -> None:
    def read(data: bytes) -> None:
        if len(data) > 2 and data[1] == 0xC1:
            raise KeyError(data[1])
        if not data:
            raise ValueError("a long reason " * 100 + "\x1b")

    tally = feed.Tally(Target("broken", lambda chance: bytes([0x92, 0, 0]), read, (ValueError,)))
    chance = Random(1)
    for _ in range(3_000):
        tally.feed(chance)
    assert tally.findings
    assert all(data[1] == 0xC1 and "KeyError" in text for data, text in tally.findings)
