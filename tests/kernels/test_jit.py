"""What is compiled once is there for the next process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import ppkernels
import pytest

SCRIPT = """
import numpy as np
from ppkernels import paged_tiles, llama_layer, linear
x, w, y = (np.ones(shape, np.float32) for shape in [(3, 8), (1, 8, 16), (3, 16)])
linear.multiply(x, w, y, False)
assert (y == 8).all()
kv, q = np.ones((2, 2, 1, 16, 16), np.float32), np.ones((1, 3, 16), np.float32)
one, zero = np.ones(1, np.int64), np.zeros(1, np.int64)
assert paged_tiles.attend(q, kv, zero, one, one, np.ones((1, 1), np.int64), q[:, :1].copy()) == -1
for kernel in (linear.multiply, paged_tiles.attend):
    print(sum(kernel.stats.cache_hits.values()), sum(kernel.stats.cache_misses.values()))
"""


def counts(folder: Path) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:2]


@pytest.mark.timeout(240)
def test_a_second_process_compiles_nothing_until_a_source_changes(tmp_path: Path) -> None:
    folder = tmp_path / "ppkernels"
    shutil.copytree(Path(ppkernels.__path__[0]), folder, ignore=shutil.ignore_patterns("__pycache__"))
    assert counts(tmp_path) == ["0 1", "0 1"]
    assert counts(tmp_path) == ["1 0", "1 0"]
    with (folder / "tiles.py").open("a") as file:
        file.write("\n")  # compiled into both
    assert counts(tmp_path) == ["0 1", "0 1"]
