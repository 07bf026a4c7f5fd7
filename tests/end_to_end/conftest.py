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
from ppengine.offline import launch
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
        case = item.callspec.indices if hasattr(item, "callspec") else {}
        groups = [f"{item.path.name}:{name}{case.get(name, '')}" for name in _shared(item)]
        if mark := item.get_closest_marker("xdist_group"):
            groups = [mark.args[0]]
        if groups and item.config.getoption("loadgroup", False):
            # xdist 3.8 reads the group in the node id and would write it to an attribute that pytest 9.2 does not read.
            item._id = type(item.id).parse(f"{item.nodeid}@{'_'.join(sorted(groups))}")
            assert "@" in item.nodeid, "or each worker boots each engine"
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


@pytest.fixture
def forked_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the supervisors of `LLM`, too. `test_errors` starts them as users do."""
    monkeypatch.setattr(
        launch, "run_supervisor", lambda words, errors, line: preloaded.fork(words, dict(os.environ), errors, line)
    )


@pytest.fixture(scope="session")
def checkpoint_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for checkpoints that several tests share."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def expected(request: pytest.FixtureRequest, folder: Path) -> list[list[int]]:
    """Tokens of transformers for each of the module's `PROMPTS`, `STEPS` each."""
    import reference  # It loads transformers, which takes seconds.

    module = request.module
    return reference.greedy_each(folder, module.PROMPTS, module.STEPS)
