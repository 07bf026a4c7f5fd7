"""The servers of an online measurement: this engine, an installed vLLM, or any that runs at a URL."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from typing_extensions import override

from ppengine.bench.beside import vllm_arguments
from ppengine.bench.server_address import parse_target
from ppengine.common.config import EngineConfig, Profile
from ppengine.common.http_address import KEY_VARIABLE, parse_http
from ppengine.offline.llm import LLM

MOST_OPEN = 65_536
"""Requests that an HTTP process takes here: the rate is the limit, not the server's protection."""
READY_S = 60.0
VLLM_START_S = 1_800.0
_ANSWER_BYTES_MOST = 2**20
_ANSWER_S = 10.0


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Version(msgspec.Struct):
    version: str = ""


class Server:
    """A server at a URL, as it is. Raises ValueError if it does not answer."""

    name = "server"

    def __init__(self, target: str, key: str = "") -> None:
        self.target, self.key = str(parse_target(target)), key
        status, body = self.get("/v1/models")
        if status != 200:
            raise ValueError(f"{self.target}/v1/models answers with status {status}: {body[:200]!r}")
        try:
            self.model = msgspec.json.decode(body, type=_Models).data[0].id
        except (msgspec.MsgspecError, IndexError) as error:
            raise ValueError(f"{self.target}/v1/models has no model: {error}") from None

    @property
    def version(self) -> str:
        """Version that the server reports; empty if it reports none."""
        status, body = self.get("/version")
        with contextlib.suppress(msgspec.MsgspecError):
            return msgspec.json.decode(body, type=_Version).version if status == 200 else ""
        return ""

    def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body of a GET. Raises ValueError without an answer."""
        try:
            return _get(self.target, path, self.key)
        except (OSError, HTTPException) as error:
            raise ValueError(f"{self.target} does not answer: {error}") from None

    def close(self) -> None:
        """Leave it running: it was there before."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class EngineServer(Server):
    """This engine with its HTTP port, and as `LLM` too. Raises EngineError, ValueError."""

    name = "engine"

    def __init__(self, profile: Profile) -> None:
        file = profile.http.listen is not None and parse_http(profile.http.listen).path
        listen = profile.http.listen if file else "127.0.0.1:0"
        http = msgspec.structs.replace(profile.http, listen=listen, keys=None, most_open=MOST_OPEN)
        self.llm = LLM(msgspec.structs.replace(profile, http=http))
        try:
            config = EngineConfig.load(Path(self.llm.llm_engine.run_dir) / "engine.json")
            self.socket = config.endpoint("front")
            """Endpoint of the core for programs."""
            target = str(config.profile.http.listen) if file else f"http://{config.profile.http.listen}"
            key = os.environ.get(KEY_VARIABLE, "")
            # Each connection may reach another process, and each hears of the end of loading for itself.
            for _ in range(4 * http.processes):
                _until_200(target, "/ready", key, READY_S, lambda: None)
            super().__init__(target, key)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop the engine."""
        self.llm.close()


class VllmServer(Server):
    """`vllm serve` on the same model and layout; `more` are words added to its command. Raises ValueError."""

    name = "vLLM"

    def __init__(self, profile: Profile, python: str, more: list[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        words = serve_words(vllm_arguments(profile))
        command = [python, "-m", "vllm.entrypoints.cli.main", *words, "--port", str(port), *more]
        self._process = subprocess.Popen(command, stdout=sys.stderr, start_new_session=True)
        try:
            target = f"http://127.0.0.1:{port}"
            _until_200(target, "/health", "", VLLM_START_S, self._check)
            super().__init__(target)
        except BaseException:
            self.close()
            raise

    def _check(self) -> None:
        if (code := self._process.poll()) is not None:
            raise ValueError(f"vllm serve ended with exit code {code}; its own words are above")

    def close(self) -> None:
        """End it and its processes, and wait for that: the cards are free then."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def serve_words(arguments: dict[str, Any]) -> list[str]:
    """Return the words of `vllm serve` for arguments of `vllm.LLM`."""
    words = ["serve", str(arguments["model"]), "--host", "127.0.0.1"]
    for name, value in arguments.items():
        if name != "model" and value is not None and value is not False:
            option = f"--{name.replace('_', '-')}"
            words += [option] if value is True else [option, str(value)]
    return words


def _until_200(target: str, path: str, key: str, most_s: float, check: Any) -> None:
    end = time.monotonic() + most_s
    while time.monotonic() < end:
        check()
        with contextlib.suppress(OSError, HTTPException):
            if _get(target, path, key)[0] == 200:
                return
        time.sleep(0.1)
    raise ValueError(f"{target}{path} did not answer with status 200 within {most_s:.0f} s")


def _get(target: str, path: str, key: str) -> tuple[int, bytes]:
    at = parse_target(target)
    if at.file:
        connection: HTTPConnection = _FileConnection(at.file)
    else:
        connection = HTTPConnection(at.host, at.port, timeout=_ANSWER_S)
    try:
        connection.request("GET", at.prefix + path, headers={"authorization": f"Bearer {key}"} if key else {})
        answer = connection.getresponse()
        return answer.status, answer.read(_ANSWER_BYTES_MOST)
    finally:
        connection.close()


class _FileConnection(HTTPConnection):
    """A connection to a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_ANSWER_S)
        self._path = path

    @override
    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_ANSWER_S)
        self.sock.connect(self._path)
