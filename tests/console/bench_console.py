"""Measure what a console of a large engine costs, and how soon it answers keys, beside btop and nvitop.

python tests/console/bench_console.py --beside btop --beside nvitop

The console is the whole `ppconsole attach` on a pseudo-terminal. A process that speaks the protocol is in place of the
engine: 1,000 requests on 64 stages change every second, and an hour of history is on disk.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.synchronize import Event
from pathlib import Path

from large_engine import LargeEngine, LargeGateway, write_hour
from terminals import Answer, Shows, Terminal, Unanswered

SIZES = ("80x24", "120x36", "200x50")
PAUSE_S = (0.03, 0.2)
"""Time between two keys, by chance: so they meet every part of the second between two snapshots."""
FILTERS = ("alice", "state:wait", "blk>40", "r-0001", "owner:bob")
SCREENS = {"e": "EVENTS", "T": "m known", "d": "DIAGNOSIS", "v": "STREAMS", "l": "LOGS", "?": "HELP"}
"""Keys of screens, with words that only those screens have."""
_SELECTED = re.compile(r"> (r-[0-9a-f]{6})")
_CLOCK = re.compile(r"REPLAY (\d\d:\d\d:\d\d)")
_KINDS = ("down", "filter", "screen", "back", "first screen", "past", "scrub")


def feed(ready: Event, stop: Event) -> None:
    """Be the engine until `stop`. A process of its own: its work must not delay the clock of the keys."""
    with LargeGateway(LargeEngine(time.time())) as gateway:
        write_hour(gateway.id, time.time())
        ready.set()
        stop.wait()


@contextlib.contextmanager
def large_engine() -> Iterator[None]:
    """Have a large engine, with runtime and state folders of its own, while the block lasts."""
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="pp-") as folder:
        for name in ("RUNTIME_DIR", "STATE_HOME", "CONFIG_HOME"):
            made = Path(folder) / name[0].lower()
            made.mkdir(mode=0o700)
            os.environ[f"XDG_{name}"] = str(made)
        _configure_btop(Path(folder) / "c")
        ready, stop = processes.Event(), processes.Event()
        process = processes.Process(target=feed, args=(ready, stop))
        process.start()
        try:
            if not ready.wait(300):
                raise SystemExit("the feeder is not ready within 300 s")
            yield
        finally:
            stop.set()
            process.join(10)


def _configure_btop(folder: Path) -> None:
    """Have btop draw once a second; two are its default."""
    (folder / "btop").mkdir()
    (folder / "btop" / "btop.conf").write_text("update_ms = 1000\n")


def cost(commands: dict[str, list[str]], size: tuple[int, int], rounds: int, window: float) -> None:
    """Print share of a core, bytes written and memory of each program; rounds go through all of them in turn."""
    shares: dict[str, list[float]] = {name: [] for name in commands}
    rates: dict[str, list[float]] = {name: [] for name in commands}
    starts, memory = {}, {}
    for _ in range(rounds):
        for name, command in commands.items():
            with Terminal(command, *size) as terminal:
                starts[name] = terminal.settle()
                begun, used, written = time.monotonic(), terminal.cpu_s(), terminal.written
                time.sleep(window)
                took = time.monotonic() - begun
                shares[name].append(100 * (terminal.cpu_s() - used) / took)
                rates[name].append((terminal.written - written) / took / 1000)
                memory[name] = terminal.rss_mib()
    for name in commands:
        each = ", ".join(f"{share:.2f}" for share in shares[name])
        print(
            f"  {name:10} {statistics.mean(shares[name]):6.2f} % of a core ({each})"
            f"  {statistics.mean(rates[name]):7.1f} kB/s  {memory[name]:6.1f} MiB  start {starts[name]:.2f} CPU s",
            flush=True,
        )


class Keys:
    """Presses keys by chance times and keeps the time until each one shows."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._dice = random.Random(3)
        self.answers: dict[str, list[Answer]] = {kind: [] for kind in _KINDS}
        self.unanswered: list[str] = []

    def press(self, kind: str, keys: str, shows: Shows) -> None:
        """Press and wait; a pause comes before."""
        time.sleep(self._dice.uniform(*PAUSE_S))
        try:
            self.answers[kind].append(self._terminal.press(keys, shows))
        except Unanswered as error:
            self.unanswered.append(str(error))
            print(f"  {error}", flush=True)

    def move(self, count: int) -> None:
        """Move the selection down the table."""
        seen = [""]

        def moved(text: str) -> bool:
            found = _SELECTED.findall(text)
            if not found or found[-1] == seen[0]:
                return False
            seen[0] = found[-1]
            return True

        for _ in range(count):
            self.press("down", "j", moved)

    def filter(self, count: int) -> None:
        """Type filters, letter by letter; the title of the table shows each one."""
        while count > 0:
            for text in FILTERS:
                self.press("filter", "/", lambda text: "⏎ keep" in text)
                for end in range(1, len(text) + 1):
                    title = f"/{text[:end].strip()}"
                    self.press("filter", text[end - 1], lambda found, title=title: title in found)
                self.press("back", "\x1b", lambda text: "i prompt" in text)
                count -= len(text) + 1

    def screens(self, count: int) -> None:
        """Open screens and leave them; the first time of each one imports it."""
        for number in range(-(-count // len(SCREENS))):
            for key, title in SCREENS.items():
                self.press("screen" if number else "first screen", key, lambda text, title=title: title in text)
                self.press("back", "\x1b", lambda text: "SERVING" in text)

    def past(self, count: int) -> None:
        """Open the last hour, and move in it."""
        seen = [""]

        def moved(text: str) -> bool:
            found = _CLOCK.findall(text)
            if not found or found[-1] == seen[0]:
                return False
            seen[0] = found[-1]
            return True

        self.press("past", "h", moved)
        for number in range(count):
            self.press("scrub", "[" if number % 3 else "\x1b[D", moved)
        self.press("back", "\x1b", lambda text: "  RW  " in text)


def answers(command: list[str], size: tuple[int, int], count: int) -> dict[str, list[Answer]]:
    """Return the time until keys show, by kind."""
    with Terminal(command, *size) as terminal:
        terminal.settle()
        keys = Keys(terminal)
        parts: tuple[Callable[[int], None], ...] = (keys.move, keys.filter, keys.screens, keys.past)
        for part, share in zip(parts, (0.4, 0.35, 0.15, 0.1), strict=True):
            part(round(count * share))
        if keys.unanswered:
            print(f"  {len(keys.unanswered)} keys without an answer")
        print(f"  memory after the keys: {terminal.rss_mib():.1f} MiB")
    return keys.answers


def print_answers(answers: dict[str, list[Answer]]) -> float:
    """Print quantiles by kind; return p99 of the keys of a console that has opened its screens before.

    The CPU time does not grow by the work of other programs, unlike the time on the clock.
    """
    every = [each for kind in ("down", "filter", "screen", "back", "scrub") for each in answers[kind]]
    for kind, found in (*answers.items(), ("all but first", every)):
        if found:
            wall, cpu = (_milliseconds(each) for each in zip(*found, strict=True))
            print(f"  {kind:14} {len(found):4d} keys  {wall}   CPU {cpu}", flush=True)
    return quantile([each.wall_s for each in every], 0.99)


def _milliseconds(seconds: Sequence[float]) -> str:
    """Return quantiles in milliseconds."""
    p50, p90, p99 = (1000 * quantile(seconds, share) for share in (0.5, 0.9, 0.99))
    return f"p50 {p50:6.1f}  p90 {p90:6.1f}  p99 {p99:6.1f}  longest {1000 * max(seconds):6.1f} ms"


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(1e6 * share) * len(ordered) // 10**6) - 1)]


def main() -> None:
    """Measure the sizes that are wanted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", action="append", help="COLUMNSxLINES; may be repeated")
    parser.add_argument("--beside", action="append", default=[], metavar="PROGRAM", help="measure it too, in turn")
    parser.add_argument("--rounds", type=int, default=3, help="windows of each program, and runs of keys")
    parser.add_argument("--window", type=float, default=20.0, help="seconds of a window")
    parser.add_argument("--keys", type=int, default=300, help="keys of a run; 0: none")
    options = parser.parse_args()
    console = [sys.executable, "-m", "ppconsole", "attach"]
    with large_engine():
        for name in options.size or SIZES:
            size = tuple(int(each) for each in name.split("x"))
            if options.window:
                print(f"{name}: cost at one snapshot a second", flush=True)
                cost({"console": console} | {each: [each] for each in options.beside}, size, options.rounds,
                     options.window)  # fmt: skip
            for number in range(options.rounds if options.keys else 0):
                load = os.getloadavg()[0]
                print(f"{name}: keys, run {number + 1} of {options.rounds}, load {load:.1f}", flush=True)
                print_answers(answers(console, size, options.keys))


if __name__ == "__main__":
    main()
