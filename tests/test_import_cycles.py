"""No file of a package imports itself by way of others. Imports for the type checker count."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Collection
from pathlib import Path

import pytest

PACKAGES = ("ppconsole", "ppengine", "ppkernels")

Graph = dict[str, set[str]]


def read_graph(folder: Path) -> Graph:
    """Return for each module of the package in `folder` those that it imports, at any depth of its code."""
    files = {}
    for path in folder.rglob("*.py"):
        name = ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__")
        files[name] = path
    return {name: (_imports(name, path, files) & files.keys()) - {name} for name, path in files.items()}


def _imports(name: str, path: Path, files: Collection[str]) -> set[str]:
    """Return the modules that `path` imports: a name that is one of `files`, otherwise the module with the name."""
    found: set[str] = set()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names = [f"{base}.{alias.name}" for alias in node.names]
            found |= {each if each in files else base for each in names}
    return found


def cycles(graph: Graph) -> list[frozenset[str]]:
    """Return the groups of modules that reach each other."""
    reach = {name: _reached(graph, name) for name in graph}
    groups = {frozenset(other for other in reach[name] if name in reach[other]) for name in graph}
    return sorted((group for group in groups if group), key=sorted)


def _reached(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        for name in graph[todo.pop()] - seen:
            seen.add(name)
            todo.append(name)
    return seen


def test_a_cycle_is_found_through_a_type_checking_import(tmp_path: Path) -> None:
    package = tmp_path / "house"
    (package / "room").mkdir(parents=True)
    for name, text in {
        "__init__.py": "",
        "door.py": "from house.room import window",
        "room/__init__.py": "",
        "room/window.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..door import Door",
        "wall.py": "import house.door",
    }.items():
        (package / name).write_text(text)
    assert cycles(read_graph(package)) == [frozenset({"house.door", "house.room.window"})]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_file_imports_itself_by_way_of_others(package: str) -> None:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    assert cycles(read_graph(Path(spec.submodule_search_locations[0]))) == []
