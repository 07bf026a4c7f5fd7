"""Kernels with vectors of 32 and of 64 bytes, both on any machine, and with checked indices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ppkernels.cpu.vectors import VARIABLE, VECTOR_BYTES, chosen_width

OTHER = 96 - VECTOR_BYTES
TESTS = [
    "test_linear.py", "test_paged_attention.py", "test_llama_layer.py", "test_elementwise.py", "test_store_kv.py",
    "test_shared_prefixes.py",
]  # fmt: skip
"""Tests of compiled kernels."""


def test_the_width_is_the_machines_unless_it_is_set() -> None:
    assert chosen_width(None, avx512=True) == 64 and chosen_width("", avx512=False) == 32
    assert chosen_width("32", avx512=True) == 32 and chosen_width("64", avx512=False) == 64


@pytest.mark.parametrize("setting", ["16", "128", "avx2", " 32"])
def test_another_width_is_refused(setting: str) -> None:
    with pytest.raises(ValueError, match=f"PPKERNELS_VECTOR_BYTES is '{setting}'; it must be 32 or 64"):
        chosen_width(setting, avx512=True)


@pytest.mark.timeout(600)
def test_the_kernels_in_the_other_width_and_with_checked_indices() -> None:
    assert OTHER in (32, 64)
    files = [str(Path(__file__).parent / name) for name in TESTS]
    # float32 alone halves the time, nearly all of which is compilation.
    options = ["-p", "no:xdist", "-p", "no:cacheprovider", "--timeout", "0", "-k", "not float64"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    # A kernel checks no index: one beyond an array reads what is there, and ends the process now and then.
    environment = {**os.environ, VARIABLE: str(OTHER), "NUMBA_BOUNDSCHECK": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
