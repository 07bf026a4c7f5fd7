"""Faults of a GPU on demand: stages on the cards there are, under load, each kind at the first, a middle and the last.

    python tests/gpu/drill_faults.py [--stages 3] [--kinds a,b] [--write]     about 5 s a drill, deaths 10 s
    python tests/gpu/drill_faults.py --stages 2 --tensor 2 [--within 200]     each rank of both stages; ends after 200 s

One engine for all: the engine itself restarts processes that die, which is part of the drill. An engine that does not
come back is replaced. `--write` puts the table into docs/diagnosis.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import signal
import sys
import time
from collections import deque
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE.parent / name) for name in ("drills", "end_to_end", "engine")]

import load as loads  # noqa: E402
import torch  # noqa: E402
from drill import DEATH_S, HANG_S, SLOW_S, end  # noqa: E402
from fault_results import Result, line, table, totals  # noqa: E402
from load import Load, learn, profile  # noqa: E402
from ppconsole.link.source import LinkLost  # noqa: E402
from ppengine.drills.registry import Kind, kinds  # noqa: E402
from ppengine.protocol.control import Outcome  # noqa: E402
from ppengine.protocol.place import Place  # noqa: E402
from ppengine.protocol.snapshot import Snapshot  # noqa: E402
from ppengine.protocol.verbs import ClearFaults, Fault, RestartStage, SetCheck  # noqa: E402
from serving import Served  # noqa: E402
from watching import Watcher, watch  # noqa: E402

KINDS = (
    "kernel-hang", "device-assert", "illegal-access", "profile-oom", "nan", "inf-weight",
    "stale-seqstart", "global-stream", "foreign-device", "overwritten-in-flight", "freed-in-flight",
    "overwrite-in-flight",
)  # fmt: skip
SETTINGS = {
    "cuda": ("parallel.device=cuda", "model.dtype=float32", "memory.device_mib=4096", "memory.swap_space_gib=0.0625"),
    "cpu": (),
}
"""By device; on a CPU, kinds that need no GPU."""
WARM = 24
"""Requests that have ended before the first fault: kernels are compiled for each shape that comes."""
WARM_S = 90.0
PATIENCE_S, SETTLE_S, LOOK_S, BACK_S, RESCUE_S = 30.0, 1.0, 15.0, 90.0, 5.0
"""After `LOOK_S` without service behind a drill the engine is looked at, and waited for as long as `BACK_S` more.
`RESCUE_S`: most behind a spoiled drill; without service by then the engine is replaced."""
DOCUMENT = HERE.parents[1] / "docs" / "diagnosis.md"
TITLE, MADE = "\n## On a GPU\n", "Measured "


class Drills:
    """One engine and its load."""

    def __init__(self, engine: Served, watcher: Watcher, back_s: float) -> None:
        self._engine, self._watcher, self._back_s = engine, watcher, back_s
        self._load = Load(watcher)

    async def run(self, todo: deque[tuple[Kind, Place]], until: float, results: list[Result]) -> None:
        """Run drills from the front of `todo`, which keeps the rest if this engine does not come back after one.

        None begins after `until`. `results` gets each as it ends. What goes wrong with a drill spoils that one.
        """
        self._load.start()
        await self._watcher.until(lambda picture: self._load.ended > WARM, "requests have ended", WARM_S)
        groups, lost = self._engine.config.groups, False
        while todo and not lost and time.monotonic() < until:
            kind, place = todo.popleft()
            result = Result(kind, place, groups.pipeline, groups.tensor)
            try:
                await self._drill(result)
            except (AssertionError, LinkLost, TimeoutError, OSError) as error:
                result.problem = f"{type(error).__name__}: {error}"[:300]
                lost = not await self._rescue()
            results.append(result)
            print(f"{kind.name}@{result.where}: {line(result)}", flush=True)
            for fact in result.evidence:
                print(f"      {fact}", flush=True)
        if lost:
            print("the engine did not come back", flush=True)
        elif not await self._load.finish(60):
            print(f"{len(self._load.names)} requests have not ended")
        print(
            f"{self._load.ended} requests ended, {self._load.judged} greedy ones judged, {len(self._load.wrong)} wrong"
        )
        print(f"{len(self._load.errors)} errors of requests: {self._load.errors[:5]}")

    async def _rescue(self) -> bool:
        """Clear what a spoiled drill left; return whether the engine serves again."""
        with contextlib.suppress(AssertionError, LinkLost, TimeoutError, OSError):
            await self._ask(ClearFaults())
            ended = self._load.ended
            await self._watcher.until(
                lambda picture: picture.engine.state == "serving" and self._load.ended > ended, "it serves", RESCUE_S
            )
            return True
        return False

    async def _drill(self, result: Result) -> None:
        watcher, kind, load, stage = self._watcher, result.kind, self._load, result.place.stage
        await watcher.until(lambda picture: not any(v.root for v in picture.verdicts), "no verdict before", 30)
        if kind.needs in ("ledger", "finite", "checksum"):
            await self._ask(SetCheck(check=kind.needs))
            await asyncio.sleep(1.0)
        ended, wrong = load.ended, len(load.wrong)
        await watcher.until(lambda picture: load.ended > ended, "requests end", 60)
        step_ms = max((stage.step_ms.p50 or 0.0 for stage in watcher.picture.stages), default=0.0)
        result.target_s = {"hang": max(HANG_S, 5 * step_ms / 1e3), "death": DEATH_S, "slow": SLOW_S}.get(kind.effect)
        watcher.changes.clear()
        since = time.monotonic()
        await self._ask(Fault(kind=kind.name, stage=stage, rank=result.place.rank))
        restarting = None
        if kind.needs == "restart":
            # The death is some seconds away: how fast it was named is counted from the stage's last words.
            result.target_s = None
            restarting = asyncio.create_task(watcher.link.command(RestartStage(stage=stage), timeout=self._back_s))
        await self._listen(result, since)
        if not any(result.place) and kind.effect in ("hang", "death"):
            await self._show(*(["streams"] if kind.effect == "hang" else []), "explain")
        await self._mend(result, restarting)
        if len(load.wrong) > wrong and kind.lossless:
            result.back += f", {len(load.wrong) - wrong} requests with OTHER TOKENS"

    async def _listen(self, result: Result, since: float) -> None:
        first = await self._watcher.root(since + PATIENCE_S)
        if first is None:
            return
        result.named_s = first.at - since
        await asyncio.sleep(SETTLE_S)
        seen = [one for one in self._watcher.changes if one.roots]
        right = [one.at for one in seen if all(map(result.at_place, one.verdicts))]
        result.named_s = min(right, default=first.at) - since
        wrong = [verdict for one in seen for verdict in one.verdicts if not result.at_place(verdict)]
        result.false = sorted({f"{one.cause}@{one.stage}.{one.rank}" for one in wrong})
        result.named, verdict = list(seen[-1].verdicts), seen[-1].verdicts[0]
        result.summary, result.evidence = verdict.summary, verdict.evidence

    async def _show(self, *verbs: str) -> None:
        for verb in verbs:
            ran = await asyncio.to_thread(self._engine.cli, verb)
            print(f"$ ppconsole {verb}   (exit code {ran.code})\n{ran.out}{ran.err}", flush=True)

    async def _mend(self, result: Result, restarting: asyncio.Task[object] | None) -> None:
        """Bring the engine back: clear what can be cleared, wait for processes that restart."""
        watcher, kind, stage, begun = self._watcher, result.kind, result.place.stage, time.monotonic()
        if kind.clears:
            await self._ask(ClearFaults())
        if kind.needs in ("ledger", "finite", "checksum"):
            await self._ask(SetCheck(check=kind.needs, mode="off"))
        if (kind.clears and not kind.lossless) or (kind.effect == "hang" and not kind.clears):
            # What was computed with it stays wrong, in blocks that the prefix cache keeps: a restart drops them all.
            await self._ask(RestartStage(stage=stage), self._back_s)
        if restarting is not None:
            result.back = f"restart: {getattr(await restarting, 'state', 'refused')}; "
            begun = time.monotonic()
            await self._ask(RestartStage(stage=stage), self._back_s)
        ended = self._load.ended

        def serves(picture: Snapshot) -> bool:
            return picture.engine.state == "serving" and self._load.ended > ended

        try:
            await watcher.until(serves, "it serves again", LOOK_S)
        except AssertionError:
            print(f"{kind.name}@{result.where}: not back within {LOOK_S:g} s", flush=True)
            await self._show("status", "explain", "streams", "stacks")
            await watcher.until(serves, "it serves again", self._back_s)
        result.back += f"serves after {time.monotonic() - begun:.1f} s"

    async def _ask(self, verb: object, timeout: float = 20.0) -> None:
        answer = await self._watcher.link.command(verb, timeout=timeout)  # type: ignore[arg-type]
        assert isinstance(answer, Outcome) and answer.state == "applied", f"{verb}: {answer}"


def write(results: list[Result], words: str) -> None:
    """Put the table into the document, in place of the one that is there."""
    kept = DOCUMENT.read_text()
    begin = kept.index(MADE, kept.index(TITLE))
    end = kept.index("\n## ", begin)
    card, day = torch.cuda.get_device_name(0), datetime.datetime.now(datetime.UTC).date().isoformat()
    where = f"{torch.cuda.device_count()} {card}"
    made = f"{MADE}{day}; {where}; `python tests/gpu/drill_faults.py {words}`."
    DOCUMENT.write_text(f"{kept[:begin]}{made}\n\n{table(results)}\n{kept[end:]}")


def keep_logs(engine: Served, into: Path) -> None:
    """Copy the logs of the engine's processes into one file."""
    files = sorted((engine.runtime / "ppconsole").glob("*/*.log"))
    into.write_text("\n".join(f"=== {file.name}\n{file.read_text()[-200_000:]}" for file in files))


async def one_engine(
    options: argparse.Namespace, todo: deque[tuple[Kind, Place]], until: float, results: list[Result]
) -> None:
    """Run drills on a new engine, until it is lost or `todo` is empty."""
    begun = time.monotonic()
    made = profile(options.stages, f"parallel.tensor={options.tensor}", *SETTINGS[options.device])
    engine = await asyncio.to_thread(Served, made, "--allow-faults")
    print(f"the engine serves after {time.monotonic() - begun:.1f} s", flush=True)
    try:
        async with watch(engine.record) as watcher:
            await Drills(engine, watcher, options.back).run(todo, until, results)
    finally:
        if options.logs is not None:
            keep_logs(engine, options.logs)
        with contextlib.suppress(Exception):
            await asyncio.to_thread(end, engine)


async def main() -> int:
    """Run the drills."""
    parser = argparse.ArgumentParser(prog="tests/gpu/drill_faults.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--tensor", type=int, default=1, help="ranks of each stage; each of them is struck")
    parser.add_argument("--device", choices=list(SETTINGS), default="cuda", help="cpu: kinds that need no GPU")
    parser.add_argument("--within", type=float, default=1e9, metavar="SECONDS", help="begin no drill later")
    parser.add_argument("--back", type=float, default=BACK_S, metavar="SECONDS", help="most, until it serves again")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS))
    parser.add_argument("--logs", type=Path, help="where the engine's logs are copied at the end")
    parser.add_argument("--write", action="store_true", help="put the table into docs/diagnosis.md")
    options = parser.parse_args()
    begun = time.monotonic()
    learn()
    # Who ends this early wants the logs all the more.
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    stages = sorted({0, options.stages // 2, options.stages - 1})
    todo = deque(
        (kind, Place(stage, rank))
        for kind in (kinds()[name] for name in options.kinds)
        for stage in stages
        for rank in range(options.tensor)
        if kind.fits(stage, options.stages)
    )
    results: list[Result] = []
    with contextlib.suppress(asyncio.CancelledError):
        while todo and time.monotonic() < begun + options.within:
            await one_engine(options, todo, begun + options.within, results)
    print(f"not run: {' '.join(f'{kind.name}@{place.stage}.{place.rank}' for kind, place in todo) or 'none'}")
    print(table(results))
    print(totals(results))
    print(f"took {time.monotonic() - begun:.0f} s")
    if options.write:
        write(results, " ".join(sys.argv[1:]))
    return 0 if all(one.right == "stage, cause" and not one.problem for one in results) else 1


if __name__ == "__main__":
    assert loads.MODEL.exists()
    sys.exit(asyncio.run(main()))
