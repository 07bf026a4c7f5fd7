"""Nothing of the product takes an object out of bytes or listens on every interface: calls that linters do not know."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
CALLS = {"recv_pyobj", "send_pyobj", "recv_serialized", "send_serialized"}
NAMES = (*MODULES, *CALLS, "bind")
FILES = [path for name in ("console", "engine", "kernels") for path in sorted((ROOT / name).rglob("*.py"))]


def banned(text: str) -> list[str]:
    """Return what a source does and must not."""
    # A source without any of the names has none of the nodes below, and parsing is what takes time.
    if not any(name in text for name in NAMES):
        return []
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            found.append(node.module or "")
        elif isinstance(node, ast.Attribute) and node.attr in CALLS:
            found.append(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "bind":
            texts = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
            found += [each for each in texts if isinstance(each, str) and each.startswith(("tcp://*", "tcp://0.0.0.0"))]
    return found


@pytest.mark.parametrize(
    "text",
    ["import pickle", "from marshal import loads", "x.recv_pyobj()", "s.bind('tcp://*:1')", "s.bind(f'tcp://*:{1}')"],
)
def test_each_is_found(text: str) -> None:
    assert len(banned(text)) == 1


def test_no_file_of_the_product_has_one() -> None:
    assert len(FILES) > 300
    assert {str(path): found for path in FILES if (found := banned(path.read_text()))} == {}
