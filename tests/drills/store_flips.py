"""Damaged files below a live engine: no wrong token, and each damage is counted once.

    python tests/drills/store_flips.py [--flips 10000] [--cuts 1000] [--seed 0]

Prompts of one chunk each come in turn, more than device and host hold, so each is fetched from files. Before a prompt
comes, one bit of one of its shards is flipped, or the shard is cut short. The engine must count it, delete the chunk,
compute the prompt and write the chunk again.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE.parent / "end_to_end"), str(HERE.parent / "engine")]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from serving import Served  # noqa: E402
from store_run import CHUNK, StoreRun  # noqa: E402

STEPS, PROMPTS, AT_ONCE = 4, 48, 8
MEMORY = {"device_mib": 3, "swap_space_gib": 0.001}
"""Device and host have room for a third of the prompts."""
STEP_S = 0.002
PATIENCE_S = 15.0


@dataclass(frozen=True)
class Damage:
    """A changed byte of a shard, or its new end."""

    path: Path
    at: int
    byte: bytes
    """Empty: it ends there."""

    @property
    def there(self) -> bool:
        """Whether the file is still the damaged one: it was neither deleted nor written again."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.at)
                return file.read(1) == self.byte
        except FileNotFoundError:
            return False


class Run(StoreRun):
    """Damages files and counts what happened."""

    def __init__(self, folder: Path, flips: int, cuts: int, seed: int) -> None:
        super().__init__(folder, seed, PROMPTS, low=CHUNK + 10, high=CHUNK + 30, most=512, steps=STEPS)
        self._names: list[str] = []
        """Name of each prompt's chunk: the digest of its last block."""
        self._left = ["flip"] * flips + ["cut"] * cuts
        self._random.shuffle(self._left)
        self._open: dict[int, Damage] = {}
        """Damages that nothing has found yet, by prompt."""
        self.damaged = {"flip": 0, "cut": 0}
        self.corrupt = self.hits = self.named = 0

    async def engine(self, engine: Served) -> None:
        """Write all chunks, then damage them until nothing is left to damage or to find."""
        async with engine.operator() as op:
            await op.until(lambda now: now.tiers is not None and now.tiers.ready, "stores are there")
            for number in range(PROMPTS):
                before = set(self._files.glob("marker/*/*/*"))
                await self.ask(op, [number])
                new = await self._wait(lambda before=before: set(self._files.glob("marker/*/*/*")) - before)
                self._names.append(new.pop().name)
            turn, begun = 0, time.monotonic()
            while self._left or self._open:
                chosen = [number % PROMPTS for number in range(turn, turn + AT_ONCE)]
                for number in chosen:
                    self._damage(number)
                await self.ask(op, chosen)
                turn += AT_ONCE
                if not turn % (10 * PROMPTS):
                    done = sum(self.damaged.values()) - len(self._open)
                    print(f"{done} damages, {self.requests} requests, {time.monotonic() - begun:.0f} s", flush=True)
            await op.until(lambda now: now.tiers.backends[0].corrupt_total >= sum(self.damaged.values()), "counts")
            await asyncio.sleep(1.0)  # Two further figures of each store: one too many would show.
            tiers = (await op.now()).tiers
            self.corrupt, self.hits = tiers.backends[0].corrupt_total, tiers.backends[0].hit_tokens_total
            self.named = sum(verdict.cause == "store" for verdict in (await op.now()).verdicts)

    def _damage(self, number: int) -> None:
        """Damage a shard of a prompt's chunk, unless one is damaged that nothing has found."""
        if number in self._open and not self._open[number].there:
            del self._open[number]
        if number in self._open or not self._left:
            return
        name, place = self._names[number], self._random.randrange(2)
        shards = list(self._files.glob(f"{place}.0/*/*/{name}-*"))
        if not shards or not any(self._files.glob(f"marker/*/*/{name}")):
            return  # It is not written again yet.
        (path,), kind = shards, self._left.pop()
        at, byte = self._random.randrange(path.stat().st_size), b""
        if kind == "cut":
            os.truncate(path, at)
        else:
            with path.open("r+b") as file:
                file.seek(at)
                byte = bytes([file.read(1)[0] ^ 1 << self._random.randrange(8)])
                file.seek(at)
                file.write(byte)
        self.damaged[kind] += 1
        self._open[number] = Damage(path, at, byte)

    async def _wait(self, look: Callable[[], set[Path]]) -> set[Path]:
        """Wait for files."""
        until = time.monotonic() + PATIENCE_S
        while not (found := look()):
            assert time.monotonic() < until, "a chunk was not written in time"
            await asyncio.sleep(0.002)
        return found


def main() -> int:
    """Run and print a table. Exit code 1: a wrong token, a lost request, or a damage that was not counted once."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--cuts", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pp-flips-") as name:
        run = Run(Path(name), options.flips, options.cuts, options.seed)
        with Served(run.profile(MEMORY), step_s=STEP_S) as engine:
            asyncio.run(run.engine(engine))
    rows = {
        "flipped bits, files cut short": f"{run.damaged['flip']}, {run.damaged['cut']}", "counted": run.corrupt,
        "requests": run.requests, "with wrong tokens, lost": f"{run.wrong}, {run.lost}", "tokens from files": run.hits,
        "verdict `store` at the end": run.named,
    }  # fmt: skip
    print("\n".join(f"| {key} | {value} |" for key, value in rows.items()))
    return 1 if run.wrong or run.lost or run.corrupt != sum(run.damaged.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
