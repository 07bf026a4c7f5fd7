"""Measure an engine whose backend takes 500 ms for each lookup, against the same engine with quick ones.

    python tests/end_to_end/bench_slow_lookups.py [--profile P] [--set a.b=c] [--rounds N] [--requests N]
        [--prompt N] [--output N]

Two CPU stages of a small model by default. Lookups are switched in turns within one run. A backlog of prompts, none of
which is in the backend, keeps the engine busy, so that tokens and CPU time say what the lookups cost. A round should
be longer than the 10 s over which a stage's steps are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).parent.parent / "engine"))

import msgspec
import reference
import yaml
from checkpoints import make_checkpoint
from operators import Operator
from ppengine.common.config import Profile, load_profile
from serving import Served

from profiles import small

BACKEND = '''
import os, time
from ppengine.store.backends.memory_backend import MemoryBackend


class Slow(MemoryBackend):
    """Memory whose lookups take 500 ms while the file at its place is there."""

    def open(self, config, layout):
        super().open(config, layout)
        self._flag = config.url

    def find(self, keys):
        if os.path.exists(self._flag):
            time.sleep(0.5)
        return super().find(keys)
'''


def install(folder: Path, threads: int = 2) -> None:
    """Let the stores find a backend of kind `slow` with `threads` threads."""
    (folder / "slow_backend.py").write_text(f"{BACKEND}\n    threads = {threads}\n")
    info = folder / "slow_backend-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slow-backend\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[ppconsole.backends]\nslow = slow_backend:Slow\n")
    os.environ["PYTHONPATH"] = f"{folder}:{os.environ.get('PYTHONPATH', '')}"


class Round(NamedTuple):
    """One backlog: output tokens a second, milliseconds of CPU a token, and those of a step on the slowest stage."""

    tokens_s: float
    core_ms: float
    stages_ms: float
    step_p50_ms: float
    step_p99_ms: float


def cpu_s(pid: int) -> float:
    """Return the seconds that a process has run."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def run(op: Operator, engine: Served, load: argparse.Namespace, seed: int) -> Round:
    """Measure a backlog of new prompts."""
    prompts = reference.prompts(load.requests, 100, low=load.prompt, high=load.prompt, seed=seed)
    roles = ("core", *(f"stage{stage}" for stage in range(engine.stages)))
    before, began = [cpu_s(engine.pids[role]) for role in roles], time.monotonic()
    await op.all_tokens(await op.submit_all(prompts, max_tokens=load.output))
    tokens, took_s = load.requests * load.output, time.monotonic() - began
    used = [1e3 * (cpu_s(engine.pids[role]) - was) / tokens for role, was in zip(roles, before, strict=True)]
    steps = [stage.step_ms for stage in (await op.now()).stages]
    slowest = [max(getattr(step, name) or 0.0 for step in steps) for name in ("p50", "p99")]
    return Round(tokens / took_s, used[0], sum(used[1:]), *slowest)


async def measure(engine: Served, load: argparse.Namespace, flag: Path) -> None:
    """Print all rounds, and the ratios of neighbours."""
    ratios: list[Round] = []
    async with engine.operator() as op:
        await op.until(lambda now: now.tiers is not None and now.tiers.ready, "the stores are there", 60.0)
        await run(op, engine, load, 1)
        for number in range(load.rounds):
            pair: dict[bool, Round] = {}
            for slow in (False, True) if number % 2 else (True, False):
                if slow:
                    flag.touch()
                else:
                    flag.unlink(missing_ok=True)
                pair[slow] = await run(op, engine, load, 2 + 2 * number + slow)
            ratios.append(Round(*(with_it / without for with_it, without in zip(pair[True], pair[False], strict=True))))
            print(*(f"{one:8.3f}" for one in (*pair[False], *pair[True])), flush=True)
        flag.unlink(missing_ok=True)
    for name, values in zip(Round._fields, zip(*ratios, strict=True), strict=True):
        print(f"500 ms / quick, {name}: {statistics.median(values):.3f} ({min(values):.2f} to {max(values):.2f})")


def make_profile(folder: Path, load: argparse.Namespace, backends: str) -> Profile:
    """Return the profile of the command line, or that of a small model made in `folder`."""
    settings = [*load.settings, "tiers.host=true", f"tiers.backends={backends}"]
    if load.profile:
        return load_profile(load.profile, settings)
    checkpoint = make_checkpoint(folder, "llama", dtype="float64", max_position_embeddings=1024)
    profile = small(
        checkpoint, memory={"device_mib": 24, "swap_space_gib": 0.05}, model={"max_model_len": 512},
        scheduler={"max_num_seqs": 16},
    )  # fmt: skip
    file = folder / "profile.yaml"
    file.write_text(yaml.safe_dump(msgspec.to_builtins(profile)))
    return load_profile(file, settings)


def main() -> None:
    """Run the engine."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", default="")
    parser.add_argument("--set", dest="settings", action="append", default=[])
    for name, default in (("rounds", 8), ("requests", 1400), ("prompt", 310), ("output", 48)):
        parser.add_argument(f"--{name}", type=int, default=default)
    load = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pp-") as name:
        folder = Path(name)
        install(folder)
        flag = folder / "slow"
        backends = f"{{slow: {{kind: slow, url: '{flag}', write: reused}}}}"
        with Served(make_profile(folder, load, backends)) as engine:
            asyncio.run(measure(engine, load, flag))


if __name__ == "__main__":
    main()
