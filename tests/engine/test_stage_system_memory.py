"""The memory of the machine, and of a container that has less."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ppengine.common.system_memory import system_memory

GIB = 2**30


def fake(folder: Path, cgroup: str | None = "0::/pod/engine\n") -> tuple[Path, Path]:
    proc, groups = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    groups.mkdir()
    (proc / "meminfo").write_text(f"MemTotal: {16 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {10 * 2**20} kB\n")
    if cgroup is not None:
        (proc / "self/cgroup").write_text(cgroup)
    return proc, groups


def limit(folder: Path, most: str, used: int = 0, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")


def test_this_machine() -> None:
    here = system_memory()
    assert 0 < here.available <= here.total


def test_without_a_limit_it_is_the_machines(tmp_path: Path) -> None:
    proc, groups = fake(tmp_path)
    limit(groups / "pod/engine", "max")
    assert system_memory(proc, groups) == (16 * GIB, 10 * GIB)
    assert system_memory(*fake(tmp_path / "old", cgroup=None)) == (16 * GIB, 10 * GIB)
    assert system_memory(*fake(tmp_path / "one", cgroup="4:memory:/x\n")) == (16 * GIB, 10 * GIB)


def test_the_tightest_limit_counts_and_page_cache_is_room(tmp_path: Path) -> None:
    proc, groups = fake(tmp_path)
    limit(groups / "pod", str(8 * GIB), used=7 * GIB, cache=2 * GIB)
    limit(groups / "pod/engine", str(12 * GIB), used=1 * GIB)
    assert system_memory(proc, groups) == (8 * GIB, 3 * GIB)
    limit(groups / "pod/engine", str(4 * GIB), used=5 * GIB)
    assert system_memory(proc, groups) == (4 * GIB, 0)


def test_a_system_that_does_not_say_is_an_error(tmp_path: Path) -> None:
    proc, groups = fake(tmp_path)
    (proc / "meminfo").write_text("MemTotal: 5 kB\n")
    with pytest.raises(OSError, match="has no MemAvailable: line"):
        system_memory(proc, groups)


FAULTS = """
import ctypes
import resource
import torch
from ppengine.common.system_memory import keep_freed_memory

def faults():
    def work():
        parts = [torch.ones(2**18) for _ in range(8)]
    for _ in range(3):
        work()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

ctypes.CDLL(None).mallopt(-3, 2**16)  # glibc finds a limit by itself, now this one, now another: the lowest here
print(faults())
keep_freed_memory()
print(faults())
"""


def test_freed_memory_is_used_again_without_the_system() -> None:
    gives_back, keeps = map(int, subprocess.check_output([sys.executable, "-c", FAULTS]).split())
    assert keeps < 2 * 1024 < 20 * 1024 <= gives_back, "8 MiB are 2,048 pages, and come again each time or once"
