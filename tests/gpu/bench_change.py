"""A change of 10 GiB a stage on a whole engine that writes: the longest step beside it, and the time to `applied`.

    python tests/gpu/bench_change.py [--stages 1] [--changes 10] [--mib 10240] [--device cuda]

Budgets: applied within 100 ms, no step longer by more than 5 ms. A step is taken from its begin to that of the next,
as the rings of the stages tell; the time to `applied` is that of a console, from command to outcome.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE.parent / name) for name in ("end_to_end", "engine")]

import reference  # noqa: E402
from checkpoints import make_checkpoint  # noqa: E402
from operators import Operator  # noqa: E402
from ppengine.common.ring import BEGUN_NS, KIND, SEQ, Kind, RingReader  # noqa: E402
from ppengine.protocol.verbs import SetMemory  # noqa: E402
from serving import Served  # noqa: E402

HIGH, SHARE = 0.85, 0.25
"""Utilization with all of it, and how much of a stage's memory a change is."""
REQUESTS, LENGTH = 16, 16384
QUIET_S, BEFORE_NS, AFTER_NS = 2.0, 20_000_000, 100_000_000
_LOOK_S = 0.02


class Pace(threading.Thread):
    """Reads when the steps of each stage begin, while a ring still has them."""

    def __init__(self, engine: Served) -> None:
        super().__init__(daemon=True)
        folder = Path(engine.config.ring_dir)
        self._rings = [RingReader(folder / f"s{stage}.0.main.ring") for stage in range(engine.stages)]
        self._begun: list[list[int]] = [[] for _ in self._rings]
        self.over = threading.Event()

    def run(self) -> None:
        """Look until `over`."""
        seen = [0] * len(self._rings)
        while not self.over.wait(_LOOK_S):
            for stage, ring in enumerate(self._rings):
                for row in ring.rows(seen[stage]):
                    seen[stage] = row[SEQ]
                    if row[KIND] == Kind.STEP:
                        self._begun[stage].append(row[BEGUN_NS])

    def steps(self, first_ns: int, last_ns: int) -> list[float]:
        """Return how long the steps of all stages took that began in between, in ms, rising."""
        found = []
        for begun in self._begun:
            inside = [at for at in begun if first_ns <= at <= last_ns]
            found += [(after - before) / 1e6 for before, after in pairwise(inside)]
        return sorted(found)


def profile(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return an engine whose stages have four times what a change is about."""
    return {
        "name": "change",
        "model": {"path": str(folder), "max_model_len": LENGTH, "skip_tokenizer": True},
        "parallel": {"pipeline": options.stages, "device": options.device, "executor": "local"},
        "memory": {"device_mib": int(options.mib / SHARE), "swap_space_gib": 0.01, "utilization": HIGH},
        "scheduler": {"max_num_seqs": REQUESTS, "max_num_batched_tokens": 512, "schedule_ahead": True},
    }


async def measure(engine: Served, changes: int) -> None:
    """Print steps without a change, and beside as many as are asked for, there and back."""
    pace = Pace(engine)
    pace.start()
    async with engine.operator() as op:
        prompts = reference.prompts(REQUESTS, 100, low=20, high=60, seed=1)
        names = await op.submit_all(prompts, max_tokens=LENGTH - 100)
        await op.request(names[-1], lambda request: request.output_tokens > 50, "all write")
        begun = time.monotonic_ns()
        await asyncio.sleep(QUIET_S)
        quiet = pace.steps(begun, time.monotonic_ns())
        p99 = quiet[len(quiet) * 99 // 100]
        print(f"{len(quiet)} quiet steps: p50 {statistics.median(quiet):.2f} p99 {p99:.2f} longest {quiet[-1]:.2f} ms")
        found: dict[str, list[tuple[float, float, float]]] = {"shrink": [], "grow": []}
        for _ in range(changes):
            for what, utilization in (("shrink", HIGH - SHARE), ("grow", HIGH)):
                found[what].append(await change(op, pace, utilization))
        for what, rows in found.items():
            longest, applied, blocks = (list(column) for column in zip(*rows, strict=True))
            print(
                f"{what:6} by {abs(statistics.median(blocks)):.0f} blocks: longest step {max(longest):.2f} ms "
                f"(+{max(longest) - p99:.2f} over p99; median {statistics.median(longest):.2f}), "
                f"applied after {statistics.median(applied):.1f} ms, at most {max(applied):.1f}; "
                f"longest steps in turn: {', '.join(f'{ms:.1f}' for ms in longest)}"
            )
        await op.abort(*names)
    pace.over.set()


async def change(op: Operator, pace: Pace, utilization: float) -> tuple[float, float, float]:
    """Change the utilization; return the longest step beside it and the time to its outcome in ms, and blocks."""
    begun = time.monotonic_ns()
    end = await op.do(SetMemory(utilization=utilization))
    applied = time.monotonic_ns()
    await asyncio.sleep(AFTER_NS / 1e9 + 2 * _LOOK_S)
    steps = pace.steps(begun - BEFORE_NS, applied + AFTER_NS)
    return steps[-1], (applied - begun) / 1e6, end.figures["blocks_after"] - end.figures["blocks_before"]


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stages", type=int, default=1, help="those on one card share it")
    parser.add_argument("--changes", type=int, default=10, help="there and back")
    parser.add_argument("--mib", type=int, default=10240, help="of a change, in each stage")
    parser.add_argument("--device", default="cuda", help="cpu: to try the script out, with --mib 64")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        heads = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
        if options.device == "cpu":
            heads = {}
        model = make_checkpoint(
            Path(folder) / "llama", "llama", dtype="float16", layers=8 * options.stages,
            max_position_embeddings=LENGTH, **heads,
        )  # fmt: skip
        with Served(profile(model, options)) as engine:
            asyncio.run(measure(engine, options.changes))


if __name__ == "__main__":
    main()
