"""The drill suite: every fault on demand, at the first, a middle and the last stage, each in a fresh engine under load.

    python tests/drills/run.py [--kinds a,b] [--stages 2,4] [--positions first,last] [--held-out] [--write]
    python tests/drills/run.py --lanes 5 --cores 3 --out FOLDER     five drills at a time, each on three processors
    python tests/drills/run.py --stages 2 --tensor 2 --rank 1      stages of two ranks, of which the second is struck
    python tests/drills/run.py --controls          loads, pauses, resizes ...: no alarm at all
    python tests/drills/run.py --soak 60           minutes of all that, one engine
    python tests/drills/run.py --chaos 30          minutes of kills, stops and full disks under 64 clients

What was measured is kept, so that a run that was broken off goes on where it was.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE.parent / "end_to_end"), str(HERE.parent / "engine")]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import chaos  # noqa: E402
import controls  # noqa: E402
import lanes  # noqa: E402
import report  # noqa: E402
import soak  # noqa: E402
from drill import Result, as_json, drill, positions  # noqa: E402
from load import learn  # noqa: E402
from ppengine.drills.registry import Kind, kinds  # noqa: E402


def main() -> int:
    """Run what was asked for. Exit code 1: a negative control or the soak raised an alarm or had wrong tokens."""
    options = _options()
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        options.results = options.out / "drills.jsonl"
    if options.chaos:
        chaos.with_clock()
    options.table or learn(long=any(kind.on == "store" for kind in _chosen(options)))
    if options.chaos:
        return asyncio.run(chaos.chaos(options.chaos, options.clients, options.seed, options.only))
    if options.soak:
        return asyncio.run(soak.soak(options.soak, options.seed, options.tensor))
    kept = Kept(options.results)
    if options.controls:
        asyncio.run(_controls(options, kept))
    elif not options.table:
        _drills(options, kept)
    table = report.table(kept.results, kept.controls)
    if options.out:
        (options.out / "table.md").write_text(table + "\n")
    print(report.by_kind(kept.results) if options.lanes else table)
    if options.write:
        report.write(kept.results, kept.controls)
    return 1 if any(control["alarms"] or control["problem"] for control in kept.controls) else 0


class Kept:
    """Results on disk, one JSON line each; the newest of a drill counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: dict[tuple[object, ...], dict] = {}
        if path.is_file():
            for line in path.read_text().splitlines():
                self._enter(json.loads(line))

    @property
    def results(self) -> list[Result]:
        """Drills."""
        return [Result(**line["drill"]) for line in self._lines.values() if "drill" in line]

    @property
    def controls(self) -> list[dict]:
        """Negative controls."""
        return [line["control"] for line in self._lines.values() if "control" in line]

    def has(self, *drill: object) -> bool:
        """Whether a drill (kind, stages, position, ranks, rank) has been run, and was not spoiled."""
        line = self._lines.get(drill)
        return line is not None and not line["drill"]["problem"]

    def add(self, line: dict) -> None:
        """Keep one result."""
        self._enter(line)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _enter(self, line: dict) -> None:
        if "drill" in line:
            one = line["drill"]
            key: tuple[object, ...] = (
                one["kind"], one["stages"], one["position"], one.get("tensor", 1), one.get("rank", 0),
            )  # fmt: skip
        else:
            key = ("control", line["control"]["name"])
        self._lines[key] = line


def _drills(options: argparse.Namespace, kept: Kept) -> None:
    plan = [
        (kind, stages, position, options.tensor, options.rank)
        for stages in options.stages
        for kind in _chosen(options)
        for position in positions(kind, stages)
        if (not options.positions or position in options.positions) and (options.tensor > 1 or not kind.ranks)
    ]
    todo = [one for one in plan if options.again or not kept.has(one[0].name, *one[1:])]
    print(f"{len(todo)} of {len(plan)} drills to run", flush=True)
    if options.lanes:
        processors = lanes.split(os.sched_getaffinity(0), options.cores, options.lanes)
        print(f"lanes: {'; '.join(','.join(map(str, sorted(lane))) for lane in processors)}", flush=True)
        ends = lanes.run(todo, processors, options.within)
    else:
        ends = _one_by_one(todo)
    begun = time.monotonic()
    for number, (result, took) in enumerate(ends, 1):
        kept.add({"drill": as_json(result)})
        print(f"{number}/{len(todo)} {report.line(result)} ({took:.0f} s)", flush=True)
    print(f"took {time.monotonic() - begun:.0f} s", flush=True)


def _one_by_one(todo: list[lanes.Drill]) -> Iterator[tuple[Result, float]]:
    for one in todo:
        begun = time.monotonic()
        yield asyncio.run(drill(*one)), time.monotonic() - begun


def _chosen(options: argparse.Namespace) -> list[Kind]:
    known = kinds()
    if options.kinds:
        return [known[name] for name in options.kinds]
    return [
        kind
        for kind in known.values()
        if (options.held_out or not kind.held_out) and kind.name not in options.skip and not kind.gpu
    ]


async def _controls(options: argparse.Namespace, kept: Kept) -> None:
    for name in options.only or controls.NAMES:
        found = await controls.control(name)
        kept.add({"control": found})
        said = "; ".join(found["alarms"]) or found["problem"] or "no alarm"
        print(f"{name}: {said} ({found['seconds']:.0f} s)", flush=True)


def _options() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(prog="tests/drills/run.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", type=names, default=[], help="only these, held out or not")
    parser.add_argument("--skip", type=names, default=[], help="not these")
    parser.add_argument("--held-out", action="store_true", help="also the kinds that the rules were not shaped to")
    parser.add_argument("--stages", type=lambda text: [int(one) for one in names(text)], default=[2, 4])
    parser.add_argument("--tensor", type=int, default=1, help="ranks of each stage")
    parser.add_argument("--rank", type=int, default=0, help="the rank that is struck, from 0")
    parser.add_argument("--positions", type=names, default=[], help="of first, middle, last, core, agent")
    parser.add_argument("--again", action="store_true", help="also what has been measured")
    parser.add_argument("--lanes", type=int, default=0, help="most drills at a time; 0: one, on all processors")
    parser.add_argument("--cores", type=int, default=3, help="processors of a lane")
    parser.add_argument("--within", type=float, default=1e9, metavar="SECONDS", help="begin no drill of a lane later")
    parser.add_argument("--out", type=Path, help="folder for drills.jsonl and table.md")
    parser.add_argument("--controls", action="store_true", help="the negative controls instead")
    parser.add_argument("--only", type=names, default=[], help="only these controls, or these actions of the chaos")
    parser.add_argument("--soak", type=float, metavar="MINUTES", nargs="?", const=60.0, help="the soak instead")
    parser.add_argument("--chaos", type=float, metavar="MINUTES", nargs="?", const=30.0, help="chaos instead")
    parser.add_argument("--clients", type=int, default=64, help="of the chaos")
    parser.add_argument("--seed", type=int, default=0, help="of the soak and the chaos")
    parser.add_argument("--table", action="store_true", help="run nothing, print what was measured")
    parser.add_argument("--results", type=Path, default=Path("drills.jsonl"), help="where results are kept")
    parser.add_argument("--write", action="store_true", help="write docs/diagnosis.md")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
