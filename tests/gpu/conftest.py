"""GPU kernels: on a machine with a GPU as they are, elsewhere on the CPU under Triton's interpreter.

A kernel is interpreted if TRITON_INTERPRET is set while its module is imported (see also tests/conftest.py), so all of
them are imported here. Engines and the tests of CPU kernels, which share the process, see nothing of it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import pytest
import torch
from ppkernels import gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _interpreted() -> pytest.MonkeyPatch:
    patch = pytest.MonkeyPatch()
    if DEVICE == "cpu":
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setattr(gpu, "interpreted", True)
    return patch


_patch = _interpreted()
for _module in pkgutil.iter_modules(gpu.__path__, "ppkernels.gpu."):
    importlib.import_module(_module.name)
_patch.undo()


if DEVICE == "cpu":
    import quick_interpreter

    quick_interpreter.use()


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    patch = _interpreted()
    yield
    patch.undo()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the tensors of these tests are."""
    return torch.device(DEVICE)
