"""Measure streams beside a client that sends bad requests, against the same streams without it.

python tests/end_to_end/bench_bad_clients.py [--step-s 0.005] [--pairs 8] [--seconds 8] [--every 0.5] [--scrape]
    [--profile P] [--set a.b=c]

The bad client is a process of its own at the lowest priority, since its work is not the engine's. It sends a bad
request every `--every` seconds, in turn: bodies of 100 MB, with their length and in chunks, 7.9 million token ids, deep
JSON, broken UTF-8, 100,000 headers, a text of 100,000 tokens, and streams that it does not read. It also keeps 200
connections open in the middle of a body. `--step-s` is what a step takes longer, so that the cores have time left.

With `--scrape` a client that asks for `/metrics` takes its place, every `--every` seconds. With `--profile` that engine
serves, as fast as it is; its model needs a tokenizer.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "engine"))

from ppengine.bench.online_servers import EngineServer
from ppengine.common.config import load_profile
from serving import Served

STREAMS, OUTPUT, HALF_OPEN = 16, 512, 200
Port = int


def post(length: int | None, body: bytes = b"", path: str = "/v1/completions") -> bytes:
    """Return a request with its body; without a length the body comes in chunks."""
    kind = b"transfer-encoding: chunked" if length is None else b"content-length: %d" % length
    return b"POST %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n%b\r\n\r\n%b" % (path.encode(), kind, body)


def whole(body: bytes) -> bytes:
    """Return a request with its length."""
    return post(len(body), body)


def exchange(port: Port, parts: Iterator[bytes] | list[bytes]) -> str:
    """Send all parts, or as many as the other side takes; return the first line of the answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as sock:
        with contextlib.suppress(OSError):
            for part in parts:
                sock.sendall(part)
        with contextlib.suppress(OSError):
            return sock.recv(64).split(b"\r\n")[0].decode()
    return "closed"


MEGABYTE = b"a" * 1_000_000
CHUNK = b"%x\r\n%b\r\n" % (len(MEGABYTE), MEGABYTE)
BAD: dict[str, Callable[[], Iterator[bytes] | list[bytes]]] = {
    "100 MB": lambda: itertools.chain([post(100_000_000)], itertools.repeat(MEGABYTE, 100)),
    "100 MB in chunks": lambda: itertools.chain([post(None)], itertools.repeat(CHUNK, 100)),
    "7.9 million ids": lambda: [whole(b'{"prompt":[' + b"1," * 7_900_000 + b"1]}")],
    "deep JSON": lambda: [whole(b'{"prompt":"a","metadata":' + b"[" * 100_000 + b"]" * 100_000 + b"}")],
    "broken UTF-8": lambda: [whole(b'{"prompt":"\xff\xfe"}')],
    "100,000 headers": lambda: [b"GET /health HTTP/1.1\r\n", b"".join(b"x%d: y\r\n" % n for n in range(100_000))],
    "100,000 tokens": lambda: [whole(json.dumps({"prompt": "the cat " * 50_000}).encode())],
}


def be_bad(port: Port, every_s: float) -> None:
    """Send bad requests until killed; print each kind with its answer."""
    os.nice(19)
    kept = [socket.create_connection(("127.0.0.1", port)) for _ in range(HALF_OPEN)]
    for sock in kept:
        sock.sendall(post(1000, b'{"prompt":'))
    unread = json.dumps({"prompt": "Once", "stream": True, "max_tokens": 64, "ignore_eos": True}).encode()
    due = time.monotonic()
    for name in itertools.cycle((*BAD, "unread")):
        if name == "unread":
            sock = socket.create_connection(("127.0.0.1", port))
            sock.sendall(whole(unread))
            kept = [*kept[-HALF_OPEN:], sock]
            said = "not read"
        else:
            said = exchange(port, BAD[name]())
        print(f"{name}: {said}", flush=True)
        due = max(due + every_s, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))


def scrape(port: Port, every_s: float) -> None:
    """Ask for the metrics until killed; print for each answer whether it took less than 5 ms."""
    due = time.monotonic()
    while True:
        with socket.create_connection(("127.0.0.1", port)) as sock:
            began = time.monotonic()
            sock.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            while sock.recv(1 << 20):
                pass
        print("a scrape:", "below 5 ms" if time.monotonic() - began < 0.005 else "5 ms and more", flush=True)
        due = max(due + every_s, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))


class Streams:
    """Streams that begin again at their ends, and the tokens that they got."""

    def __init__(self, port: Port) -> None:
        self.tokens, self.gaps, self.ended = 0, list[float](), False
        self._lock = threading.Lock()
        for number in range(STREAMS):
            threading.Thread(target=self._follow, args=(port, number), daemon=True).start()

    def _follow(self, port: Port, number: int) -> None:
        body = {"prompt": f"Once {number}", "stream": True, "max_tokens": OUTPUT, "ignore_eos": True}
        while not self.ended:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as sock:
                sock.sendall(whole(json.dumps(body).encode()))
                last, tail = 0.0, b""
                while data := sock.recv(1 << 16):
                    now, count = time.monotonic(), data.count(b"data: {")
                    with self._lock:
                        self.tokens += count
                        if count and last:
                            self.gaps.append(now - last)
                    last, tail = now, (tail + data)[-40:]
                    if b"[DONE]" in tail:
                        break

    def measure(self, seconds: float) -> tuple[float, float]:
        """Return tokens a second, and the 99th percentile of the gaps between tokens in ms."""
        with self._lock:
            self.tokens, self.gaps = 0, []
        began = time.monotonic()
        time.sleep(seconds)
        with self._lock:
            took, gaps = time.monotonic() - began, sorted(self.gaps)
            return self.tokens / took, 1e3 * gaps[int(0.99 * (len(gaps) - 1))]


def main() -> None:
    """Measure pairs of windows, without and with the bad client."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("step-s", 0.005), ("pairs", 8), ("seconds", 8.0), ("every", 0.5)):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--scrape", action="store_true", help="scrape in place of bad requests")
    parser.add_argument("--profile", help="in place of the bundled model on two stages")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--bad", type=int, help="be the bad client of this port")
    options = parser.parse_args()
    if options.bad:
        (scrape if options.scrape else be_bad)(options.bad, options.every)
        return
    ratios, said = list[tuple[float, float]](), Counter[str]()
    with contextlib.ExitStack() as stack:
        if options.profile:
            target = stack.enter_context(EngineServer(load_profile(options.profile, options.settings))).target
        else:
            profile = load_profile("tiny", ["http.listen=127.0.0.1:0", "memory.device_mib=128", *options.settings])
            engine = stack.enter_context(Served(profile, step_s=options.step_s))
            target = engine.config.profile.http.listen or ""
        port = int(target.rpartition(":")[2])
        streams = Streams(port)
        streams.measure(5.0)
        for number in range(options.pairs):
            pair: dict[bool, tuple[float, float]] = {}
            for bad in (False, True) if number % 2 else (True, False):
                if not bad:
                    pair[bad] = streams.measure(options.seconds)
                    continue
                words = [sys.executable, __file__, "--bad", str(port), "--every", str(options.every)]
                words += ["--scrape"] * options.scrape
                with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as client:
                    time.sleep(1.0)
                    pair[bad] = streams.measure(options.seconds)
                    client.kill()
                    said.update(client.communicate()[0].splitlines())
                time.sleep(1.0)
            ratios.append((pair[True][0] / pair[False][0], pair[True][1] / pair[False][1]))
            print(*(f"{rate:8.1f} tok/s, gap p99 {gap:6.1f} ms" for rate, gap in (pair[False], pair[True])), flush=True)
        print(*(f"{count} x {line}" for line, count in sorted(said.items())), sep="\n")
        report(ratios)
        streams.ended = True


def report(ratios: list[tuple[float, float]]) -> None:
    """Print the medians and ranges of both ratios."""
    for name, values in zip(("tokens/s", "gap p99"), zip(*ratios, strict=True), strict=True):
        print(f"with / without, {name}: {statistics.median(values):.3f} ({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()
