"""Rules of the project's English, and the places that hold it: docstrings, user-visible strings, Markdown.

`python tests/prose.py [words]` prints the counts per file; with `words`, every hit with its line.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("console/ppconsole", "engine/ppengine", "kernels/ppkernels")
GENERATED = "docs/reference/"
"""Pages made from docstrings and help: they have a budget of their own, for their text is mended at its source."""

_BEGINS = r"\A|\n[ \t]*\n|^[ \t]*(?:#+|[-*>]|\d+\.)[ \t]|\|[ \t]|[.!?:;][)\"'*]*\s"
OPENING = re.compile(rf"(?:{_BEGINS})\W*(What|Whatever|Who|Whom|Whoever|Where|Of)\b", re.MULTILINE)
"""A heading, paragraph, list item, table cell or sentence that begins with one of these words."""
WORDS = re.compile(
    r"\b(anew|told|tells?|telling|stands|stood|nobody|hearsay|heard|born|whoever|whom|whatever"
    r"|so many|(?:is|are) to be|what (?:is|was|are|were))\b",
    re.IGNORECASE,
)
SHOWN_BY = {"click.command", "click.group", "strike", "arm", "outside", "incident"}
"""Decorators that print the docstring of their function as help."""
LEAST_WORDS = 3
"""A string constant of fewer words is taken for a name and not for a text."""
_KEPT = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Constant, ast.JoinedStr)
_LEAVES = (ast.Name, ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop)


class Text(NamedTuple):
    """One text and its place. `kind`: docstring, string, markdown or reference."""

    path: str
    line: int
    kind: str
    text: str


class Hit(NamedTuple):
    """One break of the rules."""

    path: str
    line: int
    kind: str
    words: str


def hits(text: Text) -> list[Hit]:
    """Return the banned openings and words of a text."""
    found = {match.start(1): match[1] for rule in (WORDS, OPENING) for match in rule.finditer(text.text)}
    return [
        Hit(text.path, text.line + text.text.count("\n", 0, start), text.kind, words)
        for start, words in sorted(found.items())
    ]


def all_hits() -> list[Hit]:
    """Return the hits of the whole repository."""
    return [hit for text in texts() for hit in hits(text)]


def texts() -> Iterator[Text]:
    """Yield every text of the repository that the rules hold for."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield from python_texts(path.read_text(), path.relative_to(ROOT).as_posix())
    for name, text in markdown_files():
        yield Text(name, 1, "reference" if name.startswith(GENERATED) else "markdown", without_code(text))


def markdown_files() -> list[tuple[str, str]]:
    """Return path and text of the repository's Markdown files, tracked or new."""
    return [(name, (ROOT / name).read_text()) for name in files() if name.endswith(".md")]


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of Markdown; tables, headings and pictures have none. A code span or link is one word."""
    plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", "link", without_code(text))
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)", plain):
        lines = [line for line in block.split("\n") if not re.match(r"\s*(\||#|<!--)", line)]
        yield from re.split(r"(?<=[.!?])[\"')*]*\s+(?=[\"(*]*[A-Z`])", " ".join(" ".join(lines).split()))


def files() -> list[str]:
    """Return the paths of the repository's files, tracked or new; without git, of all that are not hidden."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        found = (path.relative_to(ROOT) for path in ROOT.rglob("*"))
        listed = [path.as_posix() for path in found if not any(part.startswith(".") for part in path.parts)]
    return [name for name in sorted(set(listed)) if (ROOT / name).is_file()]


def without_code(text: str) -> str:
    """Return Markdown with fenced blocks, indented blocks and code spans blanked; lines keep their numbers."""
    lines, fenced, blank = [], False, True
    for line in text.split("\n"):
        fence = line.lstrip().startswith("```")
        indented = line.startswith("    ") and blank
        fenced ^= fence
        blank = not line.strip() or indented
        lines.append("" if fenced or fence or indented else line)
    return re.sub(r"`[^`]*`", lambda span: "`x`" + "\n" * span[0].count("\n"), "\n".join(lines))


def anchors(text: str) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub makes them."""
    found: Counter[str] = Counter()
    made = set()
    fenced = False
    for line in text.split("\n"):
        fenced ^= line.lstrip().startswith("```")
        heading = re.match(r"#{1,6} +(.*)", line)
        if heading is None or fenced:
            continue
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1].strip())
        anchor = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        made.add(f"{anchor}-{found[anchor]}" if found[anchor] else anchor)
        found[anchor] += 1
    return made


def python_texts(source: str, path: str) -> Iterator[Text]:
    """Yield docstrings (of modules, classes, functions and attributes) and strings of `LEAST_WORDS` words and more.

    The docstring of a click command or of a fault is shown to users, so it counts as a string.
    """
    nodes = _documented_and_strings(ast.parse(source))
    docs: dict[int, str] = {}
    for node in nodes:
        for doc, kind in _docstrings(node):
            docs[id(doc)] = kind
            yield Text(path, doc.lineno, kind, ast.literal_eval(doc))
    inner = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if id(node) in docs or id(node) in inner or not isinstance(node, ast.Constant | ast.JoinedStr):
            continue
        text = _string(node)
        if len(re.findall(r"[A-Za-z]+", text)) >= LEAST_WORDS:
            yield Text(path, node.lineno, "string", text)


def _documented_and_strings(tree: ast.AST) -> list[ast.AST]:
    """Return the nodes that may hold a text. `ast.walk` takes most of its time for the parts of names."""
    kept, left = [], [tree]
    while left:
        node = left.pop()
        if isinstance(node, _KEPT):
            kept.append(node)
        for field in node._fields:
            value = getattr(node, field, None)
            if isinstance(value, list):
                left += [part for part in value if isinstance(part, ast.AST) and not isinstance(part, _LEAVES)]
            elif isinstance(value, ast.AST) and not isinstance(value, _LEAVES):
                left.append(value)
    return kept


def _docstrings(node: ast.AST) -> Iterator[tuple[ast.Constant, str]]:
    """Yield the bare strings of a module, a class or the head of a function."""
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return
    function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    for each in node.body[:1] if function else node.body:
        if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) and isinstance(each.value.value, str):
            yield each.value, "string" if function and _is_shown(node) else "docstring"


def _is_shown(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a decorator makes the docstring of a function into help."""
    names = {ast.unparse(each.func) for each in node.decorator_list if isinstance(each, ast.Call)}
    return bool(names & SHOWN_BY)


def _string(node: ast.Constant | ast.JoinedStr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return node.value if isinstance(node.value, str) else ""


def per_file(found: list[Hit]) -> str:
    """Return the counts per kind and file, the largest first."""
    lines = []
    for kind in sorted({hit.kind for hit in found}):
        files = Counter(hit.path for hit in found if hit.kind == kind)
        lines.append(f"{kind}: {files.total()}")
        lines += [f"{number:5} {path}" for path, number in files.most_common()]
    return "\n".join(lines)


if __name__ == "__main__":
    if "words" in sys.argv:
        print("\n".join(f"{hit.path}:{hit.line}: {hit.kind}: {hit.words}" for hit in all_hits()))
    print(per_file(all_hits()))
