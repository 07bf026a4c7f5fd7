"""A kernel that one process compiled is loaded by the next one, if sources and vector width are the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import ppkernels
import pytest

SCRIPT = """
import sys
import numpy as np
import torch
from ppkernels.cpu import paged_tiles, llama_layer, linear
w = linear.pack(torch.ones(32, 8))
x, y = np.ones((3, 8), np.float32), np.empty((3, 32), np.float32)
linear.multiply(x, w.numpy(), y, False)
assert (y == 8).all()
kernels = [linear.multiply]
if "attend" in sys.argv:
    kv, q = np.ones((2, 2, 1, 16, 16), np.float32), np.ones((1, 3, 16), np.float32)
    one, zero = np.ones(1, np.int64), np.zeros(1, np.int64)
    assert paged_tiles.attend(q, kv, zero, one, one, np.ones((1, 1), np.int64), q[:, :1].copy()) == -1
    kernels.append(paged_tiles.attend)
for kernel in kernels:
    print(sum(kernel.stats.cache_hits.values()), sum(kernel.stats.cache_misses.values()))
print(w.shape[2])
"""
COMPILED, LOADED = "0 1", "1 0"


def counts(folder: Path, width: int, *also: str) -> list[str]:
    """Return hits and misses of `multiply`, and of `attend` with that word, in a new process.

    The process must take vectors of `width` bytes.
    """
    environment = {**os.environ, "PYTHONPATH": str(folder), "PPKERNELS_VECTOR_BYTES": str(width)}
    done = subprocess.run([sys.executable, "-c", SCRIPT, *also], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *kernels, lanes = done.stdout.splitlines()
    assert int(lanes) == width // 4
    return kernels


@pytest.mark.timeout(240)
def test_a_second_process_compiles_nothing_until_width_or_source_changes(tmp_path: Path) -> None:
    folder = tmp_path / "ppkernels"
    shutil.copytree(Path(ppkernels.__path__[0]), folder, ignore=shutil.ignore_patterns("__pycache__"))
    # Compiling `attend` is the slowest part: one width shows that a change reaches it.
    assert counts(tmp_path, 32, "attend") == [COMPILED, COMPILED]
    assert counts(tmp_path, 64) == [COMPILED]
    assert counts(tmp_path, 32, "attend") == [LOADED, LOADED]
    assert counts(tmp_path, 64) == [LOADED]
    with (folder / "cpu" / "tiles.py").open("a") as file:
        file.write("\n")  # compiled into both
    assert counts(tmp_path, 32, "attend") == [COMPILED, COMPILED]
