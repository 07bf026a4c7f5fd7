"""GPU kernels: on a machine with a GPU as they are, elsewhere on the CPU under Triton's interpreter.

A kernel is interpreted if TRITON_INTERPRET is set while its module is imported (see also tests/conftest.py), so all of
them are imported here. Engines and the tests of CPU kernels, which share the process, see nothing of it.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

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


def _patch_language_once() -> None:
    """Have the interpreter replace the functions of Triton's language once a launch.

    It repeats that at every call of a device function, which took half of the time of these tests.
    """
    from triton.runtime import interpreter

    patch, language = interpreter._patch_lang, interpreter.tl

    def patch_once(function: Callable[..., Any]) -> Any:
        seen = [module for module in (language, language.core) if module in function.__globals__.values()]
        replaced = all(not language.core.is_builtin(module.load) for module in seen)
        return interpreter._LangPatchScope() if replaced else patch(function)

    interpreter._patch_lang = patch_once


def _compute_no_sum_twice() -> None:
    """Have the interpreter leave out the search for overflows, as launches without `debug` do on a card.

    It computes each sum of integers again in 64 bits. Without `debug` it then drops what it found.
    """
    from triton.runtime import interpreter

    options = interpreter.interpreter_builder.options
    assert not options.debug
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


if DEVICE == "cpu":
    _patch_language_once()
    _compute_no_sum_twice()


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    patch = _interpreted()
    yield
    patch.undo()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the tensors of these tests are."""
    return torch.device(DEVICE)
