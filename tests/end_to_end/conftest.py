"""Real engines for the end-to-end tests: every process, every socket, in a runtime folder of the test's own."""

from __future__ import annotations

import contextlib
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
