"""A child that works for its parent by messages. One that is late is killed, and another one takes its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ppengine.common.child_process import Child, spawn


class HelperChild:
    """The present child, if there is one. Each has a routing id of its own, so that messages of others are known."""

    def __init__(self, log: Path, send: Callable[[bytes, bytes], None]) -> None:
        """`send` sends a message to the routing id of a process."""
        self._log, self._send = log, send
        self.process: Child | None = None
        self.ready = False
        """Whether the present child has sent its first message, and so takes some."""
        self._name = b""
        self._count = 0
        self._killed: list[Child] = []
        """Children that were killed and whose exit status has not come."""

    def start(self, module: str, task: str, arguments: Sequence[str]) -> None:
        """Start a child whose routing id begins with `task`. Raises OSError if no process or descriptor is left."""
        self._count += 1
        name = f"{task}-{self._count}"
        self.process = spawn(module, [*arguments, "--name", name], log=self._log)
        self._name, self.ready = name.encode(), False

    def is_sender(self, name: bytes) -> bool:
        """Return whether a message with this routing id is of the present child."""
        return self.process is not None and name == self._name

    def send(self, payload: bytes) -> None:
        """Send a message to the present child."""
        self._send(self._name, payload)

    def drop(self) -> None:
        """End the present child without waiting for its exit status."""
        self.ready = False
        if self.process is not None:
            self.process.kill()
            self.process.close()
            self._killed.append(self.process)
            self.process = None

    def reap(self) -> None:
        """Take the exit status of killed children."""
        self._killed = [child for child in self._killed if child.poll() is None]

    @property
    def gone(self) -> bool:
        """Whether there is no child, and no killed one whose exit status has not come."""
        return self.process is None and not self._killed
