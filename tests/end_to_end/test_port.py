"""A console of another user attaches by TCP to a real engine: refused, allowed, at work, revoked."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")

from engines import wait_until
from ppengine.common.config import load_profile
from serving import Ran, Served
from slow_link import free_port


class Far:
    """A user elsewhere: no engine, and settings of its own."""

    def __init__(self, folder: Path) -> None:
        self.env = {
            **os.environ, "XDG_RUNTIME_DIR": str(folder), "XDG_CONFIG_HOME": str(folder / "config"), "LOGNAME": "far",
            "XDG_STATE_HOME": str(folder / "state"), "TERM": "xterm-256color",
        }  # fmt: skip

    def cli(self, *words: str) -> Ran:
        done = subprocess.run(
            [sys.executable, "-m", "ppconsole", *words], env=self.env, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=90,
        )  # fmt: skip
        return Ran(done.returncode, done.stdout, done.stderr)

    def copies(self) -> bytes:
        """Return the unpacked bytes of all recordings that were fetched; the newest may end in the middle."""
        paths = sorted((Path(self.env["XDG_STATE_HOME"]) / "ppconsole" / "remote").rglob("*.rec"))
        return b"".join(zlib.decompressobj(wbits=31).decompress(path.read_bytes()) for path in paths)

    def screen(self, *words: str, until: str, keys: str) -> tuple[str, int]:
        """Run a command in a terminal, press `keys` when `until` is on its screen; return its output and exit code."""
        pid, terminal = pty.fork()
        if pid == 0:
            os.execve(sys.executable, [sys.executable, "-m", "ppconsole", *words], self.env)
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 36, 120, 0, 0))
        os.set_blocking(terminal, False)
        text, pressed, end = "", False, time.monotonic() + 60
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            assert time.monotonic() < end, text[-3000:]
            try:
                text += os.read(terminal, 1 << 20).decode("utf-8", "replace")
            except (BlockingIOError, OSError):
                time.sleep(0.05)
            if until in text and not pressed:
                os.write(terminal, keys.encode())
                pressed = True
        os.close(terminal)
        return text, os.waitstatus_to_exitcode(ended[1])


@pytest.fixture
def far() -> Iterator[Far]:
    with tempfile.TemporaryDirectory(prefix="pp-", dir="/tmp") as name:
        yield Far(Path(name))


def test_a_user_elsewhere_is_refused_allowed_and_revoked(far: Far) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    # A name of its own: `incidents` lists those of earlier engines of the name, and other tests strike theirs.
    profile = msgspec.structs.replace(load_profile("tiny"), name="far-tiny")
    with Served(profile, "--set", f"console.listen={address}") as engine:
        assert engine.record.address == address
        server_key = engine.cli("key", "ls", "--json").json["server"]
        key = far.cli("key", "new").out.strip()
        assert far.cli("context", "add", "host", address, "--server-key", server_key).code == 0
        ran = far.cli("-e", "host", "status")
        assert ran.code == 4 and f"ppconsole key allow NAME {key}" in ran.error

        assert engine.cli("key", "allow", "far-user", key, "--role", "operator").code == 0
        assert far.cli("context", "use", "host").code == 0
        assert far.cli("status", "--json").json["engine"]["id"] == engine.config.id
        ran = far.cli("submit", "Once upon a time", "--max-tokens", "8", "--temperature", "0")
        answer = ran.out.strip()
        assert ran.code == 0 and len(answer) > 8, ran.err
        for words in (("explain",), ("events",), ("logs",), ("set-memory", "0.5", "--dry-run"), ("stacks", "--core")):
            ran = far.cli(*words)
            assert ran.code == 0, (words, ran.err)
        ran = far.cli("stop")
        assert ran.code == 4 and "key far-user is operator, stop needs admin" in ran.error
        ran = far.cli("incidents")
        assert ran.code == 0 and "no incident was kept" in ran.err, ran.err
        ran = far.cli("history")
        assert ran.code == 0 and engine.config.id in ran.out, ran.err
        kept = far.copies()
        assert engine.config.id.encode() in kept, "the search finds a text that is there"
        assert b"Once upon" not in kept and answer.encode() not in kept, "a viewer may read these files"

        text, code = far.screen("attach", address, "--server-key", server_key, until="SERVING", keys="q")
        assert code == 0 and "tiny" in text

        lines = [json.loads(line) for line in (engine.engine.run_dir / "audit.jsonl").read_text().splitlines()]
        assert {line["principal"] for line in lines if line["verb"] in ("submit", "stop")} == {"far-user"}
        assert engine.cli("key", "revoke", "far-user").code == 0
        wait_until(lambda: far.cli("status").code == 4, "the revoked key is refused")
        assert engine.cli("status").code == 0
