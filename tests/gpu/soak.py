"""A soak on GPUs: requests that come and go, and preempts, swaps and resizes at random, for minutes.

    python tests/gpu/soak.py [--minutes 10] [--prefills 1000] [--device cpu]

It ends when both are reached. Exit code 1: an alarm, a request that failed, a token that the reference would not have
chosen, blocks that did not come back, or memory that grew.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE.parent / name) for name in ("drills", "end_to_end", "engine")]

import reference  # noqa: E402
import test_live as live  # noqa: E402
import torch  # noqa: E402
from checkpoints import make_checkpoint  # noqa: E402
from ppengine.protocol.snapshot import Snapshot  # noqa: E402
from ppengine.protocol.verbs import Release, SetMemory  # noqa: E402
from serving import Served  # noqa: E402
from watching import Watcher, tell, watch  # noqa: E402

WIDTH, VOCABULARY, UTILIZATION = 32, 100, 0.9
JUDGED = 0.1
"""Share of the requests whose tokens are held against the reference: it is slower than the engine."""
GROWTH_BYTES = 64 * 2**20
"""Of a stage's memory on host or card between the first quiet moment and the last one."""
SPELL_S = 60.0
"""Between two quiet moments."""


@dataclass
class Quiet:
    """A moment without requests, with the cache as large as it began."""

    at_s: float
    host: list[int]
    """Resident bytes of each stage."""
    card: list[int | None]
    """Bytes in use on each stage's card."""


@dataclass
class Soak:
    """What was done, and what came of it."""

    folder: Path
    watcher: Watcher
    draw: random.Random
    names: list[str] = field(default_factory=list)
    ended: int = 0
    judged: int = 0
    said: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    quiet: list[Quiet] = field(default_factory=list)

    async def spell(self, seconds: float) -> None:
        """Disturb a load for so long, then wait until all is given back and note what memory is held."""
        until = time.monotonic() + seconds
        disturbing: asyncio.Task[None] | None = None
        open_: set[asyncio.Task[None]] = set()
        while time.monotonic() < until:
            while len(open_) < WIDTH:
                task = asyncio.create_task(self._request())
                open_.add(task)
                task.add_done_callback(open_.discard)
            await asyncio.wait(open_, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
            if disturbing is None and self.names:
                disturbing = asyncio.create_task(live.disturb(self.watcher, self.names, self.said))
        if disturbing is not None:
            disturbing.cancel()
            await asyncio.gather(disturbing, return_exceptions=True)
        await self.watcher.ask(SetMemory(utilization=UTILIZATION))
        for name in list(self.names):
            await self.watcher.ask(Release(request=name))
        await asyncio.gather(*open_)

    async def rest(self, begun: float) -> None:
        """Wait until every block is back, and note what memory is held."""
        await self.watcher.idle()
        since = time.monotonic()

        def is_newer(picture: Snapshot) -> bool:
            """The driver is asked now and then: its figures are to be of after the last change of memory."""
            ages = [stage.gpu.age_ms for stage in picture.stages if stage.gpu is not None]
            return all(age is not None and age / 1e3 < time.monotonic() - since for age in ages)

        picture = await self.watcher.until(is_newer, "the driver's figures are new", 30)
        self.quiet.append(Quiet(time.monotonic() - begun, _host(picture), _card(picture)))

    async def _request(self) -> None:
        draw = self.draw
        prompt = [draw.randrange(4, VOCABULARY) for _ in range(draw.randint(3, 600))]
        name = ""
        try:
            name = await self.watcher.submit(prompt, max_tokens=draw.randint(1, 200))
            self.names.append(name)
            tokens, _, reason = await self.watcher.output(name, timeout=300)
        except (Exception, AssertionError) as error:  # noqa: BLE001 - whatever ends it is a finding
            self.problems.append(f"{name or 'submit'}: {type(error).__name__}: {error}"[:200])
            return
        finally:
            if name in self.names:
                self.names.remove(name)
        self.ended += 1
        if reason != "length":
            self.problems.append(f"{name} ended by {reason}")
        elif draw.random() < JUDGED:
            self.judged += 1
            short = await asyncio.to_thread(_short, self.folder, prompt, tokens)
            if short > live.TOLERANCE:
                self.problems.append(f"{name}: a token is short by {short:.4f} of the best one")

    def growth(self) -> list[str]:
        """Return whose memory has grown since the first quiet moment."""
        first, last, found = self.quiet[0], self.quiet[-1], []
        for stage, (before, after) in enumerate(zip(first.host, last.host, strict=True)):
            if after - before > GROWTH_BYTES:
                found.append(f"stage {stage} has {(after - before) / 2**20:.0f} MiB more of the host")
        for stage, pair in enumerate(zip(first.card, last.card, strict=True)):
            if None not in pair and (pair[1] or 0) - (pair[0] or 0) > GROWTH_BYTES:
                found.append(
                    f"the card of stage {stage} holds {((pair[1] or 0) - (pair[0] or 0)) / 2**20:.0f} MiB more"
                )
        return found


def _short(folder: Path, prompt: list[int], tokens: list[int]) -> float:
    """Return by how much the worst token is less likely than the best one, in natural logarithms."""
    judge = reference.log_probabilities(folder, prompt, tokens)
    chosen = judge.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
    return float((judge.max(dim=-1).values - chosen).max())


def _host(picture: Snapshot) -> list[int]:
    sizes = []
    for stage in picture.stages:
        lines = Path(f"/proc/{stage.pid}/status").read_text().splitlines()
        sizes.append(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")))
    return sizes


def _card(picture: Snapshot) -> list[int | None]:
    return [None if stage.gpu is None else stage.gpu.memory_used for stage in picture.stages]


async def main() -> int:
    """Run the soak."""
    parser = argparse.ArgumentParser(prog="tests/gpu/soak.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--prefills", type=int, default=1000, help="requests that must have ended, at least")
    parser.add_argument("--device", default="cuda", help="cpu: to try the script out")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    live.DEVICE = options.device
    if options.device == "cpu":
        live.TOTAL_MIB = 96
    with TemporaryDirectory() as folder:
        model = make_checkpoint(Path(folder) / "llama", "llama", max_position_embeddings=live.LENGTH)
        engine = await asyncio.to_thread(Served, live.profile(model, 2))
        try:
            async with watch(engine.record) as watcher:
                return await _run(Soak(model, watcher, random.Random(options.seed)), options)
        finally:
            await asyncio.to_thread(engine.stop)
            engine.remove()


async def _run(soak: Soak, options: argparse.Namespace) -> int:
    begun = time.monotonic()
    spell = min(SPELL_S, options.minutes * 20)
    while not soak.problems:
        await soak.spell(spell)
        await soak.rest(begun)
        minutes, quiet = (time.monotonic() - begun) / 60, soak.quiet[-1]
        mib = [size // 2**20 for size in quiet.host], [None if one is None else one // 2**20 for one in quiet.card]
        print(f"{minutes:5.1f} min: {soak.ended} ended, {soak.judged} judged; MiB of host and card: {mib}", flush=True)
        if minutes >= options.minutes and soak.ended >= options.prefills:
            break
    problems = [*soak.problems, *soak.growth(), *(f"alarm: {text}" for text in tell(soak.watcher))]
    print(dict(sorted(soak.said.items())))
    for text in problems:
        print(f"  {text}")
    print(f"{len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
