"""Runs one function in several forked processes at once: torch is loaded once, as in the engine's forkserver."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import TypeVar

import msgspec

from ppengine.common import lifeline

T = TypeVar("T")


def in_forks(count: int, work: Callable[[int], T], kind: type[T]) -> list[T]:
    """Return what `work` returns in each of `count` forked processes, by number.

    Raises ValueError with the error of one that failed; the others end then. The caller has no threads.
    """
    pids, ends, parent = [], [], os.getpid()
    for number in range(count):
        read_end, write_end = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(read_end)
            lifeline.die_with(parent)
            os._exit(_run(work, number, write_end))
        os.close(write_end)
        pids.append(pid)
        ends.append(read_end)
    results, error = [], ""
    for read_end in ends:
        with os.fdopen(read_end, "rb") as file:
            said = file.read()
        if error:
            continue
        failed = not said or said[:1] != b"+"
        if failed:
            error = said[1:].decode(errors="replace") or "a measuring process was killed"
            _end(pids)
        else:
            results.append(msgspec.json.decode(said[1:], type=kind))
    for pid in pids:
        os.waitpid(pid, 0)
    if error:
        raise ValueError(error)
    return results


def _run(work: Callable[[int], object], number: int, write_end: int) -> int:
    try:
        said, code = b"+" + msgspec.json.encode(work(number)), 0
    except BaseException as error:  # noqa: BLE001 (the parent reports it)
        traceback.print_exc(file=sys.stderr)
        said, code = b"-" + f"{type(error).__name__}: {error}".encode(errors="replace"), 1
    with os.fdopen(write_end, "wb") as file:
        file.write(said)
    return code


def _end(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
