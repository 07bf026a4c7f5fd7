"""CPU time of an HTTP process a token: `python tests/engine/bench_http.py [STREAMS] [TOKENS] [STEP_S] [INTERVAL]`.

A thread plays the core and sends each stream a token a step; the HTTP process and its clients are real. It prints
tokens a second and the microseconds of CPU that the HTTP process took a token. Compare runs on one machine alone.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from http.client import HTTPConnection
from pathlib import Path

import msgspec
import zmq
from ppengine.common.config import EngineConfig, Profile
from ppengine.common.profile_sections import HttpConfig, ModelConfig
from ppengine.protocol.frames import Codec, encode
from ppengine.protocol.offline import Added, AddMany, Follow, News, Piece, StateAnswer, StateQuery, ToFront

MODEL = Path(__file__).resolve().parents[2] / "profiles" / "models" / "tiny"
FIRST, LAST = 300, 1500
"""Token ids that are sent in turn: words of the bundled model."""


def core(endpoint: str, step_s: float) -> None:
    """Answer as the core does; every stream gets a token each `step_s`."""
    front, codec = zmq.Context.instance().socket(zmq.ROUTER), Codec(ToFront)
    front.bind(endpoint)
    live: dict[str, tuple[int, int]] = {}
    waiting: tuple[bytes, Follow] | None = None
    due, cursor = time.monotonic(), 0
    while True:
        if front.poll(max(0, int(1e3 * (due - time.monotonic())))):
            client, *frames = front.recv_multipart()
            message = codec.decode(frames[-1])
            if isinstance(message, AddMany):
                names = [one.request or "" for one in message.submissions]
                live.update((one.request or "", (0, one.sampling.max_tokens or 1)) for one in message.submissions)
                front.send_multipart([client, encode(Added(nonce=message.nonce, requests=names))])
            elif isinstance(message, StateQuery):
                state = StateAnswer(nonce=message.nonce, state="serving", message="", max_model_len=4096, num_blocks=1)
                front.send_multipart([client, encode(state)])
            elif isinstance(message, Follow):
                waiting = client, message
        if time.monotonic() >= due:
            due = max(due + step_s, time.monotonic())
            if waiting is not None and live:
                client, question = waiting
                cursor, pieces, question.answers = cursor + 1, [], question.answers - 1
                waiting = waiting if question.answers > 0 else None
                for name, (sent, most) in list(live.items()):
                    token, ends = FIRST + sent % (LAST - FIRST), sent + 1 == most
                    pieces.append(Piece(name, 0, sent, [token], [], "length" if ends else None))
                    live[name] = sent + 1, most
                    if ends:
                        del live[name]
                front.send_multipart([client, encode(News(nonce=question.nonce, cursor=cursor, pieces=pieces))])


def read_all(port: int, streams: int, tokens: int) -> None:
    """Read that many streams to their ends."""
    body = json.dumps({"prompt": "Once", "stream": True, "max_tokens": tokens}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    selector = selectors.DefaultSelector()
    for _ in range(streams):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(request)
        selector.register(sock, selectors.EVENT_READ, bytearray())
    read_to_ends(selector)


def read_to_ends(selector: selectors.BaseSelector) -> None:
    """Read streams, registered with a bytearray each, to their ends."""
    while selector.get_map():
        for key, _ in selector.select():
            assert isinstance(key.fileobj, socket.socket)
            data = key.fileobj.recv(1 << 16)
            key.data[:] = (key.data + data)[-20:]
            if b"[DONE]" in key.data:
                selector.unregister(key.fileobj)
                key.fileobj.close()
            assert data, "a stream has no end"


def until_it_serves(port: int) -> None:
    """Wait until the HTTP process knows that the engine serves."""
    end = time.monotonic() + 60.0
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            connection = HTTPConnection("127.0.0.1", port, timeout=5.0)
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.1)
    raise TimeoutError("the HTTP process does not serve")


def cpu_s(pid: int) -> float:
    """Return the seconds of CPU that a process has taken, by its own clock; see clock_getcpuclockid(3)."""
    return time.clock_gettime((~pid << 3) | 2)


def main(streams: int = 64, tokens: int = 512, step_s: float = 0.005, interval: int = 1) -> None:
    """Measure once."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="pp-", dir="/tmp") as folder:
        http = HttpConfig(listen=f"127.0.0.1:{port}", most_open=65_536, stream_interval=interval)
        profile = Profile(name="bench", model=ModelConfig(path=str(MODEL)), http=http)
        config = EngineConfig(
            id="abcdef", name="bench", epoch="e", profile=profile, model_path=str(MODEL), model_type="llama",
            layers=[(0, 1)], max_model_len=4096, run_dir=folder, ring_dir=folder, started_wall=0.0,
        )  # fmt: skip
        file = Path(folder) / "engine.json"
        file.write_bytes(msgspec.json.encode(config))
        threading.Thread(target=core, args=(config.endpoint("front"), step_s), daemon=True).start()
        command = [sys.executable, "-m", "ppengine.http", "--engine", str(file), "--role", "http0"]
        with subprocess.Popen(command) as server:
            try:
                until_it_serves(port)
                before, began = cpu_s(server.pid), time.monotonic()
                read_all(port, streams, tokens)
                took, cpu = time.monotonic() - began, cpu_s(server.pid) - before
            finally:
                server.kill()
    total = streams * tokens
    print(f"{streams} streams of {tokens}: {total / took:.0f} tokens/s, {1e6 * cpu / total:.1f} µs of CPU a token")


if __name__ == "__main__":
    kinds = (int, int, float, int)
    main(*(kind(word) for kind, word in zip(kinds, sys.argv[1:], strict=False)))  # type: ignore[arg-type]
