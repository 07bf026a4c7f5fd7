"""Chaos: kills, stops, full disks and half-open connections while many clients submit, on one engine that is kept.

    python tests/drills/run.py --chaos 30 [--seed N] [--clients 64]

Every accepted request must end with the tokens of transformers, or with a loss that names it. With a C compiler, the
wall clock of engine, consoles and clients jumps as well. `--only` chooses actions: `--only clock,kill`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from clients import Clients
from load import MODEL
from ppengine.protocol.discovery import EngineRecord, list_engines
from wall_clock import FILE, NoWallClockError, WallClock, shift

STAGES = 3
SERVES_S, ENDS_S = 180.0, 120.0
WITHIN_S, KILLS, STAGE_KILLS = 600.0, 3, 2
"""Most kills of a role and of a stage in ten minutes; above that an engine ends, or waits for an operator."""
SPELL_S = (3.0, 12.0)
DISK_MIB = 96
FULL_S, OPEN_S, STOPPED_S = 6.0, 15.0, (0.3, 6.0)
HALF_OPEN = 200
JUMPS_S = (-2 * 86_400, -3600, -1, 0, 1, 3600, 86_400)
"""Offsets of the wall clock from the machine's."""
ROLES = ("gateway", "core", "agent", "texts", "supervisor", "forkserver")


@dataclass
class Kept:
    """An engine under `serve --restart`, with its folders in a small file system of its own."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes]
    errors: Path

    @property
    def record(self) -> EngineRecord | None:
        """Its record; None while there is none."""
        return next(iter(list_engines()), None)

    def pids(self) -> dict[str, int]:
        """Return the processes by role: `core`, `stage 1`, ..."""
        record, found = self.record, dict[str, int]()
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").split()
                if record is not None and any(record.run_dir in word for word in words) and "-m" in words:
                    role = words[words.index("-m") + 1].removeprefix("ppengine.").split(".")[-1]
                    stage = f"stage {words[words.index('--stage') + 1]}" if "--stage" in words else role
                    found[stage] = int(path.name)
        if record is not None:
            found["supervisor"] = record.pid
        return found


@dataclass
class Ledger:
    """Every action, and the longest time without a token of any client from it to the next action."""

    done: Counter[str] = field(default_factory=Counter)
    gaps: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


class Chaos:
    """Chooses and carries out actions. `kept` is the engine, `clients` the load."""

    def __init__(self, kept: Kept, clients: Clients, seed: int, only: list[str]) -> None:
        self._kept, self._clients, self._random, self._only = kept, clients, random.Random(seed), only
        self._killed: defaultdict[str, deque[float]] = defaultdict(deque)
        self._consoles: list[subprocess.Popen[bytes]] = []
        self.ledger = Ledger()

    async def run(self, minutes: float) -> None:
        """Act until the time is over."""
        until = time.monotonic() + minutes * 60
        while time.monotonic() < until and self._kept.process.poll() is None:
            name, act = self._random.choice(self._actions())
            self._clients.listen()
            await act()
            self.ledger.done[name] += 1
            await asyncio.sleep(self._random.uniform(*SPELL_S))
            gap = await self._clients.silence(SERVES_S)
            self.ledger.gaps[name].append(gap)
            print(
                f"{time.monotonic() - until + minutes * 60:7.1f} s  {name:18s} {gap:6.2f} s  {self._clients.line}",
                flush=True,
            )
        for console in self._consoles:
            console.kill()

    def _actions(self) -> list[tuple[str, Callable[[], object]]]:
        pids, actions = self._kept.pids(), []
        names = [*ROLES, *(f"stage {stage}" for stage in range(STAGES))]
        for name in names:
            role = name.split()[0]
            if name not in pids:
                continue
            if self._may_kill(name):
                actions.append((f"kill {role}", lambda name=name: self._kill(name)))
            actions.append((f"stop {role}", lambda name=name: self._stop(name)))
        others = [("full disk", self._fill), ("half-open", self._half_open), ("console", self._console)]
        others += [("clock", self._jump)] if FILE in os.environ else []
        found = actions + 2 * others
        return [one for one in found if not self._only or any(one[0].startswith(name) for name in self._only)]

    def _may_kill(self, name: str) -> bool:
        most = STAGE_KILLS if name.startswith("stage") else KILLS
        times = self._killed[name]
        while times and time.monotonic() - times[0] > WITHIN_S:
            times.popleft()
        return len(times) < most

    async def _kill(self, name: str) -> None:
        self._killed[name].append(time.monotonic())
        _signal(self._kept.pids().get(name), signal.SIGKILL)

    async def _stop(self, name: str) -> None:
        pid = self._kept.pids().get(name)
        _signal(pid, signal.SIGSTOP)
        await asyncio.sleep(self._random.uniform(*STOPPED_S))
        _signal(pid, signal.SIGCONT)

    async def _fill(self) -> None:
        """Fill the file system of run folder and state folder for a while."""
        path = self._kept.folder / "filler"
        with contextlib.suppress(OSError), path.open("wb") as file:
            while True:
                file.write(bytes(2**20))
        await asyncio.sleep(FULL_S)
        path.unlink()

    async def _jump(self) -> None:
        shift(Path(os.environ[FILE]), self._random.choice(JUMPS_S))

    async def _half_open(self) -> None:
        """Open connections to the port: some say nothing, some a part of a greeting."""
        opened = []
        for number in range(HALF_OPEN):
            with contextlib.suppress(OSError):
                one = socket.create_connection(("127.0.0.1", self._kept.port), timeout=1)
                one.send(b"\xff" + bytes(8) + b"\x7f" if number % 2 else b"")
                opened.append(one)
        asyncio.get_running_loop().call_later(OPEN_S, lambda: [one.close() for one in opened])

    async def _console(self) -> None:
        """Open consoles and kill or stop older ones: one that is stopped reads nothing and stays attached."""
        self._consoles = [one for one in self._consoles if one.poll() is None]
        if len(self._consoles) >= 4:
            victim = self._consoles.pop(0)
            victim.send_signal(signal.SIGKILL)
            victim.wait()
            return
        self._consoles.append(
            subprocess.Popen(
                [sys.executable, "-m", "ppconsole", "watch", "--json"],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
        )  # fmt: skip
        await asyncio.sleep(1.5)
        if self._random.random() < 0.5:
            self._consoles[-1].send_signal(signal.SIGSTOP)


def with_clock() -> None:
    """Start this program again with a wall clock that jumps: its own, and that of all processes that it starts."""
    if FILE in os.environ:
        return
    try:
        clock = WallClock(Path(tempfile.mkdtemp(prefix="pp-clock-")))
    except NoWallClockError as error:
        print(f"note: no clock jumps: {error}")
        return
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | clock.env)


def _signal(pid: int | None, number: signal.Signals) -> None:
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@contextlib.asynccontextmanager
async def engine() -> AsyncIterator[Kept]:
    """Serve the bundled model in float64 with all folders in a small file system; end it and look what is left."""
    folder = Path(tempfile.mkdtemp(prefix="pp-", dir="/tmp"))
    mounted = (
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", folder], check=False).returncode
        == 0
    )
    if not mounted:
        print("note: no file system could be mounted, so no disk is filled")
    for variable, name in (("XDG_RUNTIME_DIR", "run"), ("XDG_STATE_HOME", "state"), ("XDG_CONFIG_HOME", "config")):
        (folder / name).mkdir(mode=0o700)
        os.environ[variable] = str(folder / name)
    subprocess.run([sys.executable, "-m", "ppconsole", "key", "new"], check=False, capture_output=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    errors = folder / "serve.log"
    settings = (f"parallel.pipeline={STAGES}", "model.dtype=float64", "threads_per_stage=1")
    words = ["serve", "tiny", "--restart", f"--listen=tcp://127.0.0.1:{port}", *(f"--set={one}" for one in settings)]
    with errors.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-m", "ppconsole", *words], stdout=subprocess.DEVNULL, stderr=file)
    kept = Kept(folder, port, process, errors)
    try:
        deadline = time.monotonic() + SERVES_S
        while b": serving" not in errors.read_bytes():
            assert process.poll() is None and time.monotonic() < deadline, errors.read_text()
            await asyncio.sleep(0.2)
        yield kept
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        left = [str(path) for path in (folder / "run" / "ppconsole").glob("*")]
        print(f"exit code {process.poll()}; left behind: {left or 'nothing'}")
        print("\n".join(errors.read_text(errors="replace").splitlines()[-5:]))
        process.kill()
        shutil.copy(errors, Path(tempfile.gettempdir()) / "chaos-serve.log")
        if mounted:
            subprocess.run(["umount", "-l", folder], check=False)
        shutil.rmtree(folder, ignore_errors=True)


async def chaos(minutes: float, count: int, seed: int, only: list[str]) -> int:
    """Run for `minutes`, print a table, and return 0 if every accepted request had its tokens or a named loss."""
    assert MODEL.is_dir()
    async with engine() as kept:
        clients = Clients(count, seed, lambda: kept.record)
        await clients.start()
        one = Chaos(kept, clients, seed, only)
        await one.run(minutes)
        open_ = await clients.finish(ENDS_S)
        alive = kept.process.poll() is None
    print(table(one.ledger, clients, minutes))
    print(json.dumps({"gaps": one.ledger.gaps, "outcomes": clients.outcomes, "losses": clients.losses}))
    return 0 if alive and not open_ and not clients.bad else 1


def table(ledger: Ledger, clients: Clients, minutes: float) -> str:
    """Return actions and outcomes as Markdown."""
    lines = [
        f"{minutes:g} minutes, {clients.count} clients",
        "",
        "| action | times | no token of any client for, median | most |",
        "|---|---|---|---|",
    ]
    for name, gaps in sorted(ledger.gaps.items()):
        lines.append(f"| {name} | {ledger.done[name]} | {statistics.median(gaps):.2f} s | {max(gaps):.2f} s |")
    lines += ["", "| requests | count |", "|---|---|"]
    lines += [f"| {name} | {count} |" for name, count in clients.outcomes.items()]
    return "\n".join([*lines, "", *(f"- {text}" for text in clients.bad[:20])])
