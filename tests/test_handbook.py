"""The handbook explains every column, letter, glyph, state and cause that the console shows."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path
from typing import get_args

import ppconsole.view
import pytest
from ppconsole.model.request_fields import FIELDS
from ppconsole.view import kvmap, marks, timeline
from ppconsole.view.cells import Column
from ppengine.protocol.snapshot import Cause, EngineState
from ppengine.protocol.stage_info import StageState

HANDBOOK = (Path(__file__).resolve().parent.parent / "docs" / "handbook.md").read_text()
SPANS = {part for span in re.findall(r"`([^`]+)`", HANDBOOK) for part in (span, *span.split())}
"""Code spans, and the words in them."""


def titles() -> set[str]:
    """Return the titles of all tables of the console."""
    modules = [
        importlib.import_module(f"ppconsole.view.{each.name}") for each in pkgutil.iter_modules(ppconsole.view.__path__)
    ]
    tables = [value for module in modules for value in vars(module).values() if isinstance(value, tuple) and value]
    return {each.title for table in tables for each in table if isinstance(each, Column) and each.title}


@pytest.mark.parametrize(
    ("what", "shown"),
    [
        ("column", titles()),
        ("stage letter", {mark.text for mark in marks.STAGE.values()} | {marks.FAULT.text, marks.CORDONED}),
        ("request state", {mark.text for mark in marks.REQUEST.values()}),
        ("engine state", {state.upper() for state in get_args(EngineState)}),
        ("link state", set(marks.LINK)),
        ("cause", set(get_args(Cause))),
        ("timeline glyph", {glyph for glyph, _ in timeline.KINDS.values()} | {timeline.IDLE}),
        ("KV map glyph", {glyph for glyph, _ in kvmap.GLYPHS.values()} | {kvmap.SELECTED[0]}),
    ],
)
def test_the_handbook_has_it(what: str, shown: set[str]) -> None:
    assert shown and not shown - SPANS, f"no {what} {', '.join(sorted(shown - SPANS))} in docs/handbook.md"


def test_every_stage_state_has_its_letter_and_word() -> None:
    rows = dict(re.findall(r"^\| `([A-Z])` \| (\w+) \| .*\w", HANDBOOK, re.MULTILINE))
    assert rows == {marks.STAGE[state].text: state for state in get_args(StageState)} | {marks.FAULT.text: "faulty"}


def test_the_fields_of_filters_are_those_of_the_console() -> None:
    chapter = HANDBOOK.partition("\n# Filters\n")[2]
    listed = chapter.partition("The fields are ")[2].partition(". ")[0]
    assert set(re.findall(r"`(\w+)`", listed)) == {*(field.name for field in FIELDS.values()), "stat"}
