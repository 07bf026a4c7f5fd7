"""Constrained and free requests beside faults: every output must be that of an undisturbed run.

    python tests/drills/constrained.py [--seconds S] [--tensor N] [--seed N]

The bundled model in float64 on two stages. First 64 requests run undisturbed: JSON schemas, expressions, choices,
penalties, log-probabilities, minimum tokens, some sampled with a seed, and free ones. Then they come again and again,
20 at a time, while grammar processes, stages and the core are killed or stopped, requests preempted and aborted.
Exit code 1: an output differs.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine"))

from bench_structured import MODEL, pattern, schema  # after its folder
from ppengine import LLMEngine, RequestOutput, SamplingParams, StructuredOutputsParams
from ppengine.offline.arguments import make_profile

REQUESTS, AT_ONCE, ABORTS = 64, 20, 0.01
BEGINNINGS = ["Once upon a time", "The cat", "In the garden there was", "A dog and a bird went", "She said that"]
FAULTS = {
    "kill grammar": 4.0,
    "stop grammar": 8.0,
    "stop stage": 3.0,
    "kill stage": 0.6,
    "kill core": 0.4,
    "preempt": 3.0,
}
"""Faults by their weight."""
RECOVERY_S = 6.0
Output = tuple[list[int], str | None]


def sampling(number: int) -> SamplingParams:
    """Return the parameters of request `number`: eight kinds in turn."""
    wanted: dict[str, object] = {
        "json": schema(number), "regex": pattern(number), "choice": ["yes please", "no thank you", "perhaps"],
    }  # fmt: skip
    forms = [
        {"json": wanted["json"], "disable_any_whitespace": True}, {"json": wanted["json"]}, {"regex": wanted["regex"]},
        {"choice": wanted["choice"]}, {"json": wanted["json"]}, {"regex": "([a-f] ?){20,60}!"}, None,
        {"regex": "[a-z]{1,40}( [a-z]{1,9}){1,9}"},
    ]  # fmt: skip
    more: dict[int, dict[str, float]] = {
        4: {"presence_penalty": 0.7},
        5: {"logprobs": 2},
        6: {"ignore_eos": True},
        7: {"min_tokens": 12},
    }
    kind = number % len(forms)
    form = forms[kind]
    return SamplingParams(
        max_tokens=40 + number % 50, temperature=0.8 if number % 3 else 0.0, seed=number,
        structured_outputs=None if form is None else StructuredOutputsParams(**form), **more.get(kind, {}),
    )  # fmt: skip


def processes(root: int, module: str) -> list[int]:
    """Return the descendants of a process that run a module."""
    found, left = [], [root]
    while left:
        pid = left.pop()
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            left += [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        except OSError:
            continue
        if module in command:
            found.append(pid)
    return found


def output_of(done: RequestOutput) -> Output:
    return list(done.outputs[0].token_ids), done.outputs[0].finish_reason


class Drill:
    """One engine, what its requests must give, and what was done to it."""

    def __init__(self, engine: LLMEngine, seed: int) -> None:
        self.engine, self.random = engine, random.Random(seed)
        self.prompts = [f"{self.random.choice(BEGINNINGS)} {number}" for number in range(REQUESTS)]
        self.params = [sampling(number) for number in range(REQUESTS)]
        self.live: dict[str, int] = {}
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.stopped: list[tuple[float, int]] = []
        """(time to go on, process)."""
        self.commands: list[subprocess.Popen[bytes]] = []

    def add(self, numbers: list[int]) -> None:
        names = self.engine.add_many([self.prompts[k] for k in numbers], [self.params[k] for k in numbers])
        self.live.update(zip(names, numbers, strict=True))

    def take(self) -> dict[int, Output]:
        """Return the outputs of requests that have ended."""
        ended = [done for done in self.engine.step() if done.finished and done.request_id in self.live]
        return {self.live.pop(done.request_id): output_of(done) for done in ended}

    def undisturbed(self) -> dict[int, Output]:
        self.add(list(range(REQUESTS)))
        found: dict[int, Output] = {}
        while self.live:
            found |= self.take()
        return found

    def run(self, seconds: float, expected: dict[int, Output]) -> None:
        """Disturb the engine for some seconds, then let all requests end."""
        end, fault_at = time.monotonic() + seconds, time.monotonic() + 2.0
        while self.live or time.monotonic() < end:
            now = time.monotonic()
            if now < end:
                self.add([self.random.randrange(REQUESTS) for _ in range(AT_ONCE - len(self.live))])
                if self.random.random() < ABORTS:
                    self.abort()
                if now >= fault_at:
                    fault_at = now + self.random.uniform(0.3, 2.5) + self.fault(now)
            for item in [each for each in self.stopped if each[0] <= now or now >= end]:
                self.stopped.remove(item)
                self.send(item[1], signal.SIGCONT)
            for number, output in self.take().items():
                self.counts["outputs"] += 1
                if output != expected[number]:
                    self.wrong.append(f"request {number}: {output}, expected {expected[number]}")
        for command in self.commands:
            command.wait(60)

    def abort(self) -> None:
        name = self.random.choice(list(self.live))
        self.engine.abort_request(name)
        del self.live[name]
        self.counts["aborts"] += 1

    def fault(self, now: float) -> float:
        """Do one; return the seconds until the engine has recovered."""
        (what,) = self.random.choices(list(FAULTS), list(FAULTS.values()))
        verb, role = (what + " ").split(" ")[:2]
        if verb == "preempt":
            mode = self.random.choice(["swap", "recompute"])
            command = ["preempt", self.random.choice(list(self.live)), "-e", self.engine.engine_id, "--mode", mode]
            # It ends when the steps in flight have retired, which may need a process that is stopped now.
            quiet = subprocess.DEVNULL
            self.commands.append(
                subprocess.Popen([sys.executable, "-m", "ppconsole", *command], stdout=quiet, stderr=quiet)
            )
        elif pids := processes(self.engine.supervisor_pid, f"ppengine.{role}"):
            pid = self.random.choice(pids)
            self.send(pid, signal.SIGKILL if verb == "kill" else signal.SIGSTOP)
            if verb == "stop":
                self.stopped.append((now + self.random.uniform(0.02, 0.7), pid))
        self.counts[what] += 1
        return RECOVERY_S if what in ("kill stage", "kill core") else 0.0

    @staticmethod
    def send(pid: int, number: int) -> None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return  # It has ended meanwhile.


def main() -> int:
    """Print counts, and outputs that differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    profile = make_profile(
        MODEL, pipeline_parallel_size=2, tensor_parallel_size=options.tensor, gpu_memory_utilization=0.05,
        swap_space=0.02, max_num_seqs=24, dtype="float64", enable_prefix_caching=True,
    )  # fmt: skip
    with LLMEngine(profile) as engine:
        drill = Drill(engine, options.seed)
        drill.run(options.seconds, drill.undisturbed())
    for line in drill.wrong:
        print(line)
    print(dict(drill.counts), f"{len(drill.wrong)} differ")
    return 1 if drill.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
