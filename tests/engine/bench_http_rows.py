"""CPU time of an HTTP process by tokens a step: `python tests/engine/bench_http_rows.py ROWS... [--beside CHECKOUT]`.

A thread plays the core and sends each stream a token a step, at the pace of a GPU engine. Requests begin before the
measurement and end after it, so their price is no part of it. With `--beside`, the HTTP process of another checkout
serves as many streams, its steps in between: both meet the same other work on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec
import zmq
from bench_http import MODEL, read_to_ends, until_it_serves
from ppengine.common.config import EngineConfig, Profile
from ppengine.common.profile_sections import HttpConfig, ModelConfig
from ppengine.protocol.frames import Codec, encode
from ppengine.protocol.offline import Added, AddMany, Follow, News, Piece, StateAnswer, StateQuery, ToFront

ROOT = Path(__file__).resolve().parents[2]
WARM, REST = 150, 20
"""Steps before the measurement and after it."""


class Side:
    """An HTTP process of a checkout, and its core."""

    def __init__(self, checkout: Path, model: Path, folder: Path, vocabulary: int) -> None:
        self.name, self.folder, self._ids = str(checkout), folder, random.Random(1)
        self._vocabulary = vocabulary
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        profile = Profile(
            name="bench", model=ModelConfig(path=str(model)), http=HttpConfig(listen=f"127.0.0.1:{self.port}")
        )
        config = EngineConfig(
            id="abcdef", name="bench", epoch="e", profile=profile, model_path=str(model), model_type="llama",
            layers=[(0, 1)], max_model_len=4096, run_dir=str(folder), ring_dir=str(folder), started_wall=0.0,
        )  # fmt: skip
        file = folder / "engine.json"
        # The other checkout may not know each key: it gets those that are set.
        keys = {"name": "bench", "model": {"path": str(model)}, "http": {"listen": profile.http.listen}}
        file.write_bytes(msgspec.json.encode(msgspec.to_builtins(config) | {"profile": keys}))
        self.front, self._codec = zmq.Context.instance().socket(zmq.ROUTER), Codec(ToFront)
        self.front.linger = 0
        self.front.bind(config.endpoint("front"))
        self.live: dict[str, int] = {}
        self._waiting: tuple[bytes, Follow] | None = None
        self._cursor = 0
        parts = [str(checkout / each) for each in ("console", "engine", "kernels")]
        command = [sys.executable, "-m", "ppengine.http", "--engine", str(file), "--role", "http0"]
        self.process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": ":".join(parts)})

    def answer(self) -> None:
        """Take the messages that have come."""
        while self.front.poll(0):
            client, *frames = self.front.recv_multipart()
            message = self._codec.decode(frames[-1])
            if isinstance(message, AddMany):
                names = [one.request or "" for one in message.submissions]
                self.live.update(dict.fromkeys(names, 0))
                self.front.send_multipart([client, encode(Added(nonce=message.nonce, requests=names))])
            elif isinstance(message, StateQuery):
                state = StateAnswer(nonce=message.nonce, state="serving", message="", max_model_len=4096, num_blocks=1)
                self.front.send_multipart([client, encode(state)])
            elif isinstance(message, Follow):
                self._waiting = client, message

    def step(self, last: int, message: int) -> None:
        """Send each stream a token, in messages of `message` tokens; number `last` ends it."""
        rows = list(self.live.items())
        for begin in range(0, len(rows), message):
            self._send(rows[begin : begin + message], last)

    def _send(self, rows: list[tuple[str, int]], last: int) -> None:
        while self._waiting is None:
            self.answer()
        client, question = self._waiting
        self._cursor, question.answers = self._cursor + 1, question.answers - 1
        if question.answers <= 0:
            self._waiting = None
        news = News(nonce=question.nonce, cursor=self._cursor)
        for name, sent in rows:
            token = self._ids.randrange(300, self._vocabulary)
            self.live[name] = sent + 1
            if sent + 1 == last:
                news.pieces.append(Piece(name, 0, sent, [token], [], "length"))
                del self.live[name]
            else:
                news.singles.requests.append(name)
                news.singles.offsets.append(sent)
                news.singles.token_ids.append(token)
        self.front.send_multipart([client, encode(news)])

    def spent(self) -> tuple[int, int]:
        """Return the nanoseconds of CPU of the event loop's thread, and of all other threads."""
        loop, others = 0, 0
        for path in Path(f"/proc/{self.process.pid}/task").glob("*/schedstat"):
            took = int(path.read_text().split()[0])
            if path.parent.name == str(self.process.pid):
                loop = took
            else:
                others += took
        return loop, others


def until_idle(side: Side) -> None:
    """Wait until a process has done its work: one that is late would otherwise be measured by what it got done."""
    before = -1
    while (now := side.spent()[0]) != before:
        before = now
        time.sleep(0.005)


def until_all_serve(sides: list[Side]) -> None:
    """Answer the HTTP processes until each knows that its engine serves."""
    for side in sides:
        ready = threading.Thread(target=until_it_serves, args=(side.port,))
        ready.start()
        while ready.is_alive():
            for one in sides:
                one.answer()
            ready.join(0.005)


def read_all(sides: list[Side], rows: int, tokens: int) -> None:
    """Begin `rows` streams at each side and read them to their ends."""
    fields = {"prompt": "Once", "stream": True, "max_tokens": tokens, "stream_options": {"include_usage": True}}
    body = json.dumps(fields).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    with selectors.DefaultSelector() as selector:
        for side in sides * rows:
            sock = socket.create_connection(("127.0.0.1", side.port))
            sock.sendall(request)
            selector.register(sock, selectors.EVENT_READ, bytearray())
        read_to_ends(selector)


def measure(sides: list[Side], rows: int, step_s: float, steps: int, message: int) -> None:
    """Print the microseconds of CPU a step and a token of each side."""
    reader = threading.Thread(target=read_all, args=(sides, rows, WARM + steps + REST))
    reader.start()
    while any(len(side.live) < rows for side in sides):
        for side in sides:
            side.answer()
        time.sleep(0.001)
    before, due = [side.spent() for side in sides], time.monotonic()
    after = before
    for number in range(WARM + steps + REST):
        if number in (WARM, WARM + steps):
            for side in sides:
                until_idle(side)
            before, after = after, [side.spent() for side in sides]
        for side in sides:
            time.sleep(max(0.0, due - time.monotonic()))
            due = max(due, time.monotonic()) + step_s / len(sides)
            side.answer()
            side.step(WARM + steps + REST, message)
    while reader.is_alive():
        for side in sides:
            side.answer()
        reader.join(0.01)
    for side, old, new in zip(sides, before, after, strict=True):
        loop, others = ((later - sooner) / steps / 1e3 for sooner, later in zip(old, new, strict=True))
        text = f"{loop:.0f} of the loop and {others:.0f} of other threads a step, {(loop + others) / rows:.1f} a token"
        print(f"{rows} rows, {side.name}: µs of CPU {text}", flush=True)


def main() -> None:
    """Measure each number of rows in turn, as many rounds as are wanted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=int, nargs="+", help="streams that get a token a step")
    parser.add_argument("--beside", type=Path, help="another checkout")
    parser.add_argument("--model", type=Path, default=MODEL, help="folder with a tokenizer")
    parser.add_argument("--vocabulary", type=int, default=2000, help="tokens are random below it")
    parser.add_argument("--step-ms", type=float, default=4.0)
    parser.add_argument("--message", type=int, default=65_536, help="most tokens of a message of the core")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--rounds", type=int, default=1)
    chosen = parser.parse_args()
    checkouts = [ROOT] if chosen.beside is None else [chosen.beside.resolve(), ROOT]
    for rows in chosen.rows * chosen.rounds:
        with ExitStack() as stack:
            sides = []
            for checkout in checkouts:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pp-", dir="/tmp")))
                sides.append(Side(checkout, chosen.model, folder, chosen.vocabulary))
                stack.callback(sides[-1].process.wait)
                stack.callback(sides[-1].process.kill)
            until_all_serve(sides)
            measure(sides, rows, chosen.step_ms / 1e3, chosen.steps, chosen.message)


if __name__ == "__main__":
    main()
