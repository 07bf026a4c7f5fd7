"""Open 10,000 connections at once to the port of an engine: the engine works on, and a console with a key attaches.

python tests/engine/bench_connections.py tiny

Half of them say nothing, 4,000 begin a handshake and show no key, 1,000 have a key that is allowed. They come from
processes of 2,000 at most and from addresses 127.0.1.x of 1,000 each, which is the limit of an address. Connections
without a key are closed by the gateway after 10 s, and opened again here. `ulimit -n` must allow 10,500 descriptors.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import selectors
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import zmq
from bench_hundred_consoles import say
from ppengine.common.curve import be_client, make_keypair
from ppengine.common.open_files import open_files, raise_limit
from ppengine.protocol.control import Ping
from ppengine.protocol.discovery import EngineRecord, list_engines
from ppengine.protocol.keys import own_keypair
from test_gateway_tcp import free_port

ADDRESS_MOST, IN_ONE = 1000, 2000
"""Connections of one address, and of one process here."""
CLIENTS = [
    ("silent", 2000),
    ("silent", 2000),
    ("silent", 1000),
    ("greeting", 2000),
    ("greeting", 2000),
    ("keyed", 1000),
]
"""Processes of connections, and how many each has."""
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""Greeting of ZMTP 3.1 by which a client begins the handshake of CURVE."""
TOKENS = 200


def main() -> None:
    """Measure, or be one of the clients."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("profile")
    parser.add_argument("--share", type=float, default=1.0, help="share of the connections")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long they stay")
    parser.add_argument("--client", nargs=4, metavar=("NUMBER", "PORT", "KIND", "COUNT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    raise_limit()
    if options.client:
        kind, (number, port, count) = options.client[2], map(int, (*options.client[:2], options.client[3]))
        if kind == "keyed":
            be_admitted(number, port, count)
        else:
            stay_out(number, port, count, GREETING if kind == "greeting" else b"")
    else:
        measure(options)


def source(number: int, index: int) -> str:
    """Return the address of a client's connection: each process has its own, so that none exceeds the limit."""
    return f"127.0.1.{1 + number * (-(-IN_ONE // ADDRESS_MOST)) + index // ADDRESS_MOST}"


def stay_out(number: int, port: int, count: int, says: bytes) -> None:
    """Keep `count` connections open that say these bytes and no more; those that the gateway closes are made again."""
    poll = selectors.EpollSelector()

    def connect(index: int) -> None:
        made = None
        while made is None:
            with contextlib.suppress(OSError):  # The queue of calls that wait is full.
                made = socket.create_connection(("127.0.0.1", port), 2.0, (source(number, index), 0))
        made.sendall(says)
        poll.register(made, selectors.EVENT_READ, index)

    for index in range(count):
        connect(index)
    print(count, flush=True)
    while True:
        for key, _ in poll.select(1.0):
            ended: Any = key.fileobj
            with contextlib.suppress(OSError):
                if ended.recv(4096):
                    continue  # the greeting
            poll.unregister(ended)
            ended.close()
            connect(key.data)


def be_admitted(number: int, port: int, count: int) -> None:
    """Keep `count` connections open that are admitted with the user's own key, and ask for one answer."""
    record = next(one for one in list_engines() if one.name == "crowd")
    context: zmq.Context[Any] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, count + 10)
    pair, poller = own_keypair("client", make_keypair), zmq.Poller()
    sockets, waits = [], set()
    for index in range(count):
        made = context.socket(zmq.DEALER)
        made.linger = 0
        be_client(made, pair, record.server_key)
        made.connect(f"tcp://{source(number, index)}:0;127.0.0.1:{port}")
        say(record, made, Ping(nonce=index))
        poller.register(made, zmq.POLLIN)
        sockets.append(made)
        waits.add(made)
    while waits:
        for made, _ in poller.poll(1000):
            made.recv_multipart()
            waits.discard(made)
    print(count, flush=True)
    time.sleep(3600)


def measure(options: argparse.Namespace) -> None:
    """Print the figures before, with the connections, and after them."""
    port = free_port()
    serve = cli("serve", options.profile, "--name", "crowd", "--listen", f"tcp://127.0.0.1:{port}")
    clients: list[subprocess.Popen[str]] = []
    try:
        wait_for(serve.stderr, "serving")
        record = next(one for one in list_engines() if one.name == "crowd")
        gateway = pid_of(record, "ppengine.gateway")
        cli("context", "add", "crowd-by-tcp", f"tcp://127.0.0.1:{port}", "--server-key", record.server_key).wait()
        print(f"soft limit of descriptors: {resource.getrlimit(resource.RLIMIT_NOFILE)[0]:,}")
        report("before", gateway, record)
        begun = time.monotonic()
        for number, (kind, most) in enumerate(CLIENTS):
            words = ["--client", str(number), str(port), kind, str(round(most * options.share))]
            command = [sys.executable, __file__, options.profile, *words]
            clients.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        report("while they connect", gateway, record)
        for client in clients:
            assert client.stdout is not None
            if not client.stdout.readline():
                raise SystemExit("a client has ended")
        print(f"all have been open after {time.monotonic() - begun:.1f} s")
        until = time.monotonic() + options.seconds
        while time.monotonic() < until:
            report("with them", gateway, record)
            time.sleep(3.0)
    finally:
        for client in clients:
            client.kill()
            client.wait()
        if serve.poll() is None and clients:
            time.sleep(15.0)  # Its time for a handshake, and more.
            report("after", gateway, record)
        serve.terminate()
        serve.wait(30)


def report(when: str, gateway: int, record: EngineRecord) -> None:
    """Print memory and descriptors of the gateway, and what a request and a console by TCP take."""
    files, status = open_files(gateway), Path(f"/proc/{gateway}/status").read_text()
    resident = int(status.partition("VmRSS:")[2].split()[0]) // 1024
    begun = time.monotonic()
    words = ["--max-tokens", str(TOKENS), "--ignore-eos"]
    ran = cli("submit", "-e", record.id, "Once upon a time", *words).wait(120)
    submitted, begun = time.monotonic() - begun, time.monotonic()
    far = cli("status", "-e", "crowd-by-tcp", "--timeout", "60").wait(120)
    attached = time.monotonic() - begun
    print(
        f"{when}: gateway {resident} MiB, {files.used if files else '?'} descriptors; {TOKENS} tokens in "
        f"{submitted:.1f} s (exit {ran}); status by TCP in {attached:.1f} s (exit {far}); "
        f"load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def cli(*words: str) -> subprocess.Popen[str]:
    """Start a command of ppconsole."""
    return subprocess.Popen(
        [sys.executable, "-m", "ppconsole", *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def wait_for(stream: Any, words: str) -> None:
    """Read lines until one has these words."""
    for line in stream:
        if words in line:
            return
    raise SystemExit(f"it ended without {words!r}")


def pid_of(record: EngineRecord, module: str) -> int:
    """Return the process of the engine that runs a module."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode().split("\0")
            if module in words and any(record.run_dir in word for word in words):
                return int(path.parent.name)
    raise SystemExit(f"no process runs {module}")


if __name__ == "__main__":
    main()
