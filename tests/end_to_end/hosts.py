"""Several hosts on one machine: names, addresses, processes, clocks and files in memory of their own.

Each host has namespaces of network, mounts, names, processes and time. Nothing in them reaches the machine's network.
Files on disk are the machine's, as if on a shared file system.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import host_network
from host_network import CLONE_NEWPID, OWN, SUBNET, call

SHIFT_S = 1000
"""CLOCK_MONOTONIC of host N is ahead of the machine's by N times as much."""
PRIVATE = ("/run", "/dev/shm")
"""Folders that each host has in memory of its own."""
ENVIRONMENT = {
    "XDG_RUNTIME_DIR": "/run/runtime",
    "XDG_STATE_HOME": "/run/state",
    "XDG_CONFIG_HOME": "/run/config",
    "TMPDIR": "/run/tmp",
}
_LISTEN = "0A"
"""State of a listening socket in /proc/net/tcp."""
_MADE_S = 20.0
"""Hosts are made and killed within that time."""


@dataclass(eq=False)
class Host:
    """One host. `run` and `popen` are those of subprocess, for processes on it."""

    index: int
    init: int
    """Pid of its first process, as the machine sees it."""
    _control: socket.socket
    _pidfd: int
    _mounts: int
    """Inode of its mount namespace, by which its processes are known."""
    _children: list[subprocess.Popen[Any]] = field(default_factory=list)
    _up: bool = True
    _shape: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def name(self) -> str:
        """Its host name."""
        return f"host{self.index}"

    @property
    def address(self) -> str:
        """Its IP address."""
        return f"{SUBNET}{self.index + 1}"

    @property
    def lives(self) -> bool:
        """Whether it runs: it is not killed."""
        return self._pidfd >= 0 and not select.select([self._pidfd], [], [], 0)[0]

    def path(self, inside: str | Path) -> Path:
        """Return where the machine sees a file of the host, those in its own memory too."""
        return Path(f"/proc/{self.init}/root") / str(inside).lstrip("/")

    def popen(
        self, args: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a process on the host. `env` is added to ours. Its pid is the machine's."""
        folder = cwd or Path.cwd()

        def enter() -> None:
            call("setns", self._pidfd, OWN)
            os.chdir(folder)

        with self._forks_inside():
            child = subprocess.Popen(
                args, env={**os.environ, **ENVIRONMENT, **(env or {})}, preexec_fn=enter, **options
            )
        self._children.append(child)
        return child

    def run(
        self,
        args: Sequence[str],
        *,
        timeout: float = 60,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        stdin: int | None = subprocess.DEVNULL,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the host and return what it printed. Raises CalledProcessError, with that, if it failed."""
        with self.popen(
            args, env=env, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            finally:
                process.kill()
        ran = subprocess.CompletedProcess(args, process.returncode, out, err)
        if check and ran.returncode:
            error = subprocess.CalledProcessError(ran.returncode, args, out, err)
            error.add_note(out + err)
            raise error
        return ran

    def processes(self) -> list[int]:
        """Return the pids of its processes, as the machine sees them; its init is none of them."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (path / "ns/mnt").stat().st_ino == self._mounts and int(path.name) != self.init:
                    found.append(int(path.name))
        return found

    def listens(self, port: int) -> bool:
        """Return whether a process on the host listens on that TCP port."""
        tables = [Path(f"/proc/{self.init}/net/{name}").read_text() for name in ("tcp", "tcp6")]
        rows = [line.split() for table in tables for line in table.splitlines()[1:]]
        return any(row[1].endswith(f":{port:04X}") and row[3] == _LISTEN for row in rows)

    def kill(self) -> None:
        """Kill all processes at once. Their connections end, as when a machine's kernel outlives its processes.

        A loss of power is `cut` before `kill`.
        """
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        # An init is gone when all else in its namespace is, and is reaped.
        for child in self._children:
            child.wait(_MADE_S)
        assert select.select([self._pidfd], [], [], _MADE_S)[0], f"{self.name} is killed and does not end"

    def cut(self) -> None:
        """Pull the cable: frames to and from the host vanish, from this moment."""
        self._up = False
        self._order()

    def join(self) -> None:
        """Put the cable back."""
        self._up = True
        self._order()

    def shape(self, *, delay_ms: float = 0.0, loss_percent: float = 0.0, rate_mbit: float = 0.0) -> None:
        """Delay, lose and slow down all frames that the host sends from now on. `rate_mbit` 0: no limit."""
        self._shape = (delay_ms / 1e3, loss_percent / 100, rate_mbit * 1e6 / 8)
        self._order()

    def _order(self) -> None:
        self._control.send(json.dumps([self.index, self._up, *self._shape]).encode())
        if self._control.recv(100) != b"done":
            raise ConnectionError("the network of the hosts has ended")

    @contextlib.contextmanager
    def _forks_inside(self) -> Iterator[None]:
        """Have this thread's next child be in the host's process namespace: one is entered by a fork alone."""
        with Path("/proc/self/ns/pid").open() as own:
            call("setns", self._pidfd, CLONE_NEWPID)
            try:
                yield
            finally:
                call("setns", own.fileno(), CLONE_NEWPID)

    def close(self) -> None:
        """Kill it and forget it."""
        if self._pidfd >= 0:
            self.kill()
            os.close(self._pidfd)
            self._pidfd = -1


class Hosts(list[Host]):
    """`with Hosts(3) as hosts`: that many hosts, joined by a network. Leaving ends them; so does our own end."""

    def __init__(self, count: int, private: Sequence[str | Path] = ()) -> None:
        """Prepare. `private`: further folders that each host is to have in memory of its own."""
        super().__init__()
        self._count = count
        self._private = [*PRIVATE, *map(str, private)]

    def __enter__(self) -> Hosts:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [os.getpid(), theirs.fileno(), self._count, SHIFT_S, *self._private]
        self._network = subprocess.Popen(
            [sys.executable, "-I", host_network.__file__, *map(str, words)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        theirs.close()
        self._control.settimeout(_MADE_S)
        try:
            if not (made := self._control.recv(4096)):
                raise OSError(self._network.communicate(timeout=_MADE_S)[1].strip())
            for index, init in enumerate(json.loads(made)):
                mounts = Path(f"/proc/{init}/ns/mnt").stat().st_ino
                self.append(Host(index, init, self._control, os.pidfd_open(init), mounts))
                for folder in ENVIRONMENT.values():
                    self[-1].path(folder).mkdir(mode=0o700)
        except BaseException:
            self._network.kill()
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in self:
            host.close()
        self.clear()
        self._control.close()
        self._network.communicate(timeout=_MADE_S)


def running(pid: int) -> bool:
    """Whether a process is there and runs: a machine's init may be slow to reap."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@functools.cache
def why_not() -> str | None:
    """Return why this machine cannot have hosts; None: it can."""
    try:
        with Hosts(1) as (host,):
            host.run(["true"])
    except (OSError, subprocess.SubprocessError) as error:
        return f"no hosts on this machine, which takes root and /dev/net/tun: {error}"
    return None
