"""Compilation by numba: a kernel is compiled on its first call and cached beside its source for the
next process. Stages that start together need the same kernels: one compiles, the others load.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core.caching import IndexDataCacheFile
from numba.core.types import unliteral

from ppkernels.cpu.vectors import VECTOR_BYTES

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

REORDER = {"reassoc", "contract", "arcp", "nsz"}
"""Fast-math flags: sums may be reordered to vectorize them; NaN and infinity stay."""

TURN_S = 60.0
"""Seconds that a process waits for another one to compile a kernel; then it compiles that kernel, too."""


def compiled(function: Kernel) -> Kernel:
    """Return `function` as machine code, which runs without the GIL and checks no index."""
    kernel: Any = numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=REORDER)(function)
    # numba's cache knows the kernel's own file only. Other files and the vector width are compiled into it, too.
    cache, make_file = kernel._cache, cast(Callable[..., Any], IndexDataCacheFile)
    # NUMBA_BOUNDSCHECK=1, of tests, changes the code as well.
    checked = ".checked" if getattr(numba.config, "BOUNDSCHECK", None) else ""
    name = f"{cache._impl.filename_base}.{VECTOR_BYTES}{checked}"
    cache._cache_file = make_file(cache.cache_path, name, _sources())
    lock = Path(cache.cache_path, f"{name}.lock")
    kernel.compile = functools.partial(_compile_alone, kernel.compile, lock)
    return cast(Kernel, kernel)


def _compile_alone(compile_or_load: Callable[[Any], Any], lock: Path, types: tuple[Any, ...]) -> Any:
    # numba has a type for each constant; a kernel called with 0 and with a variable would be compiled twice.
    types = tuple(cast(Any, unliteral)(each) for each in types)
    with _turn(lock):
        return compile_or_load(types)


_compiling = threading.RLock()
_held: set[Path] = set()
"""Locks of the kernels under way in this process: a kernel compiles those that it calls."""


@contextlib.contextmanager
def _turn(lock: Path) -> Iterator[None]:
    """Let one process at a time compile the kernel of `lock`; another one waits for `TURN_S` seconds at most."""
    with _compiling, contextlib.ExitStack() as stack:
        if lock in _held:
            yield
            return
        # A cache that cannot be written is no reason not to compile.
        with contextlib.suppress(OSError):
            _lock(stack.enter_context(lock.open("w")).fileno(), time.monotonic() + TURN_S)
        _held.add(lock)
        try:
            yield
        finally:
            _held.discard(lock)


def _lock(descriptor: int, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)
        else:
            return


@functools.cache
def _sources() -> list[tuple[str, int, int]]:
    """Return name, time and size of each file here: a change makes cached code stale."""
    stats = [(path.name, path.stat()) for path in sorted(Path(__file__).parent.glob("*.py"))]
    return [(name, stat.st_mtime_ns, stat.st_size) for name, stat in stats]
