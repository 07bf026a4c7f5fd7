"""Print the plan of `ppconsole plan` beside the measured engine: `python tests/engine/bench_plan.py tiny [wide]`.

Each round plans, then runs every layout on an engine of its own, one after the other; medians of all rounds. `wide` is
a model of dummy weights that is made for this: 8 layers of width 1024 in float32, 403 MB.

Other processes of the machine spoil a figure. So each is taken again and again for up to eight seconds. The try during
which they had the least of the cores counts; the table has how much that was.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ppengine.bench.process_cpu import cpu_by_module
from ppengine.bench.sides import run_engine
from ppengine.bench.workload import random_jobs
from ppengine.checkpoint.model_spec import read_spec
from ppengine.common.config import Profile, load_profile
from ppengine.offline.llm import LLM

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)]
WIDE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816,
    "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 8192,
    "max_position_embeddings": 1024, "torch_dtype": "float32", "eos_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip


QUIET_CORES = 0.1
"""Cores that other processes may keep busy during a figure that counts."""
TRIES_S = 8.0


def cores_busy() -> float:
    """Return the CPU seconds of all processes since boot."""
    words = Path("/proc/stat").read_text().split()
    return (sum(map(int, words[1:9])) - int(words[4]) - int(words[5])) / os.sysconf("SC_CLK_TCK")


class Tried(NamedTuple):
    """One try: cores that other processes had, CPU seconds of stages and core, and the result."""

    others: float
    cpu_s: float
    made: float


def tried(work: Callable[[], float]) -> Tried:
    """Return what `work` returns, and who worked meanwhile."""
    busy, own, begun = cores_busy(), cpu_by_module(os.getpid()), time.perf_counter()
    made = work()
    seconds, after = time.perf_counter() - begun, cpu_by_module(os.getpid())
    engine = after.stage + after.core - own.stage - own.core
    return Tried((cores_busy() - busy - (sum(after) - sum(own))) / seconds, engine, made)


def undisturbed(work: Callable[[], float]) -> Tried:
    """Return the try during which others had the least."""
    tries: list[Tried] = []
    until = time.monotonic() + TRIES_S
    while time.monotonic() < until and (not tries or tries[-1].others > QUIET_CORES):
        tries.append(tried(work))
    return min(tries)


def profile_named(name: str, folder: Path) -> str:
    """Return the profile to load: `wide` is written into `folder`, any other name is one already."""
    if name != "wide":
        return name
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(WIDE))
    path = folder / "wide.yaml"
    path.write_text(
        "name: wide\nmodel: {path: model, dtype: float32, load_format: dummy, skip_tokenizer: true}\n"
        "memory: {device_mib: 1024, swap_space_gib: 0}\n"
        "scheduler: {max_num_seqs: 32, max_num_batched_tokens: 256, schedule_ahead: true}\n"
    )
    return str(path)


def planned(profile: str, words: list[str]) -> dict[tuple[int, int], dict[str, object]]:
    """Return the rows of a plan by layout."""
    command = [sys.executable, "-m", "ppengine.bench.plan", profile, "--json", *words]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return {(row["pipeline"], row["tensor"]): row for row in json.loads(ran.stdout)["layouts"]}


def measured(profile: Profile, load: argparse.Namespace) -> tuple[float, ...]:
    """Return tokens a second of the workload and of one request, blocks, CPU ms a token, and cores of others."""
    vocab, numbers = read_spec(Path(profile.model.path)).vocab_size, itertools.count()

    def speed(llm: LLM, requests: int) -> float:
        jobs = random_jobs(vocab, requests, load.input, load.input, load.output, 0, next(numbers))
        return requests * load.output / run_engine(llm, jobs)

    with LLM(profile) as llm:
        speed(llm, load.requests)  # loads kernels
        many, alone = (undisturbed(functools.partial(speed, llm, requests)) for requests in (load.requests, 1))
        cpu_ms = 1e3 * many.cpu_s / (load.requests * load.output)
        return many.made, alone.made, llm.llm_engine.num_blocks, cpu_ms, many.others, alone.others


def main() -> None:
    """Print a table a model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--input", type=int, default=64)
    parser.add_argument("--output", type=int, default=48)
    parser.add_argument("--only", default="", help="layouts like 1x1,2x1")
    load = parser.parse_args()
    chosen = [(int(p), int(t)) for p, _, t in (each.partition("x") for each in load.only.split(",") if each)] or LAYOUTS
    words = [f"--{key}={getattr(load, key)}" for key in ("requests", "input", "output")]
    for name in load.models:
        with tempfile.TemporaryDirectory() as folder:
            compare(name, profile_named(name, Path(folder)), load, [*words, "--cards=4"], chosen)


def compare(
    name: str, profile: str, load: argparse.Namespace, words: list[str], layouts: list[tuple[int, int]]
) -> None:
    """Print expected and measured figures of all `layouts` that are not refused."""
    expected: dict[tuple[int, int], list[tuple[float, ...]]] = {}
    found: dict[tuple[int, int], list[tuple[float, ...]]] = {}
    for number in range(load.rounds):
        plan = planned(profile, words)
        for layout in layouts:
            row = plan[layout]
            if row["refusal"]:
                print(f"{name} {layout}: {row['refusal']}" if not number else "", end="\n" if not number else "")
                continue
            figures = tuple(float(str(row[key])) for key in ("tokens_s", "single_tokens_s", "blocks", "cpu_ms"))
            settings = [f"parallel.pipeline={layout[0]}", f"parallel.tensor={layout[1]}"]
            made = measured(load_profile(profile, settings), load)
            expected.setdefault(layout, []).append(figures)
            found.setdefault(layout, []).append(made)
            shown = " ".join(f"{figure:.4g}" for figure in (*figures, *made))
            print(f"# {name} {layout} {shown} load {os.getloadavg()[0]:.1f}", flush=True)
    print(
        f"{name}, {load.requests} requests of {load.input} in and {load.output} out, {time.strftime('%Y-%m-%d %H:%M')}"
    )
    heads = ["layout", "workload: expected", "measured", "ratio", "others", "single: expected", "measured", "ratio"]
    heads += ["others", "CPU ms a token: expected", "measured", "ratio", "blocks: expected", "engine's"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for layout in found:
        e, m = ([statistics.median(column) for column in zip(*side[layout], strict=True)] for side in (expected, found))
        cells = [f"{layout[0]} x {layout[1]}", f"{e[0]:,.0f}", f"{m[0]:,.0f}", f"{e[0] / m[0]:.2f}", f"{m[4]:.2f}"]
        cells += [f"{e[1]:,.1f}", f"{m[1]:,.1f}", f"{e[1] / m[1]:.2f}", f"{m[5]:.2f}"]
        cells += [f"{e[3]:.3f}", f"{m[3]:.3f}", f"{e[3] / m[3]:.2f}", f"{e[2]:,.0f}", f"{m[2]:,.0f}"]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
