"""Start an engine for one Python program and talk to its core without the gateway."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import IO, TypeVar

import msgspec
import zmq

from ppengine.common import lifeline
from ppengine.common.child_process import signal_name
from ppengine.common.config import Profile
from ppengine.protocol.frames import Codec, encode
from ppengine.protocol.offline import FromFront, StateAnswer, StateQuery

LOAD_POLL_MS = 1000
AGAIN_S = 1.5
"""Seconds after which a message without an answer is sent again; the core answers within one."""
T = TypeVar("T")


class EngineError(RuntimeError):
    """The engine could not start, or cannot go on; one line with the reason."""


def run_supervisor(words: list[str], errors: IO[str], line: int) -> subprocess.Popen[str]:
    """Start `python -m` with these words; it inherits `line`, its lifeline."""
    return subprocess.Popen(
        [sys.executable, "-m", *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
        pass_fds=(line,), start_new_session=True, encoding="utf-8", errors="replace",
    )  # fmt: skip


class LocalEngine:
    """A supervisor of our own, and a socket to its core. Ends with `close`, or with this process."""

    def __init__(self, profile: Profile) -> None:
        self._closed = False
        self._nonce = 0
        try:
            self._launch(profile)
        except OSError as error:  # No process or descriptor is left, or no room for a file.
            raise EngineError(f"the engine cannot be started: {error}") from None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._codec = Codec(FromFront)
        try:
            started = self._started()
            self._profile.close()
            self.run_dir: str = started["run_dir"]
            self.id: str = started["id"]
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.connect(f"ipc://{self.run_dir}/front")
            self.state = self._wait_serving()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Process id of the supervisor."""
        return self._process.pid

    def nonce(self) -> int:
        """Return a fresh number that identifies an answer."""
        self._nonce += 1
        return self._nonce

    def check_alive(self) -> None:
        """Raise EngineError once this is closed, or the supervisor has ended."""
        if self._closed:
            raise EngineError("the engine is closed")
        if self._process.poll() is not None:
            raise EngineError(self._last_error())

    def send(self, message: msgspec.Struct) -> None:
        """Send one message to the core. Raises EngineError once this is closed, or the engine is gone."""
        if self._closed:
            raise EngineError("the engine is closed")
        data = encode(message)
        while True:
            try:
                self._socket.send(data, zmq.NOBLOCK)
                return
            except zmq.Again:
                # The queue for a core that is away is bounded, and there may be no other core.
                self.check_alive()
                self._socket.poll(LOAD_POLL_MS, zmq.POLLOUT)

    def ask(self, message: msgspec.Struct, kind: type[T]) -> T:
        """Send `message` and return the answer of type `kind` with its nonce. Raises EngineError when there is none.

        A message without an answer is sent again: its core may have been restarted. A repeated one counts once.
        """
        self.send(message)
        wanted, again = getattr(message, "nonce", None), time.monotonic() + AGAIN_S
        while True:
            answer = self.receive(LOAD_POLL_MS)
            if isinstance(answer, kind) and getattr(answer, "nonce", None) == wanted:
                return answer
            if time.monotonic() >= again:
                self.send(message)
                again = time.monotonic() + AGAIN_S

    def receive(self, timeout_ms: int) -> object | None:
        """Return the next message of the core, None after `timeout_ms`. Raises EngineError if the engine is gone."""
        if self._socket.poll(timeout_ms):
            return self._codec.decode(self._socket.recv())
        if self._closed or self._process.poll() is not None:
            raise EngineError(self._last_error())
        return None

    def close(self) -> None:
        """Stop the engine and wait until its processes and files are gone."""
        if self._closed:
            return
        self._closed = True
        os.close(self._lifeline)
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()
        self._profile.close()
        self._socket.close(0)
        self._context.term()

    # --- inside ---------------------------------------------------------------------------------------------

    def _launch(self, profile: Profile) -> None:
        """Start the supervisor. Raises OSError, and keeps nothing open then."""
        with contextlib.ExitStack() as opened:
            # Libraries write what they like there, as names of files that are no UTF-8.
            self._errors = opened.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))
            # Not as a word: any user can read the words of a process, and a profile may have a backend's password.
            self._profile = opened.enter_context(tempfile.NamedTemporaryFile(suffix=".json"))
            self._profile.write(msgspec.json.encode(profile))
            self._profile.flush()
            read_end, self._lifeline = lifeline.open_pipe()
            opened.callback(os.close, self._lifeline)
            words = ["ppengine.supervisor", "--profile-json", self._profile.name]
            try:
                self._process = run_supervisor([*words, "--lifeline", str(read_end)], self._errors, read_end)
            finally:
                os.close(read_end)
            opened.pop_all()

    def _started(self) -> dict[str, str]:
        if self._process.stdout is not None:
            for line in self._process.stdout:
                with contextlib.suppress(json.JSONDecodeError):
                    message = json.loads(line)
                    if message.get("event") == "started":
                        return dict(message)
        self._process.wait()
        raise EngineError(self._last_error())

    def _wait_serving(self) -> StateAnswer:
        while True:
            answer = self.ask(StateQuery(nonce=self.nonce(), wait_ms=LOAD_POLL_MS), StateAnswer)
            if answer.state in ("degraded", "stopped"):
                raise EngineError(answer.message)
            if answer.state != "loading":
                return answer

    def _last_error(self) -> str:
        if self._errors.closed:
            return "the engine was closed"
        if (code := self._process.poll()) is not None and code < 0:
            # Its last line is of an earlier moment, such as `serving`.
            return f"the supervisor of the engine was killed by {signal_name(-code)}"
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (errors or lines or ["the engine ended without a message"])[-1]
