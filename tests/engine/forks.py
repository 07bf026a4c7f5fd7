"""Processes of the stage tests: forked from one fork server, so that torch is loaded once and not for each of them."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
import time
from pathlib import Path

from ppengine.common.child_process import Child
from ppengine.supervisor.launch.forkserver_client import ForkServer


def fork(module: str, args: list[str], log: Path) -> Child:
    """Return a process that runs `main` of `module`, which may be one of these tests."""
    made, deadline = fork_server(), time.monotonic() + 60
    made.order(module, args, log)
    while (child := made.take()) is None:
        assert time.monotonic() < deadline, "nothing was forked within 60 s"
        assert not made.exit_text(), made.exit_text()
        time.sleep(0.005)
    return child


@functools.cache
def fork_server() -> ForkServer:
    """The one of this process; it ends with it."""
    folder = Path(tempfile.mkdtemp(prefix="forkserver-"))
    atexit.register(shutil.rmtree, folder)
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), before]))
    try:
        return ForkServer("ppengine.stage.worker", folder)
    finally:
        os.environ["PYTHONPATH"] = before
