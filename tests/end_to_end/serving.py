"""A served engine as an operator meets it: a profile on disk, CLI verbs as processes, and /proc."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import yaml
from engines import STEP_VARIABLE, Engine, Launch, run_module, wait_until
from operators import Operator
from ppconsole.link.engine_link import EngineLink
from ppengine.common.config import EngineConfig, Profile
from ppengine.common.ring import Gauge, RingReader
from ppengine.protocol.discovery import EngineRecord

PAGE = mmap.PAGESIZE
LASTING_S = 0.01
"""Sleep in each step of an engine whose requests only have to last: they take no core, and last on any machine."""


@dataclass
class Ran:
    """What a CLI verb printed and returned."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON value on stdout."""
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The one `error:` line on stderr; fails when there is none, or several."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, f"one error line, this is {self.err!r}"
        return lines[0]


class Served:
    """One engine in a runtime folder of its own. Use it in a `with`; leaving asserts that nothing is left."""

    launch: ClassVar[Launch] = staticmethod(run_module)
    """Starts the supervisor. Tests fork it instead (`preloaded`), drills and tests on GPUs do not."""

    def __init__(self, profile: Profile | dict[str, Any], *options: str, step_s: float = 0.0) -> None:
        """Start it. Each step takes `step_s` longer, asleep: a load that only has to last needs no core then."""
        self._step_s = step_s
        self.runtime = Path(tempfile.mkdtemp(prefix="pp-", dir="/tmp"))
        self.file = self.runtime / "profile.yaml"
        self.file.write_text(yaml.safe_dump(msgspec.to_builtins(profile)))
        self.options = options
        parallel = {"executor": "local", **msgspec.to_builtins(profile)["parallel"]}
        self.stages: int = parallel["pipeline"]
        # An actor does not say in its command line which stage it is; Ray's driver says that it is one.
        self._processes = 4 if parallel["executor"] == "ray" else 3 + self.stages * parallel.get("tensor", 1)
        http = msgspec.to_builtins(profile).get("http", {})
        self._processes += http.get("processes", 1) if http.get("listen") else 0
        self._processes += not msgspec.to_builtins(profile).get("model", {}).get("skip_tokenizer", False)
        backends = msgspec.to_builtins(profile).get("tiers", {}).get("backends")
        self._processes += self.stages * parallel.get("tensor", 1) if backends else 0
        self._serves_s = 250 if parallel["executor"] == "ray" else 100
        self._forks = parallel["executor"] == "local"
        self.code = 0
        """The exit code that the engine is expected to end with."""
        self.start()

    def start(self) -> None:
        """Start the engine and wait until it serves."""
        launch = self.launch if self._forks else run_module
        words, env = ["ppengine.supervisor", str(self.file), *self.options], {STEP_VARIABLE: str(self._step_s)}
        self.engine = Engine(self.runtime, words, env=env, launch=launch)
        try:
            self.find_pids()
            wait_until(lambda: "serving" in self.engine.errors.read_text(), "the engine serves", self._serves_s)
        except BaseException as error:
            error.add_note(self.said())
            self.remove()
            raise
        self.config = EngineConfig.load(self.engine.run_dir / "engine.json")
        name = f"{self.config.id}.json"
        self.record = msgspec.json.decode((self.runtime / "ppconsole" / name).read_bytes(), type=EngineRecord)

    def find_pids(self) -> None:
        """Find the pids again: a stage that was restarted has another one."""
        self.pids = self.engine.find_processes(self._processes)

    def restart(self) -> None:
        """Kill the engine, whatever state it is in, and start another one on the same profile."""
        self.engine.end()
        self.start()

    def __enter__(self) -> Served:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.stop()
        finally:
            self.remove()

    def said(self) -> str:
        """Return the ends of what the engine's processes have written."""
        files = [self.engine.errors, *sorted((self.runtime / "ppconsole").glob("*/*.log"))]
        return "\n".join(f"{file.name}: {file.read_text()[-1000:]}" for file in files)

    def stop(self) -> None:
        """End the engine by a signal, if it runs, and assert that nothing of it is left."""
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        if self.engine.process.poll() is None:
            self.engine.process.send_signal(signal.SIGTERM)
            self.ended(0, "SIGTERM received")
        assert self.engine.wait() == self.code
        assert self.engine.leftovers() == []

    def ended(self, code: int, reason: str) -> None:
        """Wait for the end of the engine; assert its exit code, and the reason that the supervisor gives."""
        self.code = code
        assert self.engine.wait() == code
        assert self.engine.read() == {"event": "stopped", "code": code, "reason": reason}

    def remove(self) -> None:
        """Kill what is left and remove the runtime folder."""
        self.engine.end()
        shutil.rmtree(self.runtime, ignore_errors=True)

    # --- command line ---------------------------------------------------------------------------------------

    def start_cli(self, *words: str, stdin: Any = subprocess.DEVNULL) -> subprocess.Popen[str]:
        """Start a verb as a process."""
        return subprocess.Popen(
            [sys.executable, "-m", "ppconsole", *words],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "XDG_RUNTIME_DIR": str(self.runtime)},
            text=True,
        )

    def cli(self, *words: str) -> Ran:
        """Run a verb to its end. In a coroutine `Operator.cli` is the one to use."""
        return self.end_of(self.start_cli(*words))

    def end_of(self, process: subprocess.Popen[str]) -> Ran:
        """Wait for the end of a verb."""
        try:
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
        return Ran(process.returncode, out, err)

    # --- processes ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def stopped(self, role: str) -> Iterator[float]:
        """Hold a process (`stage0`, `core`) by SIGSTOP; yields the time of the signal (wall clock)."""
        pid = self.pids[role]
        at = time.time()
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: process_state(pid) == "T", f"{role} is stopped")
        try:
            yield at
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def queued(self) -> float:
        """Return the seconds that the processes which find and report a fault have waited for a CPU since their start.

        Limits hold for a machine with a free core: the difference of two calls is what others on this one have taken.
        """
        pids = [self.engine.process.pid, *(self.pids[role] for role in ("core", "gateway", "agent"))]
        return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) for pid in pids) / 1e9

    def kv_range(self, stage: int) -> KvRange:
        """Return where the KV cache of a stage lies."""
        with contextlib.closing(RingReader(self.engine.ring_dir / f"s{stage}.0.main.ring")) as ring:
            start, end = self.config.layers[stage]
            return KvRange(
                self.pids[f"stage{stage}"],
                ring.gauge(Gauge.KV_BASE),
                ring.gauge(Gauge.KV_LENGTH),
                end - start,
                ring.gauge(Gauge.BLOCK_BYTES),
            )

    # --- link -----------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def operator(self, user: str = "op") -> AsyncIterator[Operator]:
        """Attach a console; yields it with its first snapshot.

        Other tests use the same engine: when this one fails, the engine is brought back to what it was at its start,
        or replaced by another one.
        """
        try:
            async with self._attach(user) as operator:
                yield operator
        except GeneratorExit:
            raise
        except BaseException as error:
            await self._mend(error)
            raise

    @contextlib.asynccontextmanager
    async def _attach(self, user: str) -> AsyncIterator[Operator]:
        link = EngineLink(self.record, find=lambda: self.record, user=user, backlog=0)
        operator = Operator(link, self)
        await link.start(operator.take)
        try:
            await link.attached(60)
            await operator.until(lambda picture: picture.engine.state != "loading", "a first snapshot")
            yield operator
        finally:
            await link.close()

    async def _mend(self, failure: BaseException) -> None:
        try:
            for pid in self.pids.values():
                os.kill(pid, signal.SIGCONT)
            async with self._attach("mend") as operator:
                await operator.clean(self.config.profile.memory.utilization)
        except Exception as error:  # noqa: BLE001  # Why it failed is no matter: another engine takes its place.
            failure.add_note(f"this engine was replaced, it could not be brought back: {error!r}"[:500])
            self.restart()


@dataclass
class KvRange:
    """The KV mapping of one stage: one segment of equal length a layer."""

    pid: int
    base: int
    length: int
    layers: int
    block_bytes: int

    def rss(self) -> int:
        """Return the resident bytes of the mapping as /proc/PID/smaps has them."""
        total, inside = 0, False
        for line in Path(f"/proc/{self.pid}/smaps").read_text().splitlines():
            if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                low, high = (int(word, 16) for word in found.groups())
                inside = low < self.base + self.length and high > self.base
            elif inside and line.startswith("Rss:"):
                total += int(line.split()[1]) * 1024
        return total

    def resident_from(self, block: int) -> int:
        """Return the resident bytes of blocks `[block, reserved)` in all layers, page by page."""
        layer_block, stride, total = self.block_bytes // self.layers, self.length // self.layers, 0
        with Path(f"/proc/{self.pid}/pagemap").open("rb") as file:
            for layer in range(self.layers):
                first = -(-(self.base + layer * stride + block * layer_block) // PAGE)
                last = (self.base + (layer + 1) * stride) // PAGE
                file.seek(first * 8)
                words = file.read((last - first) * 8)
                total += sum(1 for (word,) in struct.iter_unpack("<Q", words) if word >> 63)
        return total * PAGE


def audited(engine: Served) -> dict[str, list[str]]:
    """Return the outcomes of each command in the audit log."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in (engine.engine.run_dir / "audit.jsonl").read_text().splitlines():
        entry = json.loads(line)
        found[entry["id"]].append(entry["outcome"])
    return found


def process_state(pid: int) -> str:
    """Return the state letter of a process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def stage_pids(supervisor: int, stage: int) -> list[int]:
    """Return the processes of a stage whose engine has that supervisor."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            words = (path / "cmdline").read_bytes().replace(b"\0", b" ").split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == supervisor and b"--stage" in words and words[words.index(b"--stage") + 1] == b"%d" % stage:
            found.append(int(path.name))
    return found
