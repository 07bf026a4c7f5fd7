"""Faults of a GPU on demand: stages on the cards there are, under load, each kind at the first, a middle and the last.

    python tests/gpu/drill_faults.py [--stages 3] [--kinds a,b] [--write]     about 5 s a drill, deaths 10 s

One engine for all: what dies is started anew by the engine itself, which is part of the drill. `--write` puts the table
into docs/diagnosis.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE.parent / name) for name in ("drills", "end_to_end", "engine")]

import load as loads  # noqa: E402
import torch  # noqa: E402
from drill import DEATH_S, HANG_S, end  # noqa: E402
from load import Load, learn, profile  # noqa: E402
from ppconsole.link.source import LinkLost  # noqa: E402
from ppengine.drills.registry import Kind, kinds  # noqa: E402
from ppengine.protocol.control import Outcome  # noqa: E402
from ppengine.protocol.snapshot import Snapshot, Verdict  # noqa: E402
from ppengine.protocol.verbs import ClearFaults, Fault, RestartStage, SetCheck  # noqa: E402
from serving import Served  # noqa: E402
from watching import Watcher, watch  # noqa: E402

KINDS = (
    "kernel-hang", "device-assert", "illegal-access", "profile-oom", "nan", "inf-weight",
    "stale-seqstart", "global-stream", "foreign-device", "overwritten-in-flight", "freed-in-flight",
    "overwrite-in-flight",
)  # fmt: skip
SETTINGS = ("parallel.device=cuda", "model.dtype=float32", "memory.device_mib=4096", "memory.swap_space_gib=0.0625")
WARM = 24
"""Requests that have ended before the first fault: kernels are compiled for each shape that comes."""
PATIENCE_S, SETTLE_S, LOOK_S, BACK_S = 30.0, 1.0, 15.0, 90.0
"""After `LOOK_S` without service behind a drill the engine is looked at, and waited for as long as `BACK_S` more."""
DOCUMENT = HERE.parents[1] / "docs" / "diagnosis.md"
TITLE, MADE = "\n## On a GPU\n", "Measured "


@dataclass
class Result:
    """One drill. Seconds are from the command that asked for the fault."""

    kind: Kind
    stage: int
    named_s: float | None = None
    named: list[tuple[int | None, str]] = field(default_factory=list)
    summary: str = ""
    evidence: list[str] = field(default_factory=list)
    target_s: float | None = None
    back: str = ""
    """How the engine came out of it."""
    problem: str = ""

    @property
    def right(self) -> str:
        """Whether stage and cause were named, and in time."""
        stage = bool(self.named) and all(where == self.stage for where, _ in self.named)
        cause = stage and all(what in self.kind.expects for _, what in self.named)
        late = self.named_s is not None and self.target_s is not None and self.named_s > self.target_s
        return f"{'stage' if stage else 'NOT the stage'}, {'cause' if cause else 'NOT the cause'}" + (
            f", LATE: {self.target_s:.1f} s" if late else ""
        )


class Drills:
    """One engine and its load."""

    def __init__(self, engine: Served, watcher: Watcher) -> None:
        self._engine, self._watcher = engine, watcher
        self._load = Load(watcher)

    async def run(self, names: list[str]) -> list[Result]:
        """Run each kind at the first, a middle and the last stage; what goes wrong with a drill spoils that one."""
        self._load.start()
        await self._watcher.until(lambda picture: self._load.ended > WARM, "requests have ended", 60)
        results = []
        for name in names:
            count = self._engine.stages
            for stage in sorted({0, count // 2, count - 1}):
                if not kinds()[name].fits(stage, count):
                    continue
                result = Result(kinds()[name], stage)
                try:
                    await self._drill(result)
                except (AssertionError, LinkLost, TimeoutError, OSError) as error:
                    result.problem = f"{type(error).__name__}: {error}"[:300]
                results.append(result)
                print(f"{name}@{stage}: {line(result)}", flush=True)
                for fact in result.evidence:
                    print(f"      {fact}", flush=True)
        if not await self._load.finish(60):
            print(f"{len(self._load.names)} requests have not ended")
        print(
            f"{self._load.ended} requests ended, {self._load.judged} greedy ones judged, {len(self._load.wrong)} wrong"
        )
        print(f"errors of requests: {self._load.errors[:5]}")
        return results

    async def _drill(self, result: Result) -> None:
        watcher, kind, load = self._watcher, result.kind, self._load
        await watcher.until(lambda picture: not any(v.root for v in picture.verdicts), "no verdict before", 30)
        if kind.needs in ("ledger", "finite", "checksum"):
            await self._ask(SetCheck(check=kind.needs))
            await asyncio.sleep(1.0)
        ended, wrong = load.ended, len(load.wrong)
        await watcher.until(lambda picture: load.ended > ended, "requests end", 60)
        step_ms = max((stage.step_ms.p50 or 0.0 for stage in watcher.picture.stages), default=0.0)
        result.target_s = {"hang": max(HANG_S, 5 * step_ms / 1e3), "death": DEATH_S}.get(kind.effect)
        watcher.changes.clear()
        since = time.monotonic()
        await self._ask(Fault(kind=kind.name, stage=result.stage))
        restarting = None
        if kind.needs == "restart":
            # The death is some seconds away: how fast it was named is counted from the stage's last words.
            result.target_s = None
            restarting = asyncio.create_task(watcher.link.command(RestartStage(stage=result.stage), timeout=BACK_S))
        await self._listen(result, since)
        if not result.stage and kind.effect in ("hang", "death"):
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
        verdicts: tuple[Verdict, ...] = seen[-1].verdicts
        result.named, result.summary = list(seen[-1].roots), verdicts[0].summary
        result.evidence = verdicts[0].evidence

    async def _show(self, *verbs: str) -> None:
        for verb in verbs:
            ran = await asyncio.to_thread(self._engine.cli, verb)
            print(f"$ ppconsole {verb}   (exit code {ran.code})\n{ran.out}{ran.err}", flush=True)

    async def _mend(self, result: Result, restarting: asyncio.Task[object] | None) -> None:
        """Bring the engine back: clear what can be cleared, wait for what is started anew."""
        watcher, kind, begun = self._watcher, result.kind, time.monotonic()
        if kind.clears:
            await self._ask(ClearFaults())
        if kind.needs in ("ledger", "finite", "checksum"):
            await self._ask(SetCheck(check=kind.needs, mode="off"))
        if kind.clears and not kind.lossless:
            # What was computed with it stays wrong, in blocks that the prefix cache keeps: a restart drops them all.
            await self._ask(RestartStage(stage=result.stage), BACK_S)
        if restarting is not None:
            result.back = f"restart: {getattr(await restarting, 'state', 'refused')}; "
            begun = time.monotonic()
            await self._ask(RestartStage(stage=result.stage), BACK_S)
        ended = self._load.ended

        def serves(picture: Snapshot) -> bool:
            return picture.engine.state == "serving" and self._load.ended > ended

        try:
            await watcher.until(serves, "it serves again", LOOK_S)
        except AssertionError:
            print(f"{kind.name}@{result.stage}: not back within {LOOK_S:g} s", flush=True)
            await self._show("status", "explain", "streams", "stacks")
            await watcher.until(serves, "it serves again", BACK_S)
        result.back += f"serves after {time.monotonic() - begun:.1f} s"

    async def _ask(self, verb: object, timeout: float = 20.0) -> None:
        answer = await self._watcher.link.command(verb, timeout=timeout)  # type: ignore[arg-type]
        assert isinstance(answer, Outcome) and answer.state == "applied", f"{verb}: {answer}"


def line(result: Result) -> str:
    """Return one drill in one line."""
    if result.problem:
        return f"SPOILED {result.problem}"
    named = ", ".join(f"{cause}@{stage}" for stage, cause in result.named) or "nothing"
    seconds = "-" if result.named_s is None else f"{result.named_s:.2f} s"
    return f"{seconds} {result.right} [{named}] {result.summary} | {result.back}"


def table(results: list[Result]) -> str:
    """Return the drills as Markdown."""
    rows = ["| kind | expected | stage | seconds | named | summary | afterwards |", "|---|---|---|---|---|---|---|"]
    for one in results:
        held = " (held out)" if one.kind.held_out else ""
        seconds = "-" if one.named_s is None else f"{one.named_s:.1f}"
        fields = (
            f"{one.kind.name}{held}", " or ".join(one.kind.expects), str(one.stage), seconds, one.right,
            one.problem or one.summary, one.back,
        )  # fmt: skip
        rows.append(f"| {' | '.join(fields)} |")
    return "\n".join(rows)


def write(results: list[Result], stages: int) -> None:
    """Put the table into the document, in place of the one that is there."""
    kept = DOCUMENT.read_text()
    begin = kept.index(MADE, kept.index(TITLE))
    end = kept.index("\n## ", begin)
    card, day = torch.cuda.get_device_name(0), datetime.datetime.now(datetime.UTC).date().isoformat()
    where = f"{stages} stages on {torch.cuda.device_count()} {card}"
    made = f"{MADE}{day}; {where}; `python tests/gpu/drill_faults.py --stages {stages} --write`."
    DOCUMENT.write_text(f"{kept[:begin]}{made}\n\n{table(results)}\n{kept[end:]}")


def keep_logs(engine: Served, into: Path) -> None:
    """Copy the logs of the engine's processes into one file."""
    files = sorted((engine.runtime / "ppconsole").glob("*/*.log"))
    into.write_text("\n".join(f"=== {file.name}\n{file.read_text()[-200_000:]}" for file in files))


async def main() -> int:
    """Run the drills."""
    parser = argparse.ArgumentParser(prog="tests/gpu/drill_faults.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS))
    parser.add_argument("--logs", type=Path, help="where the engine's logs are copied at the end")
    parser.add_argument("--write", action="store_true", help="put the table into docs/diagnosis.md")
    options = parser.parse_args()
    learn()
    begun = time.monotonic()
    # Who ends this early wants the logs all the more.
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    engine = await asyncio.to_thread(Served, profile(options.stages, *SETTINGS), "--allow-faults")
    print(f"the engine serves after {time.monotonic() - begun:.1f} s", flush=True)
    results: list[Result] = []
    try:
        async with watch(engine.record) as watcher:
            results = await Drills(engine, watcher).run(options.kinds)
    finally:
        if options.logs is not None:
            keep_logs(engine, options.logs)
        with contextlib.suppress(Exception):
            await asyncio.to_thread(end, engine)
    print(table(results))
    if options.write:
        write(results, options.stages)
    return 0 if all(one.right == "stage, cause" for one in results) else 1


if __name__ == "__main__":
    assert loads.MODEL.exists()
    sys.exit(asyncio.run(main()))
