"""The reference pages are those that the code gives."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

UNEXPLAINED = {"profile.md": 26, "status-json.md": 158}
"""Keys and fields without a docstring; the number only falls."""
FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference"
_spec = importlib.util.spec_from_file_location("generate_reference", FOLDER / "generate.py")
assert _spec is not None and _spec.loader is not None
generate = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generate)


@pytest.mark.parametrize("name", generate.pages())
def test_the_page_is_the_codes(name: str) -> None:
    page = FOLDER / name
    assert page.is_file() and page.read_text() == generate.pages()[name], "run python docs/reference/generate.py"


def test_there_is_no_page_beside_them() -> None:
    assert {path.name for path in FOLDER.glob("*.md")} == set(generate.pages())


def test_every_command_and_key_is_there() -> None:
    pages = generate.pages()
    assert "## `restart-stage`" in pages["cli.md"] and "--dry-run" in pages["cli.md"]
    assert "| `memory.utilization` | number (above 0 and at most 1) | `0.9` |" in pages["profile.md"]
    assert "| `waiting_on` | [Waiting](#waiting) or null |" in pages["status-json.md"]
    assert "| `thresholds[].for_s` | number | `5.0` |" in pages["config.md"]
    assert "| 10 | fault found |" in pages["exit-codes.md"]


@pytest.mark.parametrize("name", UNEXPLAINED)
def test_keys_without_a_meaning_become_fewer(name: str) -> None:
    bare = [line for line in generate.pages()[name].split("\n") if line.startswith("| `") and line.endswith("|  |")]
    assert len(bare) <= UNEXPLAINED[name], f"{len(bare)} without a docstring:\n" + "\n".join(bare)
