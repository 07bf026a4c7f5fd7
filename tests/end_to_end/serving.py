"""A served engine as an operator meets it: a profile on disk, CLI verbs as processes, a link, and /proc."""

from __future__ import annotations

import asyncio
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
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import yaml
from engines import Engine, wait_until
from ppconsole.link.engine import EngineLink
from ppconsole.link.source import Update
from ppengine.config import EngineConfig, Profile
from ppengine.protocol.control import Accepted, Deferred, Outcome, Pause, Refused, Submit, Verb
from ppengine.protocol.discovery import EngineRecord
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.snapshot import Event, RequestInfo, Snapshot
from ppengine.ring import Gauge, RingReader

PAGE = mmap.PAGESIZE


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

    def __init__(self, profile: Profile | dict[str, Any], *options: str) -> None:
        self.runtime = Path(tempfile.mkdtemp(prefix="pp-", dir="/tmp"))
        file = self.runtime / "profile.yaml"
        file.write_text(yaml.safe_dump(msgspec.to_builtins(profile)))
        self.engine = Engine(self.runtime, ["ppengine.supervisor", str(file), *options])
        self.stages: int = msgspec.to_builtins(profile)["parallel"]["pipeline"]
        try:
            self.pids = self.engine.find_processes(3 + self.stages)
            wait_until(lambda: "serving" in self.engine.errors.read_text(), "the engine serves", 60)
        except BaseException as error:
            error.add_note(self.said())
            self.remove()
            raise
        self.config = EngineConfig.load(self.engine.run_dir / "engine.json")
        name = f"{self.config.id}.json"
        self.record = msgspec.json.decode((self.runtime / "ppconsole" / name).read_bytes(), type=EngineRecord)

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
        self.engine.process.send_signal(signal.SIGTERM)
        assert self.engine.wait(15) == 0
        assert self.engine.leftovers() == []

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

    def cli(self, *words: str, timeout: float = 60) -> Ran:
        """Run a verb to its end."""
        process = self.start_cli(*words)
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
        return Ran(process.returncode, out, err)

    # --- processes ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def stopped(self, role: str) -> Iterator[float]:
        """Hold a process (`stage0`, `core`) by SIGSTOP; yields the monotonic time of the signal."""
        pid = self.pids[role]
        os.kill(pid, signal.SIGSTOP)
        at = time.monotonic()
        wait_until(lambda: process_state(pid) == "T", f"{role} is stopped")
        try:
            yield at
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

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
        """Attach a console; yields it with its first snapshot."""
        link = EngineLink(self.record, find=lambda: self.record, user=user, backlog=0)
        operator = Operator(link)
        await link.start(operator.take)
        try:
            await link.attached(10)
            await operator.until(lambda picture: picture.engine.state != "loading", "a first snapshot")
            yield operator
        finally:
            await link.close()


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


def process_state(pid: int) -> str:
    """Return the state letter of a process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class Operator:
    """A console without a screen: commands, the newest picture, and waiting for what a picture shows."""

    def __init__(self, link: EngineLink) -> None:
        self.link = link
        self.events: list[Event] = []
        self._picture: Snapshot | None = None
        self._fresh = asyncio.Event()

    def take(self, update: Update) -> None:
        """Take one update of the link."""
        if isinstance(update, Snapshot):
            self._picture = update
            self._fresh.set()
        elif isinstance(update, Event):
            self.events.append(update)

    @property
    def picture(self) -> Snapshot:
        """The newest snapshot."""
        assert self._picture is not None
        return self._picture

    async def until(self, condition: Callable[[Snapshot], Any], what: str, timeout: float = 20.0) -> Snapshot:
        """Return the first snapshot that meets `condition`; fail with `what` after `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                while self._picture is None or not condition(self._picture):
                    self._fresh.clear()
                    await self._fresh.wait()
        except TimeoutError:
            shown = msgspec.json.encode(self._picture).decode()
            raise AssertionError(f"not within {timeout:g} s: {what}; the newest picture: {shown[:3000]}") from None
        return self.picture

    async def request(self, name: str, condition: Callable[[RequestInfo], Any], what: str) -> RequestInfo:
        """Return the first picture of a request that meets `condition`."""

        def met(picture: Snapshot) -> bool:
            return any(request.id == name and condition(request) for request in picture.requests)

        picture = await self.until(met, f"{name} {what}")
        return next(request for request in picture.requests if request.id == name)

    async def stuck(self, name: str) -> RequestInfo:
        """Wait until the same steps of a request stay in flight: the stage that holds them is stopped."""
        seen: list[int] = []
        since = 0.0

        def stays(request: RequestInfo) -> bool:
            nonlocal seen, since
            if request.in_flight != seen:
                seen, since = list(request.in_flight), self.picture.sampled_at
            return bool(seen) and self.picture.sampled_at - since > 0.4

        return await self.request(name, stays, "has steps that stay in flight")

    async def idle(self) -> Snapshot:
        """Wait until no request is left and every block is back, and return that picture."""

        def given_back(picture: Snapshot) -> bool:
            blocks, swap = picture.stages[0].kv_blocks, picture.stages[0].swap_blocks
            return not picture.requests_total and blocks.used == 0 and swap.used == 0

        picture = await self.until(given_back, "all blocks are back")
        for stage in picture.stages:
            blocks = stage.kv_blocks
            assert blocks.cached is not None
            assert blocks.free is not None
            assert blocks.mapped == blocks.cached + blocks.free + 1, "cached, free and the null block make all"
        return picture

    async def ask(self, verb: Verb, **options: Any) -> Outcome | Refused:
        """Send a command and return its end, whatever it is."""
        return await self.link.command(verb, timeout=30, **options)

    async def do(self, verb: Verb, **options: Any) -> Outcome:
        """Send a command that must be applied (or planned)."""
        end = await self.ask(verb, **options)
        assert isinstance(end, Outcome), end
        assert end.state == ("planned" if options.get("dry_run") else "applied"), end
        return end

    async def refused(self, verb: Verb, code: str, **options: Any) -> str:
        """Send a command that must be refused with `code`; returns its one line."""
        end = await self.ask(verb, **options)
        assert isinstance(end, Refused), end
        assert end.code == code, end
        assert end.text
        assert "\n" not in end.text
        return end.text

    async def begin(self, verb: Verb, **options: Any) -> Begun:
        """Send a command and return once it is accepted."""
        begun = Begun()
        command = self.link.command(verb, timeout=60, on_progress=begun.take, **options)
        begun.end = asyncio.create_task(command)
        accepted = asyncio.create_task(begun.accepted.wait())
        await asyncio.wait([accepted, begun.end], timeout=10, return_when=asyncio.FIRST_COMPLETED)
        assert accepted.done(), begun.end
        return begun

    async def pause(self) -> Snapshot:
        """Stop scheduling, keep all, and wait until nothing is in flight."""
        await self.do(Pause(mode="keep"))

        def quiet(picture: Snapshot) -> bool:
            return picture.engine.state == "paused" and not any(request.in_flight for request in picture.requests)

        return await self.until(quiet, "paused and quiet")

    async def submit(self, prompt: str | list[int], **sampling: Any) -> str:
        """Queue a request (greedy, end of sequence ignored, unless told otherwise) and return its id."""
        params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **sampling})
        text, ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
        end = await self.do(Submit(prompt=text, prompt_token_ids=ids, sampling=params))
        assert end.request is not None
        return end.request

    async def submit_all(self, prompts: list[list[int]], **sampling: Any) -> list[str]:
        """Queue several requests."""
        return [await self.submit(prompt, **sampling) for prompt in prompts]

    async def tokens(self, request: str, sample: int = 0) -> list[int]:
        """Return all tokens of a sample once it has ended."""
        return (await self.output(request, sample))[0]

    async def output(self, request: str, sample: int = 0, timeout: float = 60) -> tuple[list[int], str, str | None]:
        """Return tokens, text and finish reason of a sample once it has ended."""
        tokens: list[int] = []
        text = ""
        async with asyncio.timeout(timeout):
            while True:
                part = await self.link.fetch(request, offset=len(tokens), text_offset=len(text), sample=sample)
                tokens += part.token_ids
                text += part.text
                if part.finished:
                    return tokens, text, part.finish_reason

    async def all_tokens(self, requests: list[str]) -> list[list[int]]:
        """Return the tokens of several requests."""
        return [await self.tokens(request) for request in requests]


@dataclass
class Begun:
    """A command under way: what it said so far, and its end to come."""

    accepted: asyncio.Event = field(default_factory=asyncio.Event)
    deferred: list[str] = field(default_factory=list)
    end: asyncio.Task[Outcome | Refused] = field(init=False)

    def take(self, step: Accepted | Deferred) -> None:
        """Take one piece of progress."""
        self.accepted.set()
        if isinstance(step, Deferred):
            self.deferred.append(step.text)
