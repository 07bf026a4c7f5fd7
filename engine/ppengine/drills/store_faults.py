"""Faults of stores and of the files of their backends. Requests compute on, so no stage is at fault."""

from __future__ import annotations

import os
import random
import resource
import signal
from collections.abc import Callable
from pathlib import Path

from ppengine.drills import cgroups
from ppengine.drills.registry import FaultError, Undo, outside
from ppengine.drills.target import Target, pause

_SHARE = 0.001
"""Share of a processor that a slow store has."""
_FILE_BYTES = 4096
"""Most bytes of a file that a store may write whose disk is full."""


@outside("none", "store", on="store")
def store_kill(target: Target) -> None:
    """The store of stage K gets SIGKILL. Its jobs fail, and the supervisor starts another one at once.

    Verdict: no fault, or the store has ended, if another one is not there within a second.
    """
    os.kill(target.store, signal.SIGKILL)


@outside("hang", "store", clears=True, on="store")
def store_stop(target: Target) -> Undo:
    """The store of stage K gets SIGSTOP: it owes answers, and no request waits beyond its deadline.

    Verdict: the store is stopped by a signal (state T), with the jobs that it owes.
    """
    return pause(target.store)


@outside("slow", "store", clears=True, on="store", held_out=True)
def store_slow(target: Target) -> Undo:
    """The store of stage K gets a thousandth of a processor from its cgroup.

    Verdict: the store hangs, or a backend is slow, with the age of the oldest job.
    """
    return cgroups.throttle(target.store, _SHARE)


@outside("wrong", "store", on="store")
def store_flip(target: Target) -> None:
    """A byte changes in each shard that the backends have in files for stage K.

    Verdict: the backend gave corrupt shards; each is a miss, and no token comes from it.
    """
    _change(target, _flip)


@outside("wrong", "store", on="store", held_out=True)
def store_short(target: Target) -> None:
    """Each shard that the backends have in files for stage K loses its last byte.

    Verdict: the backend gave corrupt shards; each is a miss, and no token comes from it.
    """
    _change(target, lambda path: os.truncate(path, path.stat().st_size - 1))


@outside("slow", "store", clears=True, on="store")
def store_full(target: Target) -> Undo:
    """The store of stage K may write no file of more than 4 KiB, as if the disk were full.

    Verdict: the backend is broken, with the error of the system.
    """
    pid = target.store
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (_FILE_BYTES, resource.RLIM_INFINITY))
    return lambda: resource.prlimit(pid, resource.RLIMIT_FSIZE, before) and None


def _change(target: Target, change: Callable[[Path], None]) -> None:
    """Apply `change` to each shard of the store's place. Raises FaultError if there is none."""
    backends = target.config.profile.tiers.backends
    folders = [Path(backend.url) for backend in backends.values() if backend.kind == "files"]
    part = f"{target.stage}.{target.rank}"
    shards = [path for folder in folders for path in folder.glob(f"{part}/**/*") if path.is_file()]
    if not shards:
        raise FaultError(f"no backend has a file for stage {target.stage}; it needs one of kind files, with chunks")
    for path in shards:
        change(path)


def _flip(path: Path) -> None:
    """Change one byte of a file, which keeps its size and name."""
    place = random.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0x10]))
