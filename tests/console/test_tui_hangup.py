"""Ends of a console that no key asks for: its terminal has gone, or a signal came."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time

import pytest

ALTERNATE_SCREEN, SCREEN_BACK, CURSOR_BACK = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25h"


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_the_terminal_as_it_was(number: signal.Signals) -> None:
    terminal, inner = pty.openpty()
    before = termios.tcgetattr(inner)
    command = [sys.executable, "-m", "ppconsole", "replay", "--sample", "foreign-device"]
    process = subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, start_new_session=True)
    try:
        shown, end = b"", time.monotonic() + 60
        while b"REPLAY" not in shown:
            assert time.monotonic() < end, shown[-2000:]
            shown += os.read(terminal, 65536)
        assert ALTERNATE_SCREEN in shown and SCREEN_BACK not in shown
        process.send_signal(number)
        while process.poll() is None or select.select([terminal], [], [], 0)[0]:
            assert time.monotonic() < end, shown[-2000:]
            if select.select([terminal], [], [], 0.05)[0]:
                shown += os.read(terminal, 65536)
        assert process.returncode == 128 + number
        assert SCREEN_BACK in shown and CURSOR_BACK in shown
        assert termios.tcgetattr(inner) == before, "echo and line editing are back"
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
        os.close(inner)
