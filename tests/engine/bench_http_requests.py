"""CPU time of an HTTP process by request: `python tests/engine/bench_http_requests.py [--beside CHECKOUT]`.

A thread plays the core. All requests of a round come at once, each on a connection of its own, as `ppconsole bench
--online` sends them. Once all wait for tokens, two steps end them. It prints the microseconds of CPU that a request
takes to begin, and to end with its two tokens. With `--beside`, the HTTP process of another checkout takes turns.
"""

from __future__ import annotations

import argparse
import json
import random
import selectors
import socket
import statistics
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from bench_http import MODEL, read_to_ends
from bench_http_rows import ROOT, Side, until_all_serve, until_idle

VOCABULARY = 1500
WARM = 2
"""Rounds before the measurement."""


def body(prompt_ids: int, number: int) -> bytes:
    """Return a request as the bench of the engine sends it, with token ids or, without any, a short text."""
    ids = random.Random(number)
    prompt = [ids.randrange(300, VOCABULARY) for _ in range(prompt_ids)] if prompt_ids else "Once upon a time"
    fields = {
        "model": MODEL.name, "prompt": prompt, "max_tokens": 256, "temperature": 0.0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    return json.dumps(fields, separators=(",", ":")).encode()


def read_all(port: int, bodies: list[bytes]) -> None:
    """Send all requests and read their answers to the end."""
    with selectors.DefaultSelector() as selector:
        for each in bodies:
            sock = socket.create_connection(("127.0.0.1", port))
            head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-type: application/json\r\n" % port
            sock.sendall(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(each), each))
            selector.register(sock, selectors.EVENT_READ, bytearray())
        read_to_ends(selector)


def one_round(side: Side, bodies: list[bytes]) -> tuple[float, float, float]:
    """Return the microseconds a request: the loop's to begin it, the loop's to end it, and those of other threads."""
    begun = side.spent()
    reader = threading.Thread(target=read_all, args=(side.port, bodies))
    reader.start()
    while len(side.live) < len(bodies):
        side.answer()
        time.sleep(0.001)
    until_idle(side)
    waits = side.spent()
    for _ in range(2):
        side.answer()
        side.step(2, 128)
    while reader.is_alive():
        side.answer()
        reader.join(0.005)
    until_idle(side)
    ended = side.spent()
    spent = waits[0] - begun[0], ended[0] - waits[0], ended[1] - begun[1]
    begin, end, others = (each / len(bodies) / 1e3 for each in spent)
    return begin, end, others


def main() -> None:
    """Measure as many rounds as are wanted, the sides in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=256, help="at once")
    parser.add_argument("--ids", type=int, default=288, help="token ids of a prompt; 0: a short text")
    parser.add_argument("--beside", type=Path, nargs="*", default=[], help="other checkouts")
    parser.add_argument("--rounds", type=int, default=12)
    chosen = parser.parse_args()
    bodies = [body(chosen.ids, number) for number in range(chosen.requests)]
    with ExitStack() as stack:
        sides = []
        for checkout in [*(each.resolve() for each in chosen.beside), ROOT]:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pp-", dir="/tmp")))
            sides.append(Side(checkout, MODEL, folder, VOCABULARY))
            stack.callback(sides[-1].process.wait)
            stack.callback(sides[-1].process.kill)
        until_all_serve(sides)
        found: dict[str, list[tuple[float, float, float]]] = {side.name: [] for side in sides}
        for number in range(WARM + chosen.rounds):
            for side in sides if number % 2 else sides[::-1]:
                took = one_round(side, bodies)
                for other in sides:
                    other.answer()
                if number >= WARM:
                    found[side.name].append(took)
        for name, rounds in found.items():
            begin, end, others = (statistics.median(each) for each in zip(*rounds, strict=True))
            whole = statistics.median(map(sum, rounds))
            text = f"{whole:.0f}: {begin:.0f} to begin, {end:.0f} to end, {others:.0f} of other threads"
            print(f"{name}: µs of CPU a request {text}", flush=True)


if __name__ == "__main__":
    main()
