"""Pasting: the parser on bytes in any pieces, and the console on a real pseudo-terminal."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ppconsole.widgets.driver import ESCAPE_S, PasteParser
from textual import events

COLOURED = "AAA \x1b[31mBBB\x1b[0m CCC"
CHILD = """
import asyncio, json, sys
sys.path.insert(0, {tests!r})
import snapshots
from fake_source import FakeSource
from ppconsole.app import run_console
class Lively(FakeSource):
    async def start(self, on_update):
        await super().start(on_update)
        self.sender = asyncio.create_task(self.again())
    async def again(self):
        while True:
            await asyncio.sleep(0.2)
            self.send(self.picture)
source = Lively(snapshots.snapshot(2, 2))
run_console(source, read_only=False, title="")
json.dump([verb.prompt for verb in source.acted()], open({out!r}, "w"))
"""


def read(*pieces: str) -> list[str]:
    """Return the keys and the pastes that the parser finds in `pieces`, one read each."""
    parser = PasteParser()
    found = [message for piece in pieces for message in parser.feed(piece)]
    return [message.text if isinstance(message, events.Paste) else getattr(message, "key", "?") for message in found]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 100])
def test_a_bracketed_paste_is_one_event_in_order_and_without_controls(size: int) -> None:
    data = f"x\x1b[200~{COLOURED}\x1b[201~y\x1b[200~two\r\nlines\ttab\x1b[A\x1b[201~\x1b[A"
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    assert read(*pieces) == ["x", "AAA BBB CCC", "y", "two\nlines\ttab", "up"]


def test_a_paste_that_is_not_over_holds_no_key_and_an_escape_is_still_one() -> None:
    assert read("\x1b[200~abc", "\x1b[B") == []
    parser = PasteParser()
    assert not list(parser.feed("\x1b"))
    time.sleep(0.15)
    assert [message.key for message in parser.tick()] == ["escape"]


def test_an_escape_alone_is_a_key_soon_and_one_of_a_sequence_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Textual looks at most ten times a second: Esc took longer than the tenth in which a key is answered."""
    ours, theirs = os.pipe()
    with os.fdopen(ours) as terminal:
        monkeypatch.setattr("sys.__stdin__", terminal)
        parser = PasteParser()
        assert not list(parser.feed("\x1b"))
        begun = time.monotonic()
        assert [message.key for message in parser.tick()] == ["escape"]
        assert time.monotonic() - begun >= ESCAPE_S
        assert ESCAPE_S < 0.05
        assert not list(parser.feed("\x1b"))
        os.write(theirs, b"[A")
        assert not list(parser.tick()), "the rest of the sequence is there"
        assert [message.key for message in parser.feed("[A")] == ["up"]
    os.close(theirs)


class Terminal:
    """The console on a pseudo-terminal, in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "prompts.json"
        parent, child = pty.openpty()
        code = CHILD.format(tests=str(Path(__file__).parent), out=str(self.out))
        environ = {
            **os.environ,
            "TERM": "xterm-256color",
            "COLUMNS": "80",
            "LINES": "24",
            "XDG_STATE_HOME": str(folder),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=child, stdout=child, stderr=child, env=environ, start_new_session=True
        )
        os.close(child)
        self._terminal = parent
        self._drawn = b""

    def until(self, text: bytes) -> None:
        """Wait until the console has drawn `text`."""
        end = time.monotonic() + 20
        while text not in self._drawn:
            assert time.monotonic() < end, f"{text!r} was not drawn: {self._drawn[-2000:]!r}"
            if select.select([self._terminal], [], [], 0.1)[0]:
                self._drawn += os.read(self._terminal, 65536)

    def write(self, data: str) -> None:
        """Type or paste `data`; text drawn before it does not count any more."""
        self._drawn = b""
        os.write(self._terminal, data.encode())

    def prompts(self) -> list[str]:
        """Leave the console; return the prompts that it sent."""
        self.write("\x1b")
        time.sleep(0.3)
        self.write("q")
        end = time.monotonic() + 20
        while self._process.poll() is None:
            assert time.monotonic() < end
            if select.select([self._terminal], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):  # the console has closed its end
                    os.read(self._terminal, 65536)
        assert self._process.returncode == 0
        found: list[str] = json.loads(self.out.read_text())
        return found

    def close(self) -> None:
        """End the process if it still runs."""
        self._process.kill()
        self._process.wait()
        os.close(self._terminal)


@pytest.fixture
def terminal(tmp_path: Path) -> Terminal:
    made = Terminal(tmp_path)
    yield made
    made.close()


def test_pastes_on_a_terminal_are_sent_as_they_were_shown(terminal: Terminal) -> None:
    terminal.until(b"SERVING")
    terminal.write("i")
    terminal.until(b"history")
    terminal.write(f"\x1b[200~{COLOURED}\x1b[201~")
    terminal.until(b"AAA BBB CCC")
    terminal.write("\r")
    terminal.until(b"a prompt")
    terminal.write(f"{COLOURED} unbracketed")  # bytes of a terminal without bracketed paste are typing
    terminal.until(b"unbracketed")
    terminal.write("\rone\rtwo\r")  # and so is a line end
    time.sleep(1)
    assert terminal.prompts() == ["AAA BBB CCC", "AAA BBB CCC unbracketed", "one", "two"]
