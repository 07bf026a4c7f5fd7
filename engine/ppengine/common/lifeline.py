"""The lifeline: a pipe that a parent holds open, so that a child leaves when the parent is gone, however it went.

The parent keeps the write end and never writes again after one greeting line: its own pid, or 0. Its end, even by
SIGKILL, closes the pipe, and a thread of the child that waits on the read end sees end of file.

A child that is stopped, or that holds the GIL in C code, has no thread that could see it. For that case
PR_SET_PDEATHSIG has the kernel end it; but that signal fires when the parent *thread* that started the child ends, so
the greeting names the pid only when that was the parent's main thread. A child with work of its own to do at the end
(the gateway, the supervisor: both clean up) gives `on_close` and is spared the signal.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import select
import signal
import threading
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_GREETING_BYTES = 32


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--lifeline FD` to the arguments of a child's entry point; hand the value to `adopt`."""
    text = "read end of the parent's pipe; its end of file ends this process"
    parser.add_argument("--lifeline", type=int, metavar="FD", default=None, help=text)


def open_pipe() -> tuple[int, int]:
    """Return (read end for the child, write end to keep) of a new lifeline, greeting written; neither is inherited."""
    read_end, write_end = os.pipe()
    owner = os.getpid() if threading.current_thread() is threading.main_thread() else 0
    os.write(write_end, b"%d\n" % owner)
    return read_end, write_end


def adopt(fd: int | None, on_close: Callable[[], None] | None = None) -> None:
    """Tie this process to its parent; call it first thing. `fd` None (started by hand): nothing is tied.

    When the parent is gone, `on_close` is called on a thread of its own; None leaves at once with `os._exit(1)`, and
    lets the kernel kill this process should it be stuck. Exits with one line if `fd` is not an open descriptor.
    """
    if fd is None:
        return
    try:
        os.set_inheritable(fd, False)
    except OSError as error:
        raise SystemExit(f"error: --lifeline {fd}: {error.strerror}; it must be an open pipe") from None
    parent = _greeting(fd)
    if on_close is None and parent:
        die_with(parent)
    watch(fd, on_close or _leave)


def watch(fd: int, on_close: Callable[[], None]) -> threading.Thread:
    """Start and return a daemon thread that blocks on `fd` and calls `on_close` at its end of file."""
    thread = threading.Thread(target=_wait, args=(fd, on_close), name="lifeline", daemon=True)
    thread.start()
    return thread


def _wait(fd: int, on_close: Callable[[], None]) -> None:
    while os.read(fd, _GREETING_BYTES):
        pass
    os.close(fd)
    on_close()


def _greeting(fd: int) -> int:
    """Return the pid in the greeting, 0 if there is none. It was written before the fork: no need to wait."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    if not any(events & select.POLLIN for _, events in poller.poll(0)):
        return 0
    line = os.read(fd, _GREETING_BYTES).strip()
    return int(line) if line.isdigit() else 0


def die_with(parent: int) -> None:
    """Have the kernel send SIGKILL when `parent` goes; leave now if it went before the request."""
    libc = ctypes.CDLL(None, use_errno=True)
    # Where prctl is refused (a seccomp profile), the pipe alone has to do.
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0 and os.getppid() != parent:
        _leave()


def _leave() -> None:
    os._exit(1)
