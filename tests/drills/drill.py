"""One drill: a fresh engine under load, one fault, and what was said of it, when, and whether it was right."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_slow_lookups import install
from load import Load, profile
from ppconsole.link.source import LinkLost, QueryFailed
from ppengine.drills.registry import Kind
from ppengine.protocol.control import Outcome
from ppengine.protocol.inspection import StacksDetail
from ppengine.protocol.verbs import ClearFaults, Fault, Preempt, SetCheck, SetMemory
from serving import LASTING_S, Served
from watching import Watcher, watch

WARM_S = 3.0
SETTLE_S = 1.2
"""After the first root verdict: what it says then is what counts, and a second root would be a false one."""
PATIENCE_S = {"hang": 15.0, "death": 5.0, "slow": 20.0, "wrong": 8.0, "grow": 60.0, "blind": 6.0, "none": 6.0}
CLEARED_S = 60.0
WHOLE_STAGE = ("mismatch", "link", "non_finite")
HANG_S, DEATH_S, STACKS_S, SLOW_S = 2.0, 1.0, 5.0, 10.0


@dataclass
class Result:
    """What one drill measured. Seconds are from the moment at which the fault was asked for."""

    kind: str
    stages: int
    stage: int | None
    position: str
    effect: str
    held_out: bool
    expects: list[str]
    right_stages: list[int | None]
    target_s: float = 0.0
    injected: str = ""
    answered_s: float | None = None
    """Until the command that asked for the fault was answered."""
    detect_s: float | None = None
    """First root verdict, whatever it said."""
    named_s: float | None = None
    """First root verdict with a right stage and no other."""
    first: list[tuple[int | None, str]] = field(default_factory=list)
    named: list[tuple[int | None, str]] = field(default_factory=list)
    """Root verdicts once they had settled."""
    summary: str = ""
    false_roots: list[str] = field(default_factory=list)
    early: list[str] = field(default_factory=list)
    """Root verdicts before the fault."""
    stacks_s: float | None = None
    stacks: str = ""
    cleared: str = ""
    """Empty: not asked for; else `right tokens`, or what was wrong."""
    problem: str = ""
    """Why the drill itself failed; then nothing above counts."""
    tensor: int = 1
    """Ranks of each stage."""
    rank: int = 0
    """The rank that was struck."""
    ranks: list[int | None] = field(default_factory=list)
    """Those of `named`."""

    @property
    def silent_is_right(self) -> bool:
        """Whether no alarm is as right as the expected one."""
        return self.effect in ("none", "blind")

    @property
    def stage_right(self) -> bool:
        """Whether the roots named a right stage and no other."""
        if self.silent_is_right:
            return not self.false_roots
        ranks = self.ranks or [None] * len(self.named)
        return bool(self.named) and all(map(self.is_right, self.named, ranks))

    def is_right(self, root: tuple[int | None, str], rank: int | None) -> bool:
        """Return whether a root names a right stage, and the rank; some causes are of all ranks of a stage."""
        return names(root, rank, self.right_stages, self.rank if self.tensor > 1 else None)

    @property
    def cause_right(self) -> bool:
        """Whether every root's cause is one of the expected ones."""
        if self.silent_is_right:
            return all(cause in self.expects for _, cause in self.named)
        return self.stage_right and all(cause in self.expects for _, cause in self.named)

    @property
    def undetermined(self) -> bool:
        """Whether a cause was owed and `undetermined` was said."""
        return any(cause == "undetermined" for _, cause in self.named) and "undetermined" not in self.expects

    @property
    def in_time(self) -> bool:
        """Whether the right stage was named within the target."""
        return self.named_s is not None and self.named_s <= self.target_s


def names(
    root: tuple[int | None, str], rank: int | None, stages: Collection[int | None], struck: int | None
) -> bool:  # fmt: skip
    """Return whether a root and its rank name one of `stages` and the struck rank, None: each stage has one."""
    stage, cause = root
    if stage not in stages:
        return False
    return stage is None or struck is None or rank == struck or (rank is None and cause in WHOLE_STAGE)


def positions(kind: Kind, stages: int) -> dict[str, int | None]:
    """Return where the drill strikes: the first, a middle and the last stage, as far as the kind can strike there."""
    if not kind.placed:
        return {kind.on: None}
    places = {"first": 0, "middle": stages // 2, "last": stages - 1} if stages > 2 else {"first": 0, "last": stages - 1}
    return {name: stage for name, stage in places.items() if kind.fits(stage, stages)}


async def drill(kind: Kind, stages: int, position: str, tensor: int = 1, rank: int = 0) -> Result:
    """Run one drill, at `rank` of a stage of `tensor` ranks. `problem` says if the drill itself failed."""
    stage = positions(kind, stages)[position]
    right: list[int | None] = list(kind.stages(stage or 0, stages)) or [None]
    result = Result(
        kind=kind.name, stages=stages, stage=stage, position=position, effect=kind.effect, held_out=kind.held_out,
        expects=list(kind.expects), right_stages=right, tensor=tensor, rank=rank,
    )  # fmt: skip
    folder = tempfile.mkdtemp(prefix="pp-tiers-")
    settings = [f"parallel.tensor={tensor}", *(tiers(folder) if with_tiers(kind) else [])]
    if kind.needs == "lookups":
        settings.append(slow_lookups(Path(folder)))
    try:
        step_s = LASTING_S if with_tiers(kind) else 0.0  # Computing must take longer than a fetch.
        engine = await asyncio.to_thread(Served, profile(stages, *settings), "--allow-faults", step_s=step_s)
    except AssertionError as error:
        result.problem = f"the engine did not start: {error}"
        shutil.rmtree(folder)
        return result
    try:
        async with watch(engine.record) as watcher:
            await _measure(kind, watcher, result)
    except (AssertionError, LinkLost, TimeoutError, OSError) as error:
        result.problem = result.problem or f"{type(error).__name__}: {error}"[:300]
    finally:
        await asyncio.to_thread(end, engine)
        shutil.rmtree(folder, ignore_errors=True)
    return result


def with_tiers(kind: Kind) -> bool:
    """Return whether the drill needs an engine with KV tiers."""
    return kind.on == "store" or kind.needs == "lookups"


def slow_lookups(folder: Path) -> str:
    """Let lookups take 500 ms; return the setting of the backend."""
    install(folder)
    flag = folder / "slow"
    flag.touch()
    return f"tiers.backends.disk={{kind: slow, url: {flag}, write: always}}"


def tiers(folder: str) -> list[str]:
    """Return settings with which prompts are fetched from files of `folder` all the time: little else holds them."""
    return [
        "tiers.host=true",
        f"tiers.backends.disk={{kind: files, url: {folder}, write: always}}",
        "tiers.least_tokens=16",
        "memory.swap_space_gib=0.008",
        "memory.device_mib=32",
        "scheduler.max_num_batched_tokens=64",
    ]


async def _measure(kind: Kind, watcher: Watcher, result: Result) -> None:
    load = Load(watcher, long=with_tiers(kind))
    try:
        load.start()
        await asyncio.sleep(WARM_S)
        await watcher.until(lambda picture: load.ended > 0, "a request has ended", 30)
        result.early = [f"{verdict.cause} at {verdict.stage}" for verdict in watcher.alarms]
        if watcher.changes and watcher.changes[-1].roots:
            result.problem = f"an alarm before the fault: {result.early}"
            return
        if kind.needs in ("ledger", "finite", "checksum"):
            await watcher.link.command(SetCheck(check=kind.needs), timeout=10)
        watcher.changes.clear()
        result.target_s = _target(kind, watcher)
        since = time.monotonic()
        verb = Fault(kind=kind.name, stage=result.stage, rank=0 if result.stage is None else result.rank)
        needed = asyncio.create_task(_need(kind, watcher, load))
        answer = await watcher.link.command(verb, timeout=10)
        if not isinstance(answer, Outcome) or answer.state != "applied":
            result.problem = f"not injected: {answer.text}"
            needed.cancel()
            return
        result.injected, result.answered_s = answer.text, time.monotonic() - since
        await _listen(kind, watcher, result, since)
        needed.cancel()
        if kind.clears:
            result.cleared = await _clear(kind, watcher, load)
    finally:
        await load.drop()


def _target(kind: Kind, watcher: Watcher) -> float:
    """Return in what time the stage is to be named: a hang within max(2 s, 5 x the expected time of a step)."""
    if kind.effect == "death":
        return DEATH_S
    if kind.effect in ("slow", "grow"):
        return SLOW_S
    expected_ms = max((stage.step_ms.p50 or 0.0 for stage in watcher.picture.stages), default=0.0)
    return max(HANG_S, 5 * expected_ms / 1e3)


async def _need(kind: Kind, watcher: Watcher, load: Load) -> None:
    """Ask for what the kind needs to show, just after it was injected; a live check was on before."""
    if kind.needs not in ("swap", "resize"):
        return
    await asyncio.sleep(0.2)
    # Back and forth: a change that was applied before the fault struck leaves nothing to do for one like it.
    for utilization in itertools.cycle((0.6, 0.5)):
        with contextlib.suppress(LinkLost):
            if kind.needs == "resize":
                await watcher.link.command(SetMemory(utilization=utilization), timeout=30)
            elif load.names:
                await watcher.link.command(Preempt(request=load.names[-1], mode="swap"), timeout=2)
        await asyncio.sleep(0.1)


async def _listen(kind: Kind, watcher: Watcher, result: Result, since: float) -> None:
    """Write down what is said from the fault on, and take the stacks of the stage that is named."""
    first = await watcher.root(since + PATIENCE_S[kind.effect])
    if first is None:
        result.problem = "" if watcher.lost_at is None or kind.effect == "death" else "the link was lost"
        return
    result.detect_s, result.first = first.at - since, list(first.roots)
    result.summary = first.verdicts[0].summary
    if kind.effect == "hang" and first.roots[0][0] is not None:
        await _take_stacks(watcher, result, first.roots[0][0], since)
    await asyncio.sleep(max(0.0, first.at + SETTLE_S - time.monotonic()))
    standing = [seen for seen in watcher.changes if seen.roots]
    # A fault that clears itself (a fit of slowness) keeps the last word that was said of it.
    result.named, result.summary = list(standing[-1].roots), standing[-1].verdicts[0].summary
    result.ranks = standing[-1].ranks
    for seen in standing:
        right = all(map(result.is_right, seen.roots, seen.ranks))
        if right and result.named_s is None:
            result.named_s = seen.at - since
        result.false_roots += [
            f"{cause} at {stage}" + ("" if rank is None else f".{rank}")
            for (stage, cause), rank in zip(seen.roots, seen.ranks, strict=True)
            if not result.is_right((stage, cause), rank) and not (result.silent_is_right and cause in kind.expects)
        ]
    result.false_roots = sorted(set(result.false_roots))
    if not kind.expects:
        result.false_roots = sorted({f"{cause} at {stage}" for seen in standing for stage, cause in seen.roots})


async def _take_stacks(watcher: Watcher, result: Result, stage: int, since: float) -> None:
    try:
        detail = await asyncio.wait_for(watcher.link.inspect("stacks", stage=stage), 15)
    except (QueryFailed, LinkLost, TimeoutError) as error:
        result.stacks = f"{type(error).__name__}: {error}"[:100]
        return
    if isinstance(detail, StacksDetail):
        taken = next((each for each in detail.stages if each.rank == result.rank), detail.stages[0])
        result.stacks = "taken" if taken.text else taken.error[:100]
        result.stacks_s = time.monotonic() - since if taken.text else None


async def _clear(kind: Kind, watcher: Watcher, load: Load) -> str:
    """End the fault and the load; return how the requests came out of it."""
    answer = await watcher.link.command(ClearFaults(), timeout=10)
    if not isinstance(answer, Outcome) or answer.state != "applied":
        return f"not cleared: {answer.text}"
    if kind.needs in ("ledger", "finite", "checksum"):
        # What a check has found goes when it is switched off.
        await watcher.link.command(SetCheck(check=kind.needs, mode="off"), timeout=10)
    if not await load.finish(CLEARED_S):
        return f"{len(load.names)} requests have not ended"
    if load.errors:
        return load.errors[0]
    if load.wrong and kind.lossless:
        return f"{len(load.wrong)} of {load.ended} with other tokens"
    with contextlib.suppress(AssertionError):
        await watcher.until(lambda picture: not any(verdict.root for verdict in picture.verdicts), "no verdict", 5)
        return "right tokens" if kind.lossless else "ended"
    return "ended, but a verdict stays"


def end(engine: Served) -> None:
    """End an engine, in whatever state it is."""
    with contextlib.suppress(AssertionError, OSError, ProcessLookupError, Exception):
        engine.stop()
    engine.remove()
    shutil.rmtree(engine.config.ring_dir, ignore_errors=True)


def as_json(result: Result) -> dict[str, Any]:
    """Return a result as it is kept between two runs."""
    return dict(vars(result))
