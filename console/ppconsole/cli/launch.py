"""Starting an engine as a child of this process: its supervisor, whose lifeline we hold."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from ppconsole.cli import exits

NEEDS = "torch"


def need_engine() -> None:
    """Raise Failure, with what to type, unless the engine extra is installed."""
    if importlib.util.find_spec(NEEDS) is None:
        text = "the engine is not installed here, only the console: pip install 'ppconsole[engine]'"
        raise exits.Failure(text)


class EngineProcess:
    """A supervisor in a session of its own, so that Ctrl-C reaches us first. It ends when we do, however we end.

    `kept`: a keeper starts it, and another one after one that is killed.
    """

    def __init__(self, arguments: Sequence[str], *, silent: bool = False, kept: bool = False) -> None:
        read_end, self._lifeline = os.pipe()
        module = "ppengine.supervisor.keeper" if kept else "ppengine.supervisor"
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments, "--lifeline", str(read_end)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE if silent else None,
                pass_fds=(read_end,),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(read_end)
        self.messages: list[str] = []
        """Lines of its stderr if it was started without output: the newest 100."""

    @property
    def pid(self) -> int:
        """Process id of the supervisor."""
        return self._process.pid

    def signal(self, number: int) -> None:
        """Pass a signal on; nothing once it has ended."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    async def notices(self) -> asyncio.Queue[dict[str, Any] | None]:
        """Return a queue of the supervisor's messages on stdout, `None` last; collect its stderr meanwhile."""
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def read_stdout() -> None:
            import msgspec

            if self._process.stdout is not None:
                for line in self._process.stdout:
                    try:
                        notice = msgspec.json.decode(line, type=dict[str, Any])
                    except (msgspec.MsgspecError, UnicodeDecodeError):
                        continue  # a library's print; the supervisor's own lines are JSON
                    _tell(loop, queue, notice)
            _tell(loop, queue, None)

        def read_stderr() -> None:
            if self._process.stderr is not None:
                for line in self._process.stderr:
                    self.messages = [*self.messages[-99:], line.decode("utf-8", "replace").rstrip()]

        for reader in (read_stdout, read_stderr):
            threading.Thread(target=reader, daemon=True).start()
        return queue

    def stop(self, grace_s: float = 15.0) -> int:
        """Ask it to stop, wait, kill what does not; return its exit code."""
        self.signal(signal.SIGTERM)
        return self.wait(grace_s)

    def wait(self, grace_s: float | None = None) -> int:
        """Wait for its end; after `grace_s` seconds kill it. Returns its exit code."""
        try:
            return self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def close(self) -> None:
        """Let go of the lifeline: an engine that still runs leaves."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


def _tell(
    loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[dict[str, Any] | None], notice: dict[str, Any] | None
) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(queue.put_nowait, notice)
