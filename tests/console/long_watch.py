"""A console that watches for hours in a fraction of the time: its memory by the simulated hour.

python tests/console/long_watch.py --hours 24

Each second has a snapshot and events, encoded and decoded as on the wire, and is reduced and painted.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path

from fake_source import FakeSource
from large_engine import LargeEngine, copied
from ppconsole.app import ConsoleApp
from ppengine.protocol.recording import LinkState

HOUR_S = 3600


def rss_mib() -> float:
    """Return the resident memory of this process in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def watch(engine: LargeEngine, seconds: int, size: tuple[int, int], look: Callable[[int], None]) -> int:
    """Have a console watch `engine` for `seconds`; `look` is called after each. Return the pictures that it took."""
    now = [100.0]
    app = ConsoleApp(FakeSource(None), clock=lambda: now[0], theme="pp-dark")  # type: ignore[arg-type]
    ticks = 0
    tick = app.tick

    def counted() -> None:
        nonlocal ticks
        ticks += 1
        tick()

    app.tick = counted  # type: ignore[method-assign]
    async with app.run_test(size=size):
        app.on_update(LinkState(state="live", age_s=0.0))
        for second in range(seconds):
            now[0] += 1.0
            for event in engine.advance(1.0):
                app.on_update(copied(event))
            app.on_update(copied(engine.snapshot))
            while ticks <= second:  # its clock is a second further, so it paints at once
                await asyncio.sleep(0)
            look(second + 1)
    return ticks


def main() -> None:
    """Print memory and Python objects at the begin and after each simulated hour."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hours", type=float, default=24)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--size", default="120x36", help="COLUMNSxLINES")
    options = parser.parse_args()
    columns, lines = (int(each) for each in options.size.split("x"))
    begun, used = time.monotonic(), time.process_time()

    def look(second: int) -> None:
        if second in (60, 600) or second % HOUR_S == 0:
            gc.collect()
            took, busy = time.monotonic() - begun, time.process_time() - used
            print(f"{second / HOUR_S:6.2f} h  {rss_mib():6.1f} MiB  {len(gc.get_objects()):7d} objects"
                  f"  after {took:.0f} s, {busy:.0f} CPU s", flush=True)  # fmt: skip

    engine = LargeEngine(time.time(), options.stages, options.requests)
    ticks = asyncio.run(watch(engine, round(options.hours * HOUR_S), (columns, lines), look))
    print(f"{ticks} pictures")


if __name__ == "__main__":
    main()
