"""Real engines for the end-to-end tests: every process, every socket, in a runtime folder of the test's own."""

from __future__ import annotations

import contextlib
import inspect
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "engine"))

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# These imports need the folders above.
import preloaded
from serving import Served

Served.launch = staticmethod(preloaded.fork)
HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests that share an engine to one worker (`--dist loadgroup`), the long ones first.

    Any other test may go to any worker, so that all of them have work until the end.
    """
    ours = [item for item in items if item.path.parent == HERE and isinstance(item, pytest.Function)]
    for item in ours:
        if item.get_closest_marker("xdist_group"):
            continue
        case = item.callspec.indices if hasattr(item, "callspec") else {}
        for name in _shared(item):
            item.add_marker(pytest.mark.xdist_group(f"{item.path.name}:{name}{case.get(name, '')}"))
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def _shared(item: pytest.Function) -> list[str]:
    """Return the fixtures of a test that its module shares and that have an end: engines."""
    found = {name: fixtures[-1] for name, fixtures in item._fixtureinfo.name2fixturedefs.items()}
    return [name for name, one in found.items() if one.scope == "module" and inspect.isgeneratorfunction(one.func)]


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give the test a runtime folder with a short path (ipc paths hold 107 bytes) and remove it afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="pp-", dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.delenv("PPCONSOLE_ENGINE", raising=False)
    yield folder
    with contextlib.suppress(OSError):
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def checkpoint_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for checkpoints that several tests share."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def expected(request: pytest.FixtureRequest, folder: Path) -> list[list[int]]:
    """Tokens of transformers for each of the module's `PROMPTS`, `STEPS` each."""
    import reference  # It loads transformers, which takes seconds.

    module = request.module
    return [reference.greedy(folder, prompt, module.STEPS) for prompt in module.PROMPTS]
