"""A kernel that one process compiled is loaded by the next one, if sources and vector width are the same."""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import ppkernels
import pytest
from ppkernels.cpu import jit, linear

COMPILED, LOADED = "0 1", "1 0"


class Users:
    """Processes that use kernels of a folder, each with nothing of the kernels loaded before."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._outputs: dict[int, tuple[Path, int]] = {}
        command = [sys.executable, str(Path(__file__).with_name("kernel_user.py"))]
        self._template = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Users:
        return self

    def __exit__(self, *_: object) -> None:
        self._template.communicate()

    def _ask(self, **order: object) -> int:
        assert self._template.stdin is not None and self._template.stdout is not None
        self._template.stdin.write(json.dumps(order) + "\n")
        self._template.stdin.flush()
        return int(self._template.stdout.readline())

    def start(self, width: int, *, rotate: bool = False) -> int:
        """Start a process that takes vectors of `width` bytes; return its pid."""
        out = self._folder / f"out.{len(self._outputs)}"
        pid = self._ask(folder=str(self._folder), width=width, rotate=rotate, out=str(out))
        self._outputs[pid] = out, width
        return pid

    def counted(self, pid: int) -> list[str]:
        """Wait for its end; return hits and misses of `multiply`, and of `rotate_rows` if it was to rotate."""
        code = self._ask(wait=pid)
        out, width = self._outputs[pid]
        assert code == 0, out.read_text()
        *kernels, lanes = out.read_text().splitlines()
        assert int(lanes) == width // 4
        return kernels

    def counts(self, width: int, *, rotate: bool = False) -> list[str]:
        """Start a process and return what it counted."""
        return self.counted(self.start(width, rotate=rotate))


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
    with Users(tmp_path) as users:
        with lock.open("w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            both = [users.start(32) for _ in range(2)]
            # Both are past their imports once they wait: neither can have loaded what the other has compiled before.
            deadline = time.monotonic() + 150
            while not all(has_open(pid, turn.name) for pid in both):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        assert sorted(users.counted(pid) for pid in both) == [[COMPILED], [LOADED]]
        assert users.counts(64) == [COMPILED]
        assert users.counts(64, rotate=True) == [LOADED, COMPILED]
        assert users.counts(32) == [LOADED]
        with (folder / "cpu" / "tiles.py").open("a") as file:
            file.write("\n")  # compiled into `multiply`; one stamp is enough for all kernels
        assert users.counts(64, rotate=True) == [COMPILED, COMPILED]


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
