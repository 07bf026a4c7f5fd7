"""The lifeline: a child leaves when its parent is gone, also when it is stuck."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from engines import alive, wait_until
from ppengine.common import lifeline

HERE = Path(__file__).parent
PARENT = """
import subprocess, sys, threading
from ppengine.common import lifeline
read_end, write_end = lifeline.open_pipe()
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(read_end)], pass_fds=(read_end,))
print(child.pid, flush=True)
threading.Event().wait()
"""
CHILD = """
import sys, time
from pathlib import Path
from ppengine.common import lifeline
lifeline.adopt(int(sys.argv[1]){on_close})
Path({mark!r}).touch()
while True:
    time.sleep(60)
"""


def family(tmp_path: Path, on_close: str = "") -> tuple[subprocess.Popen[str], int]:
    """Start a parent with a child that has adopted the lifeline; return both."""
    mark = tmp_path / "ready"
    child = CHILD.format(on_close=on_close, mark=str(mark))
    parent = subprocess.Popen([sys.executable, "-c", PARENT, child], stdout=subprocess.PIPE, text=True)
    with parent.stdout:
        pid = int(parent.stdout.readline())
    wait_until(mark.exists, "the child adopts")
    return parent, pid


@pytest.mark.parametrize("stopped", [False, True])
def test_child_leaves_when_parent_is_killed(tmp_path: Path, stopped: bool) -> None:
    parent, pid = family(tmp_path)
    if stopped:
        os.kill(pid, signal.SIGSTOP)
    parent.kill()
    parent.wait(20)
    wait_until(lambda: not alive(pid), "the child is gone")


def test_child_with_work_at_the_end_does_it(tmp_path: Path) -> None:
    done = tmp_path / "done"
    work = f", lambda: (time.sleep(0.05), Path({str(done)!r}).touch(), __import__('os')._exit(3))"
    parent, pid = family(tmp_path, work)
    parent.kill()
    parent.wait(20)
    wait_until(lambda: not alive(pid), "the child is gone")
    assert done.exists()


def test_watch_calls_back_at_end_of_file_only() -> None:
    read_end, write_end = lifeline.open_pipe()
    closed = threading.Event()
    thread = lifeline.watch(read_end, closed.set)
    assert not closed.wait(0.05)
    os.close(write_end)
    assert closed.wait(20)
    thread.join(5)
    assert not thread.is_alive()


def test_pipe_names_parent_only_from_the_main_thread() -> None:
    found: list[bytes] = []

    def greeting() -> None:
        read_end, write_end = lifeline.open_pipe()
        os.close(write_end)
        with os.fdopen(read_end, "rb") as file:
            found.append(file.read())

    greeting()
    thread = threading.Thread(target=greeting)
    thread.start()
    thread.join()
    assert found == [b"%d\n" % os.getpid(), b"0\n"]


def test_no_lifeline_ties_nothing() -> None:
    before = threading.active_count()
    lifeline.adopt(None)
    assert threading.active_count() == before


def test_closed_descriptor_is_refused() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    os.close(write_end)
    with pytest.raises(SystemExit, match=f"--lifeline {read_end}: Bad file descriptor; it must be an open pipe"):
        lifeline.adopt(read_end)


def test_an_engine_ends_with_the_tests_that_started_it(tmp_path: Path) -> None:
    """They may be killed, and then no fixture ends it."""
    tests = """
import sys, threading
from pathlib import Path
from engines import Engine
engine = Engine(Path(sys.argv[1]), ["standins.supervisor", "orphan", "1"], {"STANDIN_REPORTS": "/dev/null"})
print(engine.process.pid, flush=True)
threading.Event().wait()
"""
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    command, environment = [sys.executable, "-c", tests, str(tmp_path / "run")], {**os.environ, "PYTHONPATH": path}
    parent = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    with parent.stdout:
        pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    parent.wait(20)
    wait_until(lambda: not alive(pid), "its supervisor has ended")
