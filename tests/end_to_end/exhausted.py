"""Limits of the host for tests: descriptors, disks, the folder of rings; and the verdicts about them."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cgroups import moved
from ppengine.common import procfs
from ppengine.common.oom_kills import LOOK_S
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.snapshot import Snapshot, Verdict
from ppengine.protocol.verbs import Submit
from serving import LASTING_S, Served

from profiles import small

PROMPT, TOKENS, LIMIT_S = list(range(3, 40)), 2000, 4.0
FEW = 200
"""Tokens of a request that the next line of a test disturbs: they take longer than that."""
MEMORY_LIMIT = 16 << 10


def serve(folder: Path, limit_s: float = 60.0, *, chats: bool = False) -> Served:
    """Start an engine whose requests end `limit_s` seconds after a stage could not be restarted.

    It takes `chats` if its folder has a tokenizer.
    """
    model = {"max_model_len": 2048, "skip_tokenizer": not chats}
    return Served(small(folder, stages=2, model=model, parallel={"restart_limit_s": limit_s}), step_s=LASTING_S)


@contextlib.contextmanager
def out_of_files(pid: int) -> Iterator[int]:
    """Leave a process no descriptor beside those that it has; yields the limit."""
    used = {int(one.name) for one in Path(f"/proc/{pid}/fd").iterdir()}
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    limit = min(set(range(len(used) + 1)) - used)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield limit
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def starved(pid: int) -> Iterator[None]:
    """Leave a process no memory: its next pages end it. It is stopped until its parent has seen its cgroup."""
    os.kill(pid, signal.SIGSTOP)
    try:
        with moved(pid, "memory", memory=MEMORY_LIMIT):
            time.sleep(3 * LOOK_S)
            os.kill(pid, signal.SIGCONT)
            yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def renderer(engine: Served) -> int:
    """Return the process of chat templates."""
    found = procfs.children([engine.pids["texts"]])
    return next(pid for pid, (_, module) in found.items() if module == "ppengine.templates")


def forkserver(engine: Served) -> int:
    """Return the pid of the fork server."""
    found = procfs.children([engine.engine.process.pid])
    return next(pid for pid, (_, module) in found.items() if module.endswith("forkserver"))


def has(cause: str, words: str = "") -> Callable[[Snapshot], list[Verdict]]:
    """Return the condition that a root verdict has a cause, and words in its summary."""

    def shown(picture: Snapshot) -> list[Verdict]:
        return [one for one in picture.verdicts if one.root and one.cause == cause and words in one.summary]

    return shown


def submit(**fields: object) -> Submit:
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    return Submit(prompt_token_ids=PROMPT, sampling=params, **fields)  # type: ignore[arg-type]


class OnSmallDisk(Served):
    """An engine whose run folder is on a disk of its own, of a few MiB."""

    MIB = 8

    def start(self) -> None:
        """Mount the disk before the first start."""
        if not os.path.ismount(self.runtime):
            text = self.file.read_text()
            mount = ["mount", "-t", "tmpfs", "-o", f"size={self.MIB}m,mode=0700", "tmpfs", str(self.runtime)]
            ran = subprocess.run(mount, capture_output=True, text=True)
            if ran.returncode:
                pytest.skip(f"no disk can be mounted here: {ran.stderr.strip()}")
            self.file.write_text(text)
        super().start()

    def remove(self) -> None:
        """Unmount it at the end."""
        super().remove()
        subprocess.run(["umount", "-l", str(self.runtime)], capture_output=True)
        shutil.rmtree(self.runtime)

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """Fill the disk to the last byte."""
        filler = self.runtime / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        assert os.statvfs(self.runtime).f_bavail == 0
        try:
            yield
        finally:
            filler.unlink()


@contextlib.contextmanager
def unreachable(engine: Served, name: str) -> Iterator[None]:
    """Put a socket that answers nothing in place of one of the engine: later connections end there."""
    path = Path(engine.config.endpoint(name).removeprefix("ipc://"))
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        yield
    path.unlink()


@contextlib.contextmanager
def no_room_for_rings(engine: Served) -> Iterator[None]:
    """Put a disk of 16 KiB over the folder of rings."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k,mode=0700", "tmpfs", engine.config.ring_dir]
    ran = subprocess.run(mount, capture_output=True, text=True)
    if ran.returncode:
        pytest.skip(f"no disk can be mounted here: {ran.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", engine.config.ring_dir], check=True)
