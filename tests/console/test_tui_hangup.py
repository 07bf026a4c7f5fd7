"""A console whose terminal has gone ends by itself: without a controlling terminal no signal ends it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time


def test_a_console_ends_with_its_terminal() -> None:
    terminal, inner = pty.openpty()
    command = [sys.executable, "-m", "ppconsole", "replay", "--sample", "foreign-device"]
    # In a session of its own, this terminal is not the controlling one.
    process = subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, start_new_session=True)
    os.close(inner)
    try:
        shown, end = b"", time.monotonic() + 60
        while b"REPLAY" not in shown:
            assert time.monotonic() < end, shown[-2000:]
            shown += os.read(terminal, 65536)
        os.close(terminal)
        process.wait(30)
    finally:
        process.kill()
        process.wait()
