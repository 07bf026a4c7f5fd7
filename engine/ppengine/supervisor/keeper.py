"""The keeper of an engine: `python -m ppengine.supervisor.keeper ARGUMENTS...` starts a supervisor with the arguments.

If that is killed, the keeper starts another one, which resumes the engine from its journals. It loads no library
beyond msgspec and does nothing else, so that little can end it. Lines of the supervisors pass through it.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from types import FrameType

import msgspec

from ppengine.common import lifeline
from ppengine.common.child_process import signal_name
from ppengine.common.oom_kills import LOOK_S, OomWatch
from ppengine.protocol import discovery, kept_files
from ppengine.protocol.kept_files import EngineEnd
from ppengine.supervisor.announcements import announce, pass_on, tell
from ppengine.supervisor.process_deaths import MOST, WITHIN_S, ProcessDeaths

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Started(msgspec.Struct):
    """The line with which a supervisor says that its engine can be attached to."""

    event: str
    id: str = ""


class Keeper:
    """Starts supervisors, one at a time."""

    def __init__(self, arguments: list[str]) -> None:
        self._arguments = arguments
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._memory: OomWatch | None = None
        self._deaths = ProcessDeaths()
        self._engine = ""
        """Id of the engine, known when it can be attached to."""
        self._asked = False

    def run(self) -> int:
        """Keep the engine until it ends by itself or on request; return the supervisor's exit code."""
        code = self._supervise(self._arguments)
        while code < 0 and self._engine and not self._asked:
            delay = self._deaths.note(time.monotonic())
            killed = self._killed(code)
            how = f"the supervisor of {self._engine} was {killed}"
            if delay is None:
                return self._give_up(f"{how}, and it is the end number {MOST} in {WITHIN_S / 60:g} minutes")
            tell(f"{how}; another one resumes the engine")
            time.sleep(delay)
            if self._asked:
                break
            code = self._supervise([f"--resume={self._engine}", f"--after={code}", f"--killed={killed}"])
        return code if code >= 0 else self._give_up(f"the supervisor was {self._killed(code)}", 128 - code)

    def _killed(self, code: int) -> str:
        """Return how the supervisor was killed, with the limit if it was for memory."""
        why = self._memory.words() if self._memory is not None and -code == signal.SIGKILL else ""
        return f"killed by {signal_name(-code)}" + (f": {why}" if why else "")

    def stop(self, number: int, frame: FrameType | None = None) -> None:
        """Pass a signal on; what ends after it is not restarted."""
        self._asked = True
        if self._supervisor is not None and self._supervisor.poll() is None:
            self._supervisor.send_signal(number)

    def _supervise(self, arguments: list[str]) -> int:
        """Run one supervisor to its end and pass its lines on; return its exit code."""
        read_end, write_end = lifeline.open_pipe()
        command = [sys.executable, "-m", "ppengine.supervisor", "--kept", *arguments, "--lifeline", str(read_end)]
        try:
            self._supervisor = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, pass_fds=(read_end,), start_new_session=True
            )
        finally:
            os.close(read_end)
        with self._supervisor, os.fdopen(write_end, "wb"):
            if self._asked:  # A signal came before there was a process to pass it to.
                self._supervisor.terminate()
            assert self._supervisor.stdout is not None, "its output is a pipe"
            self._memory = OomWatch(self._supervisor.pid)
            over = threading.Event()
            threading.Thread(target=_look_until, args=(self._memory, over), daemon=True).start()
            for line in self._supervisor.stdout:
                self._pass_on(line)
            over.set()
            return self._supervisor.wait()

    def _pass_on(self, line: bytes) -> None:
        try:
            started = msgspec.json.decode(line, type=_Started)
            self._engine = started.id if started.event == "started" else self._engine
        except (msgspec.MsgspecError, UnicodeDecodeError):
            pass  # a library's print
        pass_on(line)

    def _give_up(self, why: str, code: int = 1) -> int:
        """Note the end of the engine and remove its files."""
        if self._engine:
            kept_files.write_end(self._engine, EngineEnd(wall=time.time(), reason=why, clean=False, code=code))
            discovery.remove_engine(self._engine)
        tell(f"error: {why}")
        announce("stopped", code=code, reason=why)
        return code


def _look_until(memory: OomWatch, over: threading.Event) -> None:
    while not over.wait(LOOK_S):
        memory.look()


def main() -> int:
    """Keep one engine and return its exit code."""
    parser = argparse.ArgumentParser(prog="ppengine.supervisor.keeper", add_help=False, allow_abbrev=False)
    lifeline.add_argument(parser)
    options, arguments = parser.parse_known_args()
    os.umask(0o077)
    keeper = Keeper(arguments)
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, keeper.stop)
    # A signal, since the thread of the lifeline must not wait for a child.
    lifeline.adopt(options.lifeline, on_close=lambda: os.kill(os.getpid(), signal.SIGTERM))
    return keeper.run()


if __name__ == "__main__":
    sys.exit(main())
