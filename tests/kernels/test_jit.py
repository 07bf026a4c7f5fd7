"""A kernel that one process compiled is loaded by the next one, if sources and vector width are the same."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import ppkernels
import pytest
from ppkernels.cpu import jit, linear

SCRIPT = """
import sys
import numpy as np
import torch
from ppkernels.cpu import linear, rotary
w = linear.pack(torch.ones(32, 8))
x, y = np.ones((3, 8), np.float32), np.empty((3, 32), np.float32)
linear.multiply(x, w.numpy(), y, False)
assert (y == 8).all()
kernels = [linear.multiply]
if "rotate" in sys.argv:
    table = np.ones((1, 2), np.float32)
    rotary.rotate_rows(np.ones((1, 1, 4), np.float32), 1, table, table, np.zeros(1, np.int64))
    kernels.append(rotary.rotate_rows)
for kernel in kernels:
    print(sum(kernel.stats.cache_hits.values()), sum(kernel.stats.cache_misses.values()))
print(w.shape[2])
"""
COMPILED, LOADED = "0 1", "1 0"


def counts(folder: Path, width: int, *also: str) -> list[str]:
    """Return hits and misses of `multiply`, and of `rotate_rows` with the word `rotate`, in a new process.

    The process must take vectors of `width` bytes.
    """
    return counted(start(folder, width, *also), width)


def start(folder: Path, width: int, *also: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "PPKERNELS_VECTOR_BYTES": str(width)}
    command = [sys.executable, "-c", SCRIPT, *also]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def counted(process: subprocess.Popen[str], width: int) -> list[str]:
    out, err = process.communicate()
    assert process.returncode == 0, err
    *kernels, lanes = out.splitlines()
    assert int(lanes) == width // 4
    return kernels


def has_open(pid: int, name: str) -> bool:
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if str(path.readlink()) == name:
                return True
    return False


def own_copy(folder: Path) -> Path:
    """Return a copy of the kernels in `folder`, with nothing compiled."""
    copy = folder / "ppkernels"
    return Path(shutil.copytree(ppkernels.__path__[0], copy, ignore=shutil.ignore_patterns("__pycache__")))


@pytest.mark.timeout(240)
def test_a_kernel_is_compiled_once_until_width_or_source_changes(tmp_path: Path) -> None:
    """Of two processes that wait for the same kernel one compiles it, the other one and later ones load it."""
    folder = own_copy(tmp_path)
    (cache := folder / "cpu" / "__pycache__").mkdir()
    lock = cache / f"{linear.multiply._cache._impl.filename_base}.32.lock"
    with lock.open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        both = [start(tmp_path, 32) for _ in range(2)]
        # Both are past their imports once they wait: neither can have loaded what the other has compiled before.
        deadline = time.monotonic() + 150
        while not all(has_open(process.pid, turn.name) for process in both):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert sorted(counted(process, 32) for process in both) == [[COMPILED], [LOADED]]
    assert counts(tmp_path, 64) == [COMPILED]
    assert counts(tmp_path, 64, "rotate") == [LOADED, COMPILED]
    assert counts(tmp_path, 32) == [LOADED]
    with (folder / "cpu" / "tiles.py").open("a") as file:
        file.write("\n")  # compiled into `multiply`; one stamp is enough for all kernels
    assert counts(tmp_path, 64, "rotate") == [COMPILED, COMPILED]


def test_a_turn_that_never_comes_is_taken_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that compiles may be stopped."""
    monkeypatch.setattr(jit, "TURN_S", 0.1)
    lock = tmp_path / "kernel.lock"
    with lock.open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        before = time.monotonic()
        with jit._turn(lock):
            assert 0.1 <= time.monotonic() - before < 30


def test_a_kernel_is_compiled_within_itself_and_where_nothing_can_be_written(tmp_path: Path) -> None:
    done = []
    for lock in (tmp_path / "kernel.lock", tmp_path / "no folder" / "kernel.lock"):
        before = time.monotonic()
        with jit._turn(lock), jit._turn(lock):
            done.append(time.monotonic() - before < jit.TURN_S / 2)
    assert done == [True, True]
