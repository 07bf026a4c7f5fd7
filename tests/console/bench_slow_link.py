"""Measure a console over 100 ms a direction and 1 Mbit/s: time to attach, bytes a second, and how soon keys show.

python tests/console/bench_slow_link.py

The console is the whole `ppconsole attach tcp://...` on a terminal of 80 x 24. A process that speaks the protocol is in
place of the engine: 256 requests on 8 stages. Another one delays and limits what goes between them.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.queues import Queue
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent / "engine"))

from bench_console import Keys, quantile
from large_engine import LargeEngine, LargeGateway
from ppengine.protocol.frames import encode
from slow_link import BYTES_S, ONE_WAY_S, Relay
from terminals import Terminal, Unanswered

STAGES, REQUESTS = 8, 256
SIZE = (80, 24)
WINDOW_S, KEYS = 30.0, 60
OVER_LINK = {"l": "LOGS", "s": "STACKS"}
"""Keys whose screens need an answer of the engine."""


def feed(ready: Queue[Any], down: Synchronized[int]) -> None:
    """Be the engine and the link, until killed."""
    engine = LargeEngine(time.time(), stages=STAGES, requests=REQUESTS)
    with LargeGateway(engine) as gateway:
        folder = Path(gateway.record.run_dir)

        async def relay() -> None:
            async with Relay([str(folder / name) for name in ("control", "state", "bulk")]) as link:
                ready.put((link.port, gateway.keypair.public, len(encode(engine.snapshot))))
                while True:
                    down.value = link.bytes[True]
                    await asyncio.sleep(0.05)

        asyncio.run(relay())


@contextlib.contextmanager
def far_engine() -> Iterator[tuple[int, str, int, Synchronized[int]]]:
    """Yield port, key, bytes of a snapshot, and the count of bytes that reached the console."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="pp-") as folder:
        for name in ("RUNTIME_DIR", "STATE_HOME", "CONFIG_HOME"):
            made = Path(folder) / name[0].lower()
            made.mkdir(mode=0o700)
            os.environ[f"XDG_{name}"] = str(made)
        ready, down = spawn.Queue(), spawn.Value("q", 0)
        process = spawn.Process(target=feed, args=(ready, down))
        process.start()
        try:
            yield *ready.get(timeout=120), down
        finally:
            process.kill()
            process.join(10)


def attach_s(terminal: Terminal) -> float:
    """Return the seconds until the first snapshot is on the screen."""
    begun = time.monotonic()
    while "SERVING" not in terminal.text():
        if time.monotonic() - begun > 60.0 or not terminal.running:
            raise SystemExit(f"not attached: {terminal.text()[-500:]!r}")
        time.sleep(0.02)
    return time.monotonic() - begun


def main() -> None:
    """Measure and print."""
    with far_engine() as (port, key, size, down):
        print(f"{STAGES} stages, {REQUESTS} requests, snapshot {size} bytes; {1e3 * ONE_WAY_S:.0f} ms a direction,")
        print(f"{BYTES_S} bytes/s; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
        command = [sys.executable, "-m", "ppconsole", "attach", f"tcp://127.0.0.1:{port}", "--server-key", key]
        with Terminal(command, *SIZE) as terminal:
            print(f"attached after {attach_s(terminal):.2f} s, with the start of Python", flush=True)
            time.sleep(5.0)
            before, begun, lines = down.value, time.monotonic(), terminal.written
            time.sleep(WINDOW_S)
            took = time.monotonic() - begun
            rate = (down.value - before) / took
            print(f"{rate / 1e3:.1f} kB/s to the console, {100 * rate / BYTES_S:.0f} % of the link;", end=" ")
            print(f"{(terminal.written - lines) / took / 1e3:.1f} kB/s to its terminal", flush=True)
            stale = "stale" in terminal.text() or "STALE" in terminal.text()
            print(f"stale meanwhile: {'yes' if stale else 'no'}", flush=True)
            keys = Keys(terminal)
            keys.move(KEYS)
            keys.filter(KEYS // 2)
            for kind in ("down", "filter", "back"):
                found = [1e3 * each.wall_s for each in keys.answers[kind]]
                if found:
                    print(
                        f"{kind}: p50 {statistics.median(found):.0f} ms, p99 {quantile(found, 0.99):.0f} ms", flush=True
                    )
            for key_of, title in OVER_LINK.items():
                found = []
                for _ in range(5):
                    with contextlib.suppress(Unanswered):
                        found.append(1e3 * terminal.press(key_of, lambda text, title=title: title in text, 10.0).wall_s)
                    with contextlib.suppress(Unanswered):
                        terminal.press("\x1b", lambda text: "SERVING" in text)
                    time.sleep(0.5)
                shown = ", ".join(f"{each:.0f}" for each in sorted(found))
                print(f"screen {title}: {shown} ms", flush=True)


if __name__ == "__main__":
    main()
