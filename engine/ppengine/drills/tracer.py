"""Stops one thread of another process as a debugger does (ptrace), and continues it."""

from __future__ import annotations

import ctypes
import os
import threading

from ppengine.drills.registry import FaultError

_ATTACH, _DETACH = 16, 17
_WALL = 0x40000000
_WAIT_S = 2.0
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long


class Tracer:
    """Keeps process `pid` stopped until `detach`. Raises FaultError if tracing is not allowed.

    It works in a thread of its own, because the kernel binds a tracer to one thread.
    """

    def __init__(self, pid: int) -> None:
        self._pid, self._error = pid, ""
        self._attached, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="tracer", daemon=True)
        self._thread.start()
        self._attached.wait(_WAIT_S)
        if self._error:
            raise FaultError(f"pid {pid} cannot be traced here: {self._error}")

    def detach(self) -> None:
        """Continue the process."""
        self._over.set()
        self._thread.join(_WAIT_S)

    def _run(self) -> None:
        if _libc.ptrace(_ATTACH, self._pid, None, None) != 0:
            self._error = os.strerror(ctypes.get_errno())
            self._attached.set()
            return
        os.waitpid(self._pid, _WALL)
        self._attached.set()
        self._over.wait()
        _libc.ptrace(_DETACH, self._pid, None, None)
