"""The variants of Triton kernels that launches need: what a card would compile at its first launch of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import create_function_from_signature

Variant = tuple[str, str]
"""A kernel, and types, properties and values of its arguments that are compiled in."""


class Variants:
    """Records the variant of each launch. Launches are interpreted, or left out unless `runs`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, runs: bool) -> None:
        self._found: set[Variant] = set()
        self._binders: dict[Callable[..., Any], Any] = {}
        backend, run, variants = make_backend(GPUTarget("cuda", 90, 32)), InterpretedFunction.run, self

        def recorded(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            if kernel.fn not in variants._binders:
                jit = triton.JITFunction(kernel.fn, **kernel.kwargs)
                variants._binders[kernel.fn] = create_function_from_signature(jit.signature, jit.params, backend)
            _, compiled_in, more = variants._binders[kernel.fn](*args, **options)
            name = f"{kernel.fn.__module__}.{kernel.fn.__name__}"
            variants._found.add((name, f"{compiled_in} {sorted(more.items())}"))
            return run(kernel, *args, grid=grid, warmup=warmup, **options) if runs else None

        monkeypatch.setattr(InterpretedFunction, "run", recorded)

    def taken(self) -> set[Variant]:
        """Return the variants since the last call."""
        found, self._found = self._found, set()
        return found
