"""Kills of stores while they load: right tokens, no lost request, and the time until the event that names them.

    python tests/drills/store_kills.py [--kills 100] [--seed 0]

Prompts are more than device and host hold, so nearly all of them are fetched from files. A store is killed with
SIGKILL at a random moment of that, the stores of both stages in turn. Kills go on until as many as wanted have broken
a fetch off. An engine gets four kills of each store: after more the supervisor waits for half a minute, as it does with
any process that keeps ending.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE.parent / "end_to_end"), str(HERE.parent / "engine")]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from operators import Operator  # noqa: E402
from serving import Served  # noqa: E402
from store_run import CHUNK, StoreRun  # noqa: E402

MEMORY = {"device_mib": 4, "swap_space_gib": 0.0015}
"""The host cache has room for a quarter of the prompts."""
STEPS, PROMPTS, AT_ONCE, KILLS_EACH = 8, 16, 8, 4
MOST = 20
"""Kills for each one that is wanted, at most."""
STEP_S = 0.01
LATEST_S = 0.02
"""Latest moment of a kill after the prompts were submitted."""


class Run(StoreRun):
    """Counts what happened."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder, seed, PROMPTS, low=2 * CHUNK + 20, high=2 * CHUNK + 60, most=1024, steps=STEPS)
        self.kills = self.broken = self.unnamed = 0
        self.breaking = [0, 0]
        """Kills of each store that have broken a fetch off."""
        self.hits = self.prompt_tokens = 0
        self.named_s: list[float] = []

    async def engine(self, engine: Served, wanted: int) -> None:
        """Write all chunks, then kill stores, until `wanted` kills have broken a fetch off."""
        async with engine.operator() as op:
            await op.until(lambda now: now.tiers is not None and now.tiers.ready, "stores are there")
            for first in range(0, PROMPTS, AT_ONCE):
                await self.ask(op, range(first, first + AT_ONCE))
                await op.until(lambda now: not any(one.jobs for one in now.tiers.stores), "the chunks are written")
            for number in range(2 * KILLS_EACH):
                before = (await op.now()).tiers.failed_fetches_total
                await self._kill(engine, op, f"store{number % 2}")
                self.breaking[number % 2] += (await op.now()).tiers.failed_fetches_total > before
                if sum(self.breaking) >= wanted:
                    break
            tiers = (await op.now()).tiers
            self.broken += tiers.failed_fetches_total
            self.hits += tiers.backends[0].hit_tokens_total
            self.prompt_tokens += tiers.prompt_tokens_total

    async def _kill(self, engine: Served, op: Operator, role: str) -> None:
        await op.until(lambda now: now.tiers.ready and now.tiers.backends[0].state == "open", "stores are there")
        engine.find_pids()
        work = asyncio.create_task(self.ask(op, self._random.sample(range(PROMPTS), AT_ONCE)))
        await asyncio.sleep(self._random.uniform(0.0, LATEST_S))
        seen = len(op.events)
        os.kill(engine.pids[role], signal.SIGKILL)
        since, self.kills = time.monotonic(), self.kills + 1
        while not any(event.kind == f"{role}.ended" for event in op.events[seen:]):
            if time.monotonic() - since > 10:
                self.unnamed += 1
                break
            await asyncio.sleep(0.005)
        else:
            self.named_s.append(time.monotonic() - since)
        await work


def main() -> int:
    """Run and print a table. Exit code 1: a wrong token, a lost request, a kill without its event, or too few kills."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100, help="kills that break a fetch off")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pp-kills-") as name:
        run = Run(Path(name), options.seed)
        while sum(run.breaking) < options.kills and run.kills < MOST * options.kills:
            with Served(run.profile(MEMORY), step_s=STEP_S) as engine:
                asyncio.run(run.engine(engine, options.kills))
            print(f"{run.kills} kills, {sum(run.breaking)} of them have broken a fetch off", flush=True)
    named = sorted(run.named_s)
    rows = {
        "kills of a store": run.kills,
        "that broke a fetch off, of stage 0 and stage 1": f"{run.breaking[0]}, {run.breaking[1]}",
        "requests": run.requests, "with wrong tokens": run.wrong, "lost": run.lost,
        "prompt tokens": run.prompt_tokens, "of them from files": run.hits, "fetches broken off": run.broken,
        "named by an event after, median": f"{named[len(named) // 2] * 1e3:.0f} ms" if named else "-",
        "at most": f"{named[-1] * 1e3:.0f} ms" if named else "-", "not named": run.unnamed,
    }  # fmt: skip
    print("\n".join(f"| {key} | {value} |" for key, value in rows.items()))
    return 1 if run.wrong or run.lost or run.unnamed or sum(run.breaking) < options.kills else 0


if __name__ == "__main__":
    sys.exit(main())
