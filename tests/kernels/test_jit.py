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
from ppkernels.cpu import jit

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
def test_of_two_processes_that_wait_for_the_same_kernel_one_compiles_it(tmp_path: Path) -> None:
    cache = own_copy(tmp_path) / "cpu" / "__pycache__"
    assert counts(tmp_path, 32) == [COMPILED]
    (lock,) = cache.glob("linear.multiply-*.32.lock")
    for compiled in [*cache.glob("*.nbi"), *cache.glob("*.nbc")]:
        compiled.unlink()
    with lock.open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        both = [start(tmp_path, 32) for _ in range(2)]
        # Both are past their imports once they wait: neither can have loaded what the other has compiled before.
        deadline = time.monotonic() + 150
        while not all(has_open(process.pid, turn.name) for process in both):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert sorted(counted(process, 32) for process in both) == [[COMPILED], [LOADED]]


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


@pytest.mark.timeout(240)
def test_a_second_process_compiles_nothing_until_width_or_source_changes(tmp_path: Path) -> None:
    folder = own_copy(tmp_path)
    # Compiling `attend` is the slowest part: one width shows that a change reaches it.
    assert counts(tmp_path, 32, "attend") == [COMPILED, COMPILED]
    assert counts(tmp_path, 64) == [COMPILED]
    assert counts(tmp_path, 32, "attend") == [LOADED, LOADED]
    assert counts(tmp_path, 64) == [LOADED]
    with (folder / "cpu" / "tiles.py").open("a") as file:
        file.write("\n")  # compiled into both
    assert counts(tmp_path, 32, "attend") == [COMPILED, COMPILED]
