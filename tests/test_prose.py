"""The project's English: banned openings and words, length of lines and pages, references that lead nowhere.

`tests/prose.py` has the rules. A budget only falls: lower it here with each text that is mended.
"""

from __future__ import annotations

import fnmatch
import posixpath
import re
from collections import Counter

import prose
import pytest

BUDGET = {"markdown": 0, "reference": 0, "string": 0, "docstring": 0}
"""Hits that are left. At the end: none, except 60 in docstrings."""
WIDTH = 100
WORDS = 25
"""Most words of a sentence in Markdown; dated runs keep their facts as they were written down."""
WRITTEN_BY_DRILLS = ("Measured 2", "Targets: ", "In a cell: ")
PAGES = {"README.md": 120, "ARCHITECTURE.md": 150}
"""Most lines of a page."""
GONE = re.compile(r"DESIGN(\.md)?,? §|\bDESIGN\.md|PERFORMANCE\.md|HOUSE\.md|\.\./shared|bench/throughput\.py")
"""Files that are not in the repository."""
PATH = re.compile(r"`((?:[\w.*-]+/)*[\w*-]+\.(?:py|md|yaml|tcss|toml)|(?:[\w.-]+/)+)`")
"""A file or, with a slash at its end, a folder in a code span."""
CHOSEN = re.compile(r"pytest .*?(tests/\S+\.py) -k (\w+)")
"""A file of tests and the word by which a command chooses some of them."""
ANCHOR = re.compile(r"\]\(([^)#\s]*)#([^)\s]+)\)")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def test_texts_stay_within_the_budget_and_name_no_file_outside_the_repository() -> None:
    """One test for all texts: each process that runs a part of it would parse all sources."""
    texts = list(prose.texts())
    assert {text.kind for text in texts} == set(BUDGET)
    broken = []
    for kind, allowed in BUDGET.items():
        mine = [hit for text in texts if text.kind == kind for hit in prose.hits(text)]
        shown = "".join(f"\n{hit.path}:{hit.line}: {hit.words}" for hit in mine[:20])
        if len(mine) > allowed:
            broken.append(f"{kind}: {len(mine)} hits, {allowed} allowed\n{prose.per_file(mine)}{shown}")
    whole = [prose.Text(name, 1, "markdown", text) for name, text in prose.markdown_files()]
    python = [text for text in texts if text.kind in ("docstring", "string")]
    broken += [f"{text.path}:{text.line}: {gone[0]}" for text in (*whole, *python) for gone in GONE.finditer(text.text)]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("What a stage waits for.", ["What"]),
        ("Return it. Who waits is `blocked`.", ["Who"]),
        ("- Of the steps, for `shadow`", ["Of"]),
        ("| cell | Where it is |", ["Where"]),
        ("The core is told what is open; nobody stands.", ["told", "what is", "nobody", "stands"]),
        ("Return what the function says, of whichever kind, and where.", []),
        ("A standing test: bystanders, foretell, stubborn.", []),
    ],
)
def test_the_rules_find_what_they_ban(text: str, words: list[str]) -> None:
    assert [hit.words for hit in prose.hits(prose.Text("a.md", 1, "markdown", text))] == words


def test_texts_of_python_are_found() -> None:
    source = '''
"""Module."""
import click
SIZE = 3
"""Attribute."""

@click.command("x")
def command(name: str) -> None:
    """Help of a command."""
    raise ValueError(f"{name} has no such thing as this", "a name")
'''
    kinds = [(text.kind, text.text) for text in prose.python_texts(source, "a.py")]
    assert Counter(kinds) == Counter(
        [("docstring", "Module."), ("docstring", "Attribute."), ("string", "Help of a command."),
         ("string", "{} has no such thing as this")]
    )  # fmt: skip


def test_code_in_markdown_is_left_out() -> None:
    text = "Say `what is` so\n\n    told\n\n```\nnobody\n```\nand stands"
    assert [hit.words for hit in prose.hits(prose.Text("a.md", 1, "markdown", prose.without_code(text)))] == ["stands"]
    assert prose.without_code(text).count("\n") == text.count("\n")


def test_markdown_lines_are_short() -> None:
    long = [
        f"{name}:{number}: {len(line)} columns"
        for name, text in prose.markdown_files()
        for number, line in enumerate(_plain_lines(text), start=1)
        if len(line) > WIDTH
    ]
    assert not long, "\n".join(long)


def _plain_lines(text: str) -> list[str]:
    """Return the lines with code, tables and lines that hold a link blanked."""
    kept = prose.without_code(text).split("\n")
    raw = text.split("\n")
    return [
        "" if not plain.strip() or line.lstrip().startswith("|") or "](" in line or "://" in line else line
        for line, plain in zip(raw, kept, strict=True)
    ]


def test_markdown_sentences_are_short() -> None:
    long = [
        f"{name}: {len(sentence.split())} words: {sentence[:100]}"
        for name, text in prose.markdown_files()
        if not name.startswith((prose.GENERATED, "docs/runs/"))
        for sentence in prose.sentences(text)
        if len(sentence.split()) > WORDS and not sentence.startswith(WRITTEN_BY_DRILLS)
    ]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_short(name: str) -> None:
    lines = (prose.ROOT / name).read_text().count("\n")
    assert lines <= PAGES[name], f"{name} has {lines} lines, {PAGES[name]} allowed"


def test_relative_links_lead_to_files() -> None:
    broken = [
        f"{name}: {target}"
        for name, text in prose.markdown_files()
        for target in LINK.findall(text)
        if "://" not in target and not (prose.ROOT / name).parent.joinpath(target).exists()
    ]
    assert not broken, "\n".join(broken)


def test_anchors_lead_to_headings() -> None:
    pages = dict(prose.markdown_files())
    anchors = {name: prose.anchors(text) for name, text in pages.items()}
    broken = []
    for name, text in pages.items():
        for target, anchor in ANCHOR.findall(prose.without_code(text)):
            page = posixpath.normpath(posixpath.join(posixpath.dirname(name), target)) if target else name
            if "://" not in target and page in pages and anchor not in anchors[page]:
                broken.append(f"{name}: {target}#{anchor}")
    assert not broken, "\n".join(broken)


def test_commands_choose_tests_that_exist() -> None:
    found = [
        (file, word)
        for name, text in prose.markdown_files()
        if not name.startswith("docs/runs/")
        for file, word in CHOSEN.findall(text)
    ]
    empty = [
        f"{file} -k {word}"
        for file, word in found
        if not re.search(rf"def test_\w*{word}", (prose.ROOT / file).read_text())
    ]
    assert found and not empty, "\n".join(empty)


def test_paths_in_code_spans_are_files() -> None:
    files = [f"/{path}" for path in prose.files()]
    missing = {
        span
        for name, text in prose.markdown_files()
        if not name.startswith((prose.GENERATED, "docs/runs/"))
        for span in PATH.findall(text)
        if not any(fnmatch.fnmatch(path, f"*/{span}*" if span.endswith("/") else f"*/{span}") for path in files)
    }
    assert not missing, f"no such file: {', '.join(sorted(missing))}"
