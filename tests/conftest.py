"""Read before any test module: one OpenMP thread a process, since tests and engines share the cores.

torch reads it when it is loaded. With its default of a thread a core, four workers spent most of their time in
barriers that waited for threads of each other.
"""

import atexit
import contextlib
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Engines keep logs and incidents in the state folder of the user: those of tests go to a folder of their own.
_state = tempfile.mkdtemp(prefix="ppconsole-state-")
os.environ["XDG_STATE_HOME"] = _state
atexit.register(shutil.rmtree, _state, ignore_errors=True)

# Keys of tests are made in a folder of their own, not among those of the user.
_config = tempfile.mkdtemp(prefix="ppconsole-config-")
os.environ["XDG_CONFIG_HOME"] = _config
atexit.register(shutil.rmtree, _config, ignore_errors=True)

# What a shell runs in its background ignores Ctrl-C, under nohup the end of a terminal as well, and children inherit
# that: tests that send those signals would wait for ever. A handler is not inherited.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

if not Path("/dev/nvidiactl").exists():
    # Triton decides while it is loaded whether its own library is interpreted, and transformers loads it, so it is
    # loaded here. The variable goes again: engines that tests start must not interpret. tests/gpu does the rest.
    os.environ["TRITON_INTERPRET"] = "1"
    with contextlib.suppress(ModuleNotFoundError):
        import triton.language  # noqa: F401
    del os.environ["TRITON_INTERPRET"]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are imported, and leave the modules out of later collections: none of them goes.

    There are more than a million objects with torch and transformers, and each full collection looked at all.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


_DESCRIPTORS_MOST = 100
"""Descriptors that a test may leave open."""


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.fixture(autouse=True)
def _few_descriptors_stay_open() -> Iterator[None]:
    """Fail a test that leaves many descriptors open: later tests of its process would fail for them, or hang."""
    before = _descriptors()
    yield
    left = _descriptors() - before
    assert left <= _DESCRIPTORS_MOST, f"{left} descriptors were left open, at most {_DESCRIPTORS_MOST} may be"
