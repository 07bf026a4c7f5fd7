"""The host cache on and off: its cost if nothing is found, and chats whose contexts exceed the device.

python tests/engine/bench_host_tier.py plain|chat|prefix [--profile tiny] [--rounds N] [--set a.b=c] [--on a.b=c]

Two engines take turns, and the idle one waits; `--on` is set in the second one alone, such as a backend. `plain`:
prompts that begin like no other. `chat`: some chats at once; each turn sends all before it, and together they need
`--times` the blocks of the device. `prefix`: prompts of `--prefix` tokens come twice, one by one. Between, others of
`--times` the blocks of the device push them out of it, or out of the host as well. The second time counts, and the
bench ends with exit code 1 if a prompt is still on the device then: nothing would be compared. With `--stored` each
comes twice at first, and the next one waits until backends have written it: a backend is named by
`--on 'tiers.backends.NAME={kind: valkey, url: unix:///PATH}'`, and a small `--on memory.swap_space_gib` leaves the
prompts to it alone.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from ppengine.bench.process_cpu import cpu_by_module
from ppengine.common.config import load_profile
from ppengine.offline.llm_engine import LLMEngine
from ppengine.protocol.sampling import SamplingParams

ON = ["tiers.host=true", "name=with-host-cache"]
WORDS = range(100, 1000)
STORED_S, STORED_LOOKS = 60.0, 3
"""Most seconds for backends to write one prompt, and the looks in a row that find nothing under way."""
ON_DEVICE = 0.1
"""Share of a prompt that a device may still have: its blocks go one by one."""
WARM_UP = 2
"""Prompts of the first round of `prefix`."""
PICTURE_S = 30.0
"""Most seconds until the core has reported once more."""
SETTLE_S = 0.5
"""Seconds after a round: an engine where nothing runs copies what is left, and the other one must not pay for it."""


@dataclass(frozen=True)
class Sources:
    """The sources of a prompt's tokens."""

    device: int
    host: int
    backends: int
    computed: int

    @property
    def main(self) -> str:
        """Name of the one that gave most."""
        return max(vars(self), key=lambda name: int(getattr(self, name)))


@dataclass
class Round:
    """One measurement of one engine."""

    seconds: float
    outputs: int
    cpu: dict[str, float]
    """CPU seconds of stages and core."""
    first: list[float] = field(default_factory=list)
    """Seconds until the first token of each request."""
    sources: list[Sources] = field(default_factory=list)
    """By request, with `prefix` alone."""

    def add(self, other: Round) -> None:
        """Take the requests of another measurement of the same engine in."""
        self.seconds += other.seconds
        self.outputs += other.outputs
        self.first += other.first
        self.sources += other.sources
        self.cpu = {name: value + other.cpu[name] for name, value in self.cpu.items()}

    @property
    def rate(self) -> float:
        """Output tokens a second."""
        return self.outputs / self.seconds


def words(source: random.Random, count: int) -> list[int]:
    return [source.choice(WORDS) for _ in range(count)]


def drive(engine: LLMEngine, prompts: Iterator[list[int]], outputs: int, at_once: int) -> tuple[Round, list[list[int]]]:
    """Run prompts, `at_once` at a time; return the measurement and the outputs in order."""
    params = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True)
    before, began = cpu_by_module(engine.supervisor_pid), time.monotonic()
    sent: dict[str, tuple[int, float]] = {}
    first: dict[str, float] = {}
    found: dict[int, list[int]] = {}
    ended = False
    while not ended or engine.has_unfinished_requests():
        while not ended and len(sent) - len(found) < at_once:
            prompt = next(prompts, None)
            if prompt is None:
                ended = True
                break
            at = time.monotonic()
            (name,) = engine.add_many([{"prompt_token_ids": prompt}], [params])
            sent[name] = (len(sent), at)
        if not engine.has_unfinished_requests():
            break
        for output in engine.step():
            place, at = sent[output.request_id]
            tokens = output.outputs[0].token_ids
            if tokens and output.request_id not in first:
                first[output.request_id] = time.monotonic() - at
            if output.finished:
                found[place] = tokens
    seconds, after = time.monotonic() - began, cpu_by_module(engine.supervisor_pid)
    cpu = {name: after[name] - before[name] for name in ("stage", "core")}
    answers = [found[place] for place in range(len(found))]
    return Round(seconds, sum(map(len, answers)), cpu, list(first.values())), answers


def empty() -> Round:
    return Round(0.0, 0, {"stage": 0.0, "core": 0.0})


def plain(engine: LLMEngine, seed: int, options: argparse.Namespace) -> tuple[Round, list[list[int]]]:
    """Measure prompts that begin like no other."""
    source = random.Random(seed)
    prompts = [words(source, source.randint(16, 128)) for _ in range(options.requests)]
    return drive(engine, iter(prompts), options.outputs, options.requests)


def chat(engine: LLMEngine, seed: int, options: argparse.Namespace) -> tuple[Round, list[list[int]]]:
    """Measure turns of chats, in the same order in each turn."""
    source = random.Random(seed)
    last = options.turns * (options.ask + options.outputs)
    chats = [words(source, 8) for _ in range(int(options.times * engine.num_blocks * 16 / last))]
    total, answers = empty(), []
    for turn in range(options.turns):
        for each in chats:
            each += words(source, options.ask)
        done, answers = drive(engine, iter(chats), options.outputs, options.at_once)
        for each, answer in zip(chats, answers, strict=True):
            each += answer
        if turn:  # Nothing can be found in the first one.
            total.add(done)
    return total, answers


def prefix(engine: LLMEngine, seed: int, options: argparse.Namespace) -> tuple[Round, list[list[int]]]:
    """Measure long prompts whose prefix has left the device."""
    source = random.Random(seed)
    # The first round warms up: the rates of backends are known after a few prompts.
    count = options.requests if seed else min(options.requests, WARM_UP)
    known = [words(source, options.prefix) for _ in range(count)]
    asked = [prompt + words(source, 8) for prompt in known]
    for prompt in known:
        drive(engine, iter([prompt]), 1, 1)
        if options.stored:
            drive(engine, iter([prompt]), 1, 1)
            wait_until_stored(engine)
    others = int(options.times * engine.num_blocks * 16 / options.prefix) + 1
    drive(engine, (words(source, options.prefix) for _ in range(others)), 1, 1)
    time.sleep(SETTLE_S)
    total, answers, before = empty(), [], picture(engine)
    for prompt in asked:
        done, more = drive(engine, iter([prompt]), options.outputs, 1)
        after = picture(engine)
        done.sources = [sources_between(before, after, len(prompt))]
        total.add(done)
        answers += more
        before = after
    return total, answers


def sources_between(before: Any, after: Any, prompt: int) -> Sources:
    """Return where `prompt` tokens came from, which one request had between two pictures."""
    if after["tiers"] is None:
        found = after["prefix_hit_tokens_total"] - before["prefix_hit_tokens_total"]
        return Sources(found, 0, 0, prompt - found)
    was, now = (each["tiers"] for each in (before, after))
    device, host, computed = (
        now[f"{name}_tokens_total"] - was[f"{name}_tokens_total"] for name in ("device_hit", "host_hit", "computed")
    )
    return Sources(device, host, prompt - device - host - computed, computed)


def still_on_device(name: str, each: Round) -> list[str]:
    """Return a line for each prompt of a side that had not left the device: its time says nothing."""
    return [
        f"{name}, request {place}: {one.device} of {sum(vars(one).values())} prompt tokens were still on the device; "
        "raise --times or --prefix, or lower the blocks of the device"
        for place, one in enumerate(each.sources)
        if one.device > ON_DEVICE * sum(vars(one).values())
    ]


def by_source(name: str, rounds: list[Round]) -> Iterator[str]:
    """Yield the TTFT of a side's prompts for each source that gave most of them; `prefix` alone has sources."""
    pairs = [pair for each in rounds if each.sources for pair in zip(each.sources, each.first, strict=True)]
    for source in sorted({one.main for one, _ in pairs}):
        times = [1e3 * seconds for one, seconds in pairs if one.main == source]
        yield f"{name}: TTFT p50 {statistics.median(times):7.1f} ms of {len(times)} prompts, most of them {source}"


def wait_until_stored(engine: LLMEngine) -> None:
    """Wait until stores owe no answer and backends write nothing more. Raises TimeoutError."""
    until, quiet, before = time.monotonic() + STORED_S, 0, -1
    while quiet < STORED_LOOKS:
        if time.monotonic() > until:
            raise TimeoutError(f"backends write for more than {STORED_S:g} s")
        tiers = picture(engine)["tiers"]
        if not tiers or not tiers["backends"]:
            return
        written = sum(backend["written_bytes_total"] for backend in tiers["backends"])
        busy = any(store["jobs"] for store in tiers["stores"]) or written != before
        quiet, before = 0 if busy else quiet + 1, written


def backend_lines(tiers: Any) -> Iterator[str]:
    """Yield a line a backend: what it kept and gave, and the fetches that were not worth it."""
    for each in tiers["backends"]:
        yield (
            f"backend {each['name']} ({each['kind']}, {each['state']}): {each['written_bytes_total'] / 1e9:.2f} GB "
            f"written, {each['read_bytes_total'] / 1e9:.2f} GB read, {each['hit_tokens_total']} tokens from it, "
            f"{each['declined_total']} fetches declined, {each['errors_total']} errors"
        )


def picture(engine: LLMEngine) -> Any:
    """Return a picture of an engine with a report of the core that was made after this call. Raises TimeoutError."""
    command = [sys.executable, "-m", "ppconsole", "status", "-e", engine.engine_id, "--json"]
    since = time.time()
    while time.time() < since + PICTURE_S:
        status = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        if status["core_age_ms"] is not None and status["sampled_at"] - status["core_age_ms"] / 1e3 > since:
            return status
    raise TimeoutError(f"the core has not reported for {PICTURE_S:g} s")


def shown(each: Round) -> str:
    first = sorted(each.first)
    median, high = statistics.median(first), first[int(0.99 * (len(first) - 1))]
    cpu = {name: 1e3 * value / each.outputs for name, value in each.cpu.items()}
    return (
        f"{each.rate:8.1f} tok/s  TTFT p50 {median * 1e3:7.1f} p99 {high * 1e3:7.1f} ms  "
        f"CPU ms a token: stages {cpu['stage']:.3f} core {cpu['core']:.3f}"
    )


WORKLOADS = {"plain": plain, "chat": chat, "prefix": prefix}


def main() -> None:
    """Run rounds of both engines in turn and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=list(WORKLOADS))
    parser.add_argument("--profile", default="tiny")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--on", action="append", default=[])
    for name, default in (("rounds", 5), ("requests", 64), ("outputs", 32), ("turns", 4), ("ask", 60), ("at-once", 4),
                          ("prefix", 1024)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--times", type=float, default=4.0)
    parser.add_argument("--stored", action="store_true", help="wait until backends have written each known prompt")
    options = parser.parse_args()
    print(" ".join(f"{name}={value}" for name, value in vars(options).items()))
    measure = WORKLOADS[options.workload]
    rounds: dict[str, list[Round]] = {"off": [], "on": []}
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(LLMEngine(load_profile(options.profile, [*options.settings, *more])))
            for name, more in (("off", []), ("on", [*ON, *options.on]))
        }
        print({name: engine.num_blocks for name, engine in engines.items()}, "blocks")
        for number in range(options.rounds + 1):
            answers = {}
            for name in ("off", "on") if number % 2 else ("on", "off"):
                done, answers[name] = measure(engines[name], number, options)
                time.sleep(SETTLE_S)
                if number:  # The first one warms up.
                    rounds[name].append(done)
                print(f"round {number} {name:>3}: {shown(done)}", flush=True)
                if done.sources:
                    print(f"round {number} {name:>3} each TTFT: {[round(1e3 * one, 1) for one in done.first]} ms")
                    print(f"round {number} {name:>3} most from:  {[one.main for one in done.sources]}")
                if lines := still_on_device(name, done):
                    sys.exit("\n".join(lines))
            pairs = zip(answers["off"], answers["on"], strict=True)
            print(f"round {number}: {sum(one != other for one, other in pairs)} answers differ")
        tiers = picture(engines["on"])["tiers"]
        print(json.dumps(tiers))
        print("\n".join(backend_lines(tiers)))
    for name, measured in rounds.items():
        print("".join(f"{line}\n" for line in by_source(name, measured)), end="")
    for name, each in (("tokens/s", lambda one: one.rate), ("CPU of stages", lambda one: one.cpu["stage"]),
                       ("CPU of the core", lambda one: one.cpu["core"]),
                       ("TTFT p50", lambda one: statistics.median(one.first))):  # fmt: skip
        ratios = [each(on) / each(off) for off, on in zip(rounds["off"], rounds["on"], strict=True)]
        print(f"{name:16} on/off: median {statistics.median(ratios):.3f} of {[round(ratio, 3) for ratio in ratios]}")


if __name__ == "__main__":
    main()
