"""An HTTP process by itself, without a core: how it starts and leaves."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engines import wait_until
from http_world import TINY
from ppengine.common.config import EngineConfig, Profile
from ppengine.common.profile_sections import HttpConfig, ModelConfig
from ppengine.http.__main__ import Server
from ppengine.http.connection import server_config
from trace_receiver import TraceReceiver

Process = subprocess.Popen[str]


@contextmanager
def process(folder: Path, path: str | None = None, traces: str | None = None) -> Iterator[tuple[Process, int]]:
    """Yield a process and its port, on which it serves. `path`: its PATH. `traces`: the endpoint of traces."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    http = HttpConfig(listen=f"127.0.0.1:{port}", otlp_traces_endpoint=traces)
    config = EngineConfig(
        id="abcdef", name="t", epoch="e", profile=Profile(name="t", model=ModelConfig(path=str(TINY)), http=http),
        model_path=str(TINY), model_type="llama", layers=[(0, 1)], max_model_len=4096, run_dir=str(folder),
        ring_dir=str(folder), started_wall=0.0,
    )  # fmt: skip
    file = folder / "engine.json"
    file.write_bytes(msgspec.json.encode(config))
    command = [sys.executable, "-m", "ppengine.http", "--engine", str(file), "--role", "http0"]
    environment = {**os.environ, **({} if path is None else {"PATH": path})}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as made:
        try:
            wait_until(lambda: health(port) == 503, "it serves", 60.0)
            yield made, port
        finally:
            made.kill()


def health(port: int) -> int | None:
    """Return the status of the engine's health, None if the process does not answer."""
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_ends_it_in_order(tmp_path: Path, number: int) -> None:
    with process(tmp_path) as (made, port), socket.create_connection(("127.0.0.1", port)) as client:
        made.send_signal(number)
        _, words = made.communicate(timeout=30)
        assert made.returncode == 0 and "Traceback" not in words, words
        assert client.recv(1) == b""


async def test_a_second_interrupt_waits_for_no_answer() -> None:
    link: Any = None
    app: Any = None
    server = Server(server_config(app), link)
    for number, forced in ((signal.SIGTERM, False), (signal.SIGTERM, False), (signal.SIGINT, True)):
        server.handle_exit(number, None)
        assert server.should_exit and server.force_exit is forced


def test_spans_of_the_last_calls_are_exported_behind_a_signal(tmp_path: Path) -> None:
    with TraceReceiver() as receiver, process(tmp_path, traces=receiver.endpoint) as (made, port):
        connection = HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("POST", "/v1/completions", b'{"prompt": "x"}')
        assert connection.getresponse().status == 503
        connection.close()
        made.terminate()
        assert made.wait(30) == 0
        assert receiver.spans


def test_it_serves_while_a_compiler_works_and_leaves_none_behind(tmp_path: Path) -> None:
    compiler, begun = tmp_path / "cc", tmp_path / "begun"
    os.mkfifo(begun)
    compiler.write_text(f"#!/bin/sh\nexec 9> {begun}\n(echo >&9; exec sleep 1000)\n")
    compiler.chmod(0o700)
    line = os.open(begun, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with process(tmp_path, path=f"{tmp_path}:/bin:/usr/bin") as (made, _):
            os.set_blocking(line, True)
            assert os.read(line, 1) == b"\n"
            made.terminate()
            assert made.wait(30) == 0
        assert os.read(line, 1) == b""
    finally:
        os.close(line)
    assert not list(tmp_path.glob("events-*")), "no file stays"
