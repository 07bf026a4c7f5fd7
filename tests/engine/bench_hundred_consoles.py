"""Measure what 100 consoles cost an engine: time of a step, and memory of the gateway; 20 of them are stopped.

python tests/engine/bench_hundred_consoles.py tiny --pairs 8

Like `ppconsole attach`, they take one snapshot a second; with `--fast`, ten, as `watch --interval 0.1` does.
The consoles are light: three sockets with CURVE each, which read and drop what the gateway sends, in a few processes.
Real ones run on the machines of their users, so these have the lowest priority. Pairs with and without take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zmq
from bench_watchers import cpu_seconds, roles_of
from ppengine.bench.sides import run_engine
from ppengine.bench.workload import Job, random_jobs
from ppengine.checkpoint.model_spec import read_spec
from ppengine.common.config import load_profile
from ppengine.common.curve import be_client, make_keypair
from ppengine.offline.llm import LLM
from ppengine.protocol import frames
from ppengine.protocol.control import Hello, Ping
from ppengine.protocol.discovery import EngineRecord, list_engines
from ppengine.protocol.keys import own_keypair

CONSOLES, STALLED, IN_ONE = 100, 20, 20
"""Consoles, those of them that are stopped, and consoles of one process."""
SETTLE_S, WINDOW_S = 4.0, 6.0
"""Seconds for consoles to attach, and the least of each side of a pair."""
SURE = 1.96
"""Standard deviations of an interval of 95 %."""


def watch(engine_id: str, count: int, topic: bytes) -> None:
    """Be `count` consoles until killed: subscribe, say Hello, ping once a second, drop what comes."""
    os.nice(19)
    record = next(one for one in list_engines() if one.id == engine_id)
    context: zmq.Context[Any] = zmq.Context()
    poller, pair = zmq.Poller(), own_keypair("client", make_keypair)
    controls = []
    for number in range(count):
        state, control, bulk = (context.socket(kind) for kind in (zmq.SUB, zmq.DEALER, zmq.DEALER))
        for socket, endpoint in (
            (state, record.state_endpoint), (control, record.control_endpoint), (bulk, record.bulk_endpoint)
        ):  # fmt: skip
            socket.linger = 0
            be_client(socket, pair, record.server_key)
            socket.connect(endpoint)
            poller.register(socket, zmq.POLLIN)
        state.subscribe(topic)
        state.subscribe(frames.TOPIC_EVENT)
        hello = Hello(proto_min=1, proto_max=frames.PROTOCOL, client=f"bench-{number}", user="bench")
        say(record, control, hello)
        controls.append(control)
    due = time.monotonic()
    while True:
        for socket, _ in poller.poll(100):
            with contextlib.suppress(zmq.Again):
                while True:
                    socket.recv_multipart(zmq.NOBLOCK, copy=False)
        if time.monotonic() >= due:
            due += 1.0
            for control in controls:
                say(record, control, Ping(nonce=1))


def say(record: EngineRecord, socket: Any, message: Hello | Ping) -> None:
    """Send one message, unless the socket is full."""
    with contextlib.suppress(zmq.Again):
        head = frames.encode(frames.header(record.id, record.epoch))
        socket.send_multipart([head, frames.encode(message)], zmq.NOBLOCK)


class Crowd:
    """The consoles, while the block lasts; those of one process are stopped once they have attached."""

    def __init__(self, engine_id: str, options: argparse.Namespace) -> None:
        apart = ["taskset", "-c", options.apart] if options.apart else []
        self._command = [*apart, sys.executable, __file__, "--watch", engine_id, *(["--fast"] if options.fast else [])]

    def __enter__(self) -> Crowd:
        self.processes = [subprocess.Popen(self._command) for _ in range(CONSOLES // IN_ONE)]
        time.sleep(SETTLE_S)
        for process in self.processes[: STALLED // IN_ONE]:
            process.send_signal(signal.SIGSTOP)
        time.sleep(1.0)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def cpu(self) -> float:
        """Return CPU seconds of all consoles so far."""
        return sum(cpu_seconds(process.pid) for process in self.processes)


def rss(pid: int) -> float:
    """Return the resident MiB of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 1024**2


def steps_for(llm: LLM, work: Iterator[list[Job]], engine: list[int], window_s: float) -> tuple[float, float]:
    """Return ms and CPU ms of a step of one request a row, for at least `window_s`."""
    steps = took = 0.0
    before = sum(map(cpu_seconds, engine))
    while took < window_s:
        jobs = next(work)
        took += run_engine(llm, jobs)
        # All requests begin together and have one length, so a step decodes one token of each.
        steps += jobs[0].output_len
    return 1e3 * took / steps, 1e3 * (sum(map(cpu_seconds, engine)) - before) / steps


def measure(llm: LLM, work: Iterator[list[Job]], options: argparse.Namespace) -> None:
    """Alternate both sides and print their ratios."""
    until = time.monotonic() + (options.seconds or math.inf)
    engine = llm.llm_engine
    roles = roles_of(engine.supervisor_pid)
    gateway = next(pid for pid in roles["watchers"] if b"ppengine.gateway" in _command(pid))
    alone, crowded, ratios, cpu_ratios, shares, memory = [], [], [], [], [], [rss(gateway)]
    print(f"gateway {memory[0]:.1f} MiB, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    for number in itertools.count():
        if number >= options.pairs or (number and time.monotonic() > until):
            break
        sides: dict[bool, tuple[float, float]] = {}
        for attached in (False, True) if number % 2 else (True, False):
            if not attached:
                sides[False] = steps_for(llm, work, roles["engine"], options.window)
                continue
            with Crowd(engine.engine_id, options) as crowd:
                before, began = (cpu_seconds(gateway), crowd.cpu()), time.monotonic()
                sides[True] = steps_for(llm, work, roles["engine"], options.window)
                passed = time.monotonic() - began
                shares.append(
                    [100 * (cpu_seconds(gateway) - before[0]) / passed, 100 * (crowd.cpu() - before[1]) / passed]
                )
                memory.append(rss(gateway))
        alone.append(sides[False][0])
        crowded.append(sides[True][0])
        ratios.append(sides[True][0] / sides[False][0])
        cpu_ratios.append(sides[True][1] / sides[False][1])
        print(
            f"pair {number}: step {alone[-1]:.3f} ms alone, {crowded[-1]:.3f} ms with {CONSOLES} consoles,"
            f" ratio {ratios[-1]:.3f}, of the engine's CPU {cpu_ratios[-1]:.3f}; gateway {shares[-1][0]:.1f} %,"
            f" consoles {shares[-1][1]:.1f} % of a core, gateway {memory[-1]:.1f} MiB,"
            f" load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
    print(f"{CONSOLES} consoles, {STALLED} of them stopped; {len(ratios)} pairs")
    print(f"step time with / without:          median {statistics.median(ratios):.4f} ({_spread(ratios)})")
    print(f"engine's CPU a step, with/without: median {statistics.median(cpu_ratios):.4f} ({_spread(cpu_ratios)})")
    print(f"gateway: median {statistics.median(one for one, _ in shares):.1f} % of a core; MiB {_range(memory)}")
    print(f"consoles: median {statistics.median(two for _, two in shares):.1f} % of a core")


def _range(values: list[float]) -> str:
    return f"{min(values):.3f} to {max(values):.3f}"


def _spread(values: list[float]) -> str:
    """Return the middle half of the values, and the interval of their median: by rank, for any distribution."""
    ranked, count = sorted(values), len(values)
    reach = SURE * math.sqrt(count) / 2
    low, high = max(0, math.floor(count / 2 - reach)), min(count - 1, math.ceil(count / 2 + reach) - 1)
    quarter = count // 4
    return (
        f"95 % of the median {ranked[low]:.4f} to {ranked[high]:.4f}, half of the pairs {ranked[quarter]:.3f}"
        f" to {ranked[count - 1 - quarter]:.3f}, all {_range(values)}"
    )


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def main() -> None:
    """Measure one profile."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("profile", nargs="?", default="tiny")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.0, help="begin no pair after that time")
    parser.add_argument("--window", type=float, default=WINDOW_S, help="seconds of a side of a pair, at least")
    parser.add_argument("--apart", metavar="CORES", default="", help="cores of the consoles, as of other machines")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=96)
    parser.add_argument("--fast", action="store_true", help="ten snapshots a second, in place of one")
    parser.add_argument("--watch", metavar="ENGINE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.watch:
        watch(arguments.watch, IN_ONE, frames.TOPIC_SNAPSHOT if arguments.fast else frames.TOPIC_SNAPSHOT_SLOW)
        return
    profile = load_profile(arguments.profile)
    vocab = read_spec(Path(profile.model.path)).vocab_size
    fixed = vocab, arguments.requests, 16, 17, arguments.output_len, 0
    work = (random_jobs(*fixed, number) for number in itertools.count())
    with LLM(profile) as llm:
        run_engine(llm, next(work))
        measure(llm, work, arguments)


if __name__ == "__main__":
    main()
