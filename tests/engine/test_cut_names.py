"""The kernel cuts the name of a process after 15 bytes, also inside a character; every reader of /proc bears it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from ppengine.bench.process_cpu import cpu_by_module
from ppengine.common import procfs
from ppengine.common.child_process import session
from ppengine.protocol.discovery import process_start

CODE = r"""
import sys
open("/proc/self/comm", "wb").write(b"/home/a\xe7\x94\xa8\xe6\x88\xb7\xe5\x90\x8d")
print("named", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def pid() -> Iterator[int]:
    """A process in a session of its own, whose name is cut inside its third ideograph."""
    command = [sys.executable, "-c", CODE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None and process.stdout.readline() == b"named\n"
        yield process.pid
        process.kill()


def test_such_a_process_is_read_as_any_other(pid: int) -> None:
    seen = procfs.read_stat(pid)
    assert seen is not None and process_start(pid) == seen.start
    assert session(pid) == [pid]
    assert procfs.catches(pid, signal.SIGINT)


def test_its_processor_time_is_counted(pid: int) -> None:
    before = cpu_by_module(os.getpid())
    assert before["other"] >= cpu_by_module(pid)["other"] > 0
