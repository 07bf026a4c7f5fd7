"""Chats over HTTP whose contexts exceed the device, here with the host cache and in vLLM with its offloading connector.

    python tests/engine/bench_chats.py [--profile P] [--set a.b=c] [--vllm-python PATH] [--vllm-args WORDS]
        [--chats N] [--turns N] [--ask N] [--outputs N] [--at-once N] [--rounds N] [--off]

One server after the other. Some chats are asked at once, in the same order in each turn. A turn sends all before it and
`--ask` new tokens. In place of an answer the next turn has other tokens of the same number: both servers get the same
prompts. The first turn finds nothing and does not count. `--off` adds this engine without the host cache.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shlex
import statistics
import time
from dataclasses import dataclass, field

import uvloop
from ppengine.bench.http_client import Client
from ppengine.bench.load_plan import Outcome, Plan, Planned
from ppengine.bench.online_servers import EngineServer, Server, VllmServer
from ppengine.common.config import load_profile

WORDS = range(100, 1000)


@dataclass
class Seen:
    """Measurements of one server: tokens a second of each round, and seconds to each first token."""

    rates: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)


def words(source: random.Random, count: int) -> list[int]:
    return [source.choice(WORDS) for _ in range(count)]


def turn(server: Server, chats: list[list[int]], outputs: int, at_once: int) -> tuple[float, list[Outcome]]:
    """Ask all chats, `at_once` at a time. Return the seconds and the outcomes in order."""
    planned = [Planned(0.0, chat, outputs, 0.0, 1.0, 0, 0) for chat in chats]
    client = Client(Plan(target=server.target, requests=planned, model=server.model, key=server.key))

    async def run() -> tuple[float, list[Outcome]]:
        began = time.perf_counter()
        outcomes = await client.run_at_most(at_once)
        return time.perf_counter() - began, outcomes

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def measure(server: Server, options: argparse.Namespace) -> Seen:
    """Run rounds of chats, each with chats of its own; the first one warms up."""
    seen = Seen()
    for number in range(options.rounds + 1):
        source = random.Random(number)
        chats = [words(source, 8) for _ in range(options.chats if number else options.at_once)]
        seconds = tokens = 0.0
        for place in range(options.turns):
            for chat in chats:
                chat += words(source, options.ask)
            spent, outcomes = turn(server, chats, options.outputs, options.at_once)
            if errors := [one.error for one in outcomes if one.error]:
                raise ValueError(f"{server.name}: {len(errors)} of {len(chats)} requests failed: {errors[0]}")
            for chat in chats:
                chat += words(source, options.outputs)
            if number and place:
                seconds, tokens = seconds + spent, tokens + sum(one.tokens for one in outcomes)
                seen.first += [one.ttft_s for one in outcomes]
        if number:
            seen.rates.append(tokens / seconds)
            print(f"{server.name}: round {number}: {seen.rates[-1]:.1f} output tokens/s", flush=True)
    return seen


def main() -> None:
    """Measure each server and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", default="tiny")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--vllm-python")
    parser.add_argument("--vllm-args", default="")
    parser.add_argument("--off", action="store_true")
    for name, default in (("chats", 16), ("turns", 4), ("ask", 60), ("outputs", 16), ("at-once", 4), ("rounds", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    found: dict[str, Seen] = {}
    for name, more in (("host cache off", []), ("host cache on", ["tiers.host=true"])):
        if more or options.off:
            with EngineServer(load_profile(options.profile, [*options.settings, *more])) as engine:
                found[name] = measure(engine, options)
    if options.vllm_python:
        profile = load_profile(options.profile, options.settings)
        with VllmServer(profile, options.vllm_python, shlex.split(options.vllm_args)) as vllm:
            found[f"vLLM {vllm.version}"] = measure(vllm, options)
    print(f"{'':16}{'tokens/s':>10}{'TTFT p50':>12}{'p90':>8}{'p99 ms':>9}")
    for name, seen in found.items():
        first = sorted(1e3 * each for each in seen.first)
        p50, p90, p99 = (first[int(share * (len(first) - 1))] for share in (0.5, 0.9, 0.99))
        print(f"{name:16}{statistics.median(seen.rates):10.1f}{p50:12.1f}{p90:8.1f}{p99:9.1f}")


if __name__ == "__main__":
    main()
