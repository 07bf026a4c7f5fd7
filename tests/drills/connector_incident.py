"""The incident of a KV connector, side by side: its old forms, and this engine's, with the same backend.

    python tests/drills/connector_incident.py [--seconds 20]

A backend takes 500 ms for each lookup, eight at once. Eight clients keep one request each in flight, all of new
prompts. The old forms are faults on demand: `lookup-in-step`, `load-polled-by-steps` and `global-stream`. First the
ledger judges the programs of `drills/connector_forms.py`, on fake streams.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE.parent / "end_to_end"), str(HERE.parent / "engine")]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from bench_slow_lookups import cpu_s, install  # noqa: E402
from checkpoints import make_checkpoint  # noqa: E402
from ppengine.common.ring import Kind, RingReader  # noqa: E402
from ppengine.drills.connector_forms import FORMS, play  # noqa: E402
from ppengine.protocol.verbs import ClearFaults, Fault, SetCheck  # noqa: E402
from serving import Served  # noqa: E402
from watching import Watcher, watch  # noqa: E402

from profiles import small  # noqa: E402

CLIENTS, OUTPUT, KNOWN = 8, 48, 24
"""Clients, tokens of a request, and prompts that come again where some do."""
DEVICE_MIB = 6
"""Memory of a stage: less than the prompts that come again need, so that the host has them."""
LOOK_S = 0.2
"""Seconds between two looks at the ring of a stage, which holds far more steps."""
VERDICT_S = 30.0


@dataclass
class Steps:
    """The steps of stage 0, from its ring."""

    ended_ns: list[int] = field(default_factory=list)
    empty: int = 0
    _head: int = 0

    async def watch(self, path: Path) -> None:
        """Count until cancelled."""
        with contextlib.closing(RingReader(path)) as ring:
            self._head = max((record.seq for record in ring.latest(1)), default=0)
            while True:
                await asyncio.sleep(LOOK_S)
                for record in ring.since(self._head):
                    if not record.done_ns:
                        break
                    self._head = record.seq
                    if record.kind == Kind.STEP:
                        self.empty += not record.size
                        self.ended_ns.append(record.done_ns)

    @property
    def between_ms(self) -> list[float]:
        """Milliseconds from the end of one step to that of the next."""
        return [(after - before) / 1e6 for before, after in zip(self.ended_ns, self.ended_ns[1:], strict=False)]


@dataclass
class Row:
    """Measurements of one form."""

    form: str
    seconds: float = 0.0
    tokens: int = 0
    first_s: list[float] = field(default_factory=list)
    steps: Steps = field(default_factory=Steps)
    cpu_s: float = 0.0
    """Seconds for which core and stages ran."""
    verdict: str = "none"
    evidence: list[str] = field(default_factory=list)
    named_s: float | None = None

    def cells(self) -> str:
        """Return it as a row of a table."""
        gaps, tokens = self.steps.between_ms, max(1, self.tokens)
        named = "" if self.named_s is None else f"{self.named_s:.1f} s"
        return " | ".join([
            f"| {self.form}", f"{self.tokens / self.seconds:.0f}", f"{1e3 * self.cpu_s / tokens:.2f}",
            f"{quantile(gaps, 50):.1f} / {quantile(gaps, 99):.0f}",
            f"{quantile(self.first_s, 50):.2f} / {quantile(self.first_s, 99):.2f}",
            f"{self.steps.empty} of {len(self.steps.ended_ns)}", self.verdict, f"{named} |",
        ])  # fmt: skip


HEAD = (
    "| form | tokens/s | CPU of core and stages, ms a token | between steps p50 / p99, ms | TTFT p50 / p99, s "
    "| steps without tokens | verdict | named after |\n|---|---|---|---|---|---|---|---|"
)


def quantile(values: list[float], percent: int) -> float:
    """Return a percentile."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else float("nan")


class Clients:
    """Each sends one request after another, and counts its tokens as they come."""

    def __init__(self, op: Watcher, row: Row, seed: int, *, again: float = 0.0) -> None:
        """`again`: share of prompts that were there before."""
        self._op, self._row, self._again = op, row, again
        self._random = random.Random(seed)
        self._known = [self._new(random.Random(number)) for number in range(KNOWN)]
        self.counts = True

    @staticmethod
    def _new(chance: random.Random) -> list[int]:
        return [chance.randrange(4, 100) for _ in range(chance.randrange(300, 320))]

    async def one(self) -> None:
        """Send requests until `counts` ends."""
        while self.counts:
            known = self._random.random() < self._again
            prompt = self._random.choice(self._known) if known else self._new(self._random)
            began = time.monotonic()
            name = await self._op.submit(prompt, max_tokens=OUTPUT)
            seen = 0
            while True:
                part = await self._op.link.fetch(name, offset=seen)
                if part.token_ids and not seen and self.counts:
                    self._row.first_s.append(time.monotonic() - began)
                seen += len(part.token_ids)
                self._row.tokens += len(part.token_ids) * self.counts
                if part.finished:
                    break


@contextlib.asynccontextmanager
async def load(op: Watcher, engine: Served, row: Row, seed: int, again: float = 0.0) -> AsyncIterator[None]:
    """Keep the clients busy inside of the block, and measure; then let their requests end."""
    clients = Clients(op, row, seed, again=again)
    tasks = [asyncio.create_task(clients.one()) for _ in range(CLIENTS)]
    watching = asyncio.create_task(row.steps.watch(engine.engine.ring_dir / "s0.0.main.ring"))
    pids = [pid for role, pid in engine.pids.items() if role.startswith(("core", "stage"))]
    began, before = time.monotonic(), sum(map(cpu_s, pids))
    try:
        yield
    finally:
        row.seconds, clients.counts = time.monotonic() - began, False
        row.cpu_s = sum(map(cpu_s, pids)) - before
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    await asyncio.gather(*tasks)


async def measure(op: Watcher, engine: Served, form: str, fault: Fault | None, seconds: float, seed: int) -> Row:
    """Measure one form: first in its time, then until its verdict is there, if there is a fault."""
    row = Row(form)
    op.changes.clear()
    if fault is not None:
        await op.do(fault)
    since = time.monotonic()
    async with load(op, engine, row, seed):
        await asyncio.sleep(seconds)
        if seen := next((seen for seen in op.changes if seen.roots), None):
            row.named_s = seen.at - since
            newest = (op.picture.verdicts or seen.verdicts)[0]
            row.verdict, row.evidence = newest.summary, newest.evidence
    if fault is not None:
        await op.do(ClearFaults())
    await op.until(lambda now: not now.verdicts and not now.requests_total, "no verdict and no request", VERDICT_S)
    return row


async def ordered(op: Watcher, engine: Served, seconds: float) -> list[Row]:
    """Load with the ledger on: this engine's form, then a thread that redirects the current stream of stage 1."""
    await op.do(SetCheck(check="ledger"))
    before = (await op.now()).tiers
    row = Row("this engine, ledger on, prompts come again")
    op.changes.clear()
    async with load(op, engine, row, 7, again=0.7):
        await asyncio.sleep(seconds)
    after = (await op.now()).tiers
    assert before is not None and after is not None
    loaded = after.host_hit_tokens_total - before.host_hit_tokens_total
    print(f"device blocks: {op.picture.stages[0].kv_blocks.mapped}")
    print(f"tokens that were loaded from the host with the ledger on: {loaded}")
    if alarms := op.alarms:
        row.verdict = alarms[0].summary
    old = Row("old: global-stream at stage 1, ledger on")
    op.changes.clear()
    since = time.monotonic()
    async with load(op, engine, old, 8, again=0.7):
        await op.do(Fault(kind="global-stream", stage=1))
        seen = await op.root(since + VERDICT_S)
        if seen is not None:
            old.named_s, old.verdict = seen.at - since, seen.verdicts[0].summary
            old.evidence = seen.verdicts[0].evidence
        await asyncio.sleep(max(0.0, since + seconds - time.monotonic()))
    return [row, old]


async def live(engine: Served, flag: Path, seconds: float) -> list[Row]:
    """Measure all forms on one engine."""
    rows: list[Row] = []
    async with watch(engine.record) as op:
        await op.until(lambda now: now.tiers is not None and now.tiers.ready, "the stores are there", 60.0)
        await measure(op, engine, "warm-up", None, 5.0, 1)
        rows.append(await measure(op, engine, "this engine, quick lookups", None, seconds, 2))
        flag.touch()
        for number, (form, kind) in enumerate((
            ("this engine, 500 ms", ""), ("old: lookup-in-step, 500 ms", "lookup-in-step"),
            ("old: load-polled-by-steps, 500 ms", "load-polled-by-steps"), ("this engine, 500 ms, once more", ""),
        )):  # fmt: skip
            rows.append(await measure(op, engine, form, Fault(kind=kind) if kind else None, seconds, 3 + number))
        flag.unlink()
        rows += await ordered(op, engine, seconds)
    return rows


async def patient(engine: Served, flag: Path, seconds: float) -> list[Row]:
    """Measure this engine's form where a request waits for its lookup, as the old forms do."""
    flag.touch()
    async with watch(engine.record) as op:
        await op.until(lambda now: now.tiers is not None and now.tiers.ready, "the stores are there", 60.0)
        return [await measure(op, engine, "this engine, 500 ms, find_ms 5000", None, seconds, 9)]


def on_fake_streams() -> None:
    """Print each form of the transfers, its numbers, and the ledger's findings."""
    print("| transfers by | result | right | findings of the ledger |\n|---|---|---|---|")
    for name, form in FORMS.items():
        played, findings = play(form)
        found = "; ".join(finding.summary for finding in findings) or "none"
        print(f"| {name} | {played.error or played.got} | {played.expected} | {found} |")


def main() -> None:
    """Run an engine of two stages."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    seconds = parser.parse_args().seconds
    on_fake_streams()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="pp-") as name:
        folder = Path(name)
        install(folder, threads=CLIENTS)
        flag = folder / "slow"
        checkpoint = make_checkpoint(folder, "llama", dtype="float64", max_position_embeddings=1024)
        backends = {"slow": {"kind": "slow", "url": str(flag), "write": "reused"}}
        for patience, measured in (({}, live), ({"find_ms": 5000}, patient)):
            profile = small(
                checkpoint, memory={"device_mib": DEVICE_MIB, "swap_space_gib": 0.05}, model={"max_model_len": 512},
                scheduler={"max_num_seqs": 16}, tiers={"host": True, "backends": backends, **patience},
            )  # fmt: skip
            with Served(profile, "--allow-faults") as engine:
                rows += asyncio.run(measured(engine, flag, seconds))
    print(HEAD, *(row.cells() for row in rows), sep="\n")
    for row in rows:
        if row.evidence:
            print(f"\n{row.form}: {row.verdict}", *row.evidence, sep="\n  ")


if __name__ == "__main__":
    main()
