"""Measure what the checksum of hidden states costs stages on GPUs: `python tests/gpu/bench_message_checksum.py`.

First the kernel alone. Then one engine, whose rounds with the check on and off take turns in changing order; the ratio
of a pair is of times of a step of one token a request.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from ppengine.bench.sides import run_engine
from ppengine.bench.workload import random_jobs
from ppengine.checkpoint.model_spec import read_spec
from ppengine.common.config import load_profile
from ppengine.offline.llm import LLM
from ppkernels.weighted_sum import weighted_sum

CALLS, PROMPT = 2000, 16
SURE = 1.96
"""Standard deviations of an interval of 95 %."""


def kernel() -> None:
    """Print the time of one sum on the device, within a graph of many, and of its launch on the host."""
    device = torch.device("cuda")
    result, scratch = (torch.zeros(size, dtype=torch.int64, device=device) for size in (1, 2))
    for rows in (1, 32, 256, 4096):
        hidden = torch.randn(rows, 4096, device=device).bfloat16()
        weighted_sum(hidden, result, scratch)
        torch.cuda.synchronize()
        graph, begun = torch.cuda.CUDAGraph(), time.perf_counter()
        for _ in range(CALLS):
            weighted_sum(hidden, result, scratch)
        host_us = 1e6 * (time.perf_counter() - begun) / CALLS
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                weighted_sum(hidden, result, scratch)
        graph.replay()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        device_us = 1e6 * (time.perf_counter() - begun) / CALLS
        print(f"sum of {rows} x 4096 bfloat16: {device_us:.2f} us on the device, {host_us:.1f} us a launch", flush=True)


def switch(engine: str, mode: str) -> None:
    """Switch the check, and wait until all stages have."""
    command = [sys.executable, "-m", "ppconsole", "check", "checksum", mode, "--engine", engine]
    subprocess.run(command, check=True, capture_output=True, timeout=60)


def spread(values: list[float]) -> str:
    """Return the interval of the median, by rank, and the middle half."""
    ranked, count = sorted(values), len(values)
    reach = SURE * math.sqrt(count) / 2
    low, high = max(0, math.floor(count / 2 - reach)), min(count - 1, math.ceil(count / 2 + reach) - 1)
    quarter = count // 4
    return (
        f"median {statistics.median(values):.5f}, 95 % of the median {ranked[low]:.5f} to {ranked[high]:.5f}, "
        f"half of the pairs {ranked[quarter]:.4f} to {ranked[count - 1 - quarter]:.4f}"
    )


def main() -> None:
    """Measure one profile."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("profile", nargs="?", default="opt-6.7b-pp2")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="a.b=c")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no pair after that time")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=256)
    options = parser.parse_args()
    kernel()
    profile = load_profile(options.profile, options.settings)
    vocab = read_spec(Path(profile.model.path)).vocab_size
    fixed = vocab, options.requests, PROMPT, PROMPT + 1, options.output_len, 0
    work = (random_jobs(*fixed, number) for number in itertools.count())
    order = random.Random(0)
    ratios: list[float] = []
    steps: dict[str, list[float]] = {"on": [], "off": []}
    with LLM(profile) as llm:
        for _ in range(2):
            run_engine(llm, next(work))
        until = time.monotonic() + options.seconds
        for number in range(options.pairs):
            if number and time.monotonic() > until:
                break
            sides: dict[str, float] = {}
            for mode in order.sample(["on", "off"], 2):
                switch(llm.llm_engine.engine_id, mode)
                sides[mode] = 1e3 * run_engine(llm, next(work)) / options.output_len
                steps[mode].append(sides[mode])
            ratios.append(sides["on"] / sides["off"])
            print(f"pair {number}: {sides['on']:.4f} ms on, {sides['off']:.4f} ms off, {ratios[-1]:.4f}", flush=True)
    print(f"{options.profile}, {options.requests} requests, {len(ratios)} pairs")
    print(f"a token of each request: median {statistics.median(steps['on']):.4f} ms on, ", end="")
    print(f"{statistics.median(steps['off']):.4f} ms off")
    print(f"on / off: {spread(ratios)}")


if __name__ == "__main__":
    main()
