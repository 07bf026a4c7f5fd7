"""Processes of the stage tests: forked from one nursery, so that torch is loaded once and not for each of them."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
import time
from pathlib import Path

from ppengine.common.child_process import Child
from ppengine.supervisor.launch.forkserver_client import Nursery


def fork(module: str, args: list[str], log: Path) -> Child:
    """Return a process that runs `main` of `module`, which may be one of these tests."""
    made, deadline = nursery(), time.monotonic() + 60
    made.order(module, args, log)
    while (child := made.born()) is None:
        assert time.monotonic() < deadline, "nothing was born within 60 s"
        assert not made.lost(), made.lost()
        time.sleep(0.005)
    return child


@functools.cache
def nursery() -> Nursery:
    """The one of this process; it ends with it."""
    folder = Path(tempfile.mkdtemp(prefix="nursery-"))
    atexit.register(shutil.rmtree, folder)
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), before]))
    try:
        return Nursery("ppengine.stage.worker", folder)
    finally:
        os.environ["PYTHONPATH"] = before
