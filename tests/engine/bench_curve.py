"""Measure the cost of CURVE on local sockets: connect and first answer, round trip, CPU of 20 subscribers at 10 Hz.

python tests/engine/bench_curve.py

Both kinds take turns in one run. The CPU is that of the publishing process, with its thread of libzmq.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import zmq
from ppengine.common.curve import CONSOLES, be_client, be_server, make_keypair
from ppengine.common.zap import ZapHandler
from ppengine.protocol.keys import read_keypair, write_keypair

CONNECTS, TRIPS, ROUNDS, PUBLISHED, SUBSCRIBERS = 60, 50, 3, 50, 20
SNAPSHOT = os.urandom(8200)
"""A message as large as a snapshot with 256 requests."""
KINDS = ("plain", "curve")


def open_socket(context: zmq.Context[Any], kind: int, folder: Path, name: str) -> Any:
    """Return a socket that is connected to a server of the kind that the folder is named after."""
    socket = context.socket(kind)
    socket.linger = 0
    if folder.name == "curve":
        be_client(socket, make_keypair(), read_keypair(folder / "server.key").public)
    if kind == zmq.SUB:
        socket.subscribe(b"")
    socket.connect(f"ipc://{folder}/{name}")
    return socket


class Server:
    """An echo and a publisher in this process."""

    def __init__(self, folder: Path) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._echo, self.publisher = self._context.socket(zmq.ROUTER), self._context.socket(zmq.XPUB)
        if folder.name == "curve":
            write_keypair(folder / "server.key", make_keypair())
            ZapHandler(self._context, {CONSOLES: lambda key: True})
        for socket, name in ((self._echo, "echo"), (self.publisher, "state")):
            socket.linger = 0
            if folder.name == "curve":
                be_server(socket, read_keypair(folder / "server.key"))
            socket.bind(f"ipc://{folder}/{name}")
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            self._echo.send_multipart(self._echo.recv_multipart())


def subscribe(folder: Path) -> None:
    """Read all that is published, until killed."""
    context: zmq.Context[Any] = zmq.Context()
    poller = zmq.Poller()
    for _ in range(SUBSCRIBERS):
        poller.register(open_socket(context, zmq.SUB, folder, "state"), zmq.POLLIN)
    while True:
        for socket, _ in poller.poll():
            socket.recv_multipart()


def measure(root: Path) -> None:
    """Print all figures."""
    folders = {kind: root / kind for kind in KINDS}
    for folder in folders.values():
        folder.mkdir(mode=0o700)
    servers = {kind: Server(folder) for kind, folder in folders.items()}
    context: zmq.Context[Any] = zmq.Context()
    connects: dict[str, list[float]] = {kind: [] for kind in KINDS}
    trips: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _, kind in itertools.product(range(CONNECTS), KINDS):
        began = time.perf_counter()
        with open_socket(context, zmq.DEALER, folders[kind], "echo") as socket:
            for number in range(TRIPS + 1):
                socket.send_multipart([b"h" * 80, b"b" * 200])
                socket.recv_multipart()
                now = time.perf_counter()
                (trips if number else connects)[kind].append(now - began)
                began = now
    for kind in KINDS:
        print(f"{kind}: connect and first answer {_spread(connects[kind], 1e3)} ms", end=", ")
        print(f"round trip {_spread(trips[kind], 1e6)} us (p50, p95)")
    with contextlib.ExitStack() as stack:
        for folder in folders.values():
            child = subprocess.Popen([sys.executable, __file__, str(folder)])
            stack.callback(child.kill)
        time.sleep(3.0)
        for _, kind in itertools.product(range(ROUNDS), KINDS):
            used, began = time.process_time(), time.perf_counter()
            for _ in range(PUBLISHED):
                servers[kind].publisher.send_multipart([b"snap", b"h" * 80, SNAPSHOT])
                time.sleep(0.1)
            share = 100 * (time.process_time() - used) / (time.perf_counter() - began)
            print(f"{kind}: {share:.2f} % of a core for {SUBSCRIBERS} subscribers at 10 Hz")


def _spread(values: list[float], scale: float) -> str:
    ordered = sorted(values)
    return " ".join(f"{scale * ordered[int(len(ordered) * share)]:.3g}" for share in (0.5, 0.95))


if __name__ == "__main__":
    if sys.argv[1:]:
        subscribe(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory(prefix="pp-", dir="/tmp") as name:
            measure(Path(name))
        sys.stdout.flush()
        os._exit(0)  # The threads of the servers wait for messages for ever.
