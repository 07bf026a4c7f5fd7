"""The time of a micro-batch by part, from the records of the main threads of all stages during a run.

On a GPU these are times of launches on the host; the work of the device, by its own clock, is shown beside them.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from ppengine.agent.ring_state import Track
from ppengine.agent.stage_watch import RingFile
from ppengine.common.config import EngineConfig
from ppengine.common.ring import BEGUN_NS, DETAIL, DONE_NS, KIND, SEQ, SIZE, WAITS, Gauge, Kind, RingReader, Row
from ppengine.protocol.operation_kinds import RANK_WAITS
from ppengine.protocol.place import Place

LOOK_S = 0.05
"""A ring holds 4,096 records: at ten a step and a thousand steps a second, 0.4 s."""
_COMPUTE = (Kind.EMBED, Kind.FORWARD, Kind.HEAD)
_MEMORY = (Kind.SWAP_OUT, Kind.SWAP_IN, Kind.COPY, Kind.MAP)
_OUTERMOST = frozenset({Kind.STEP.value, Kind.IDLE.value, Kind.DEVICE.value})
_done_ns = itemgetter(DONE_NS)


class Times(Track):
    """Sums what each kind of operation in one main ring took by itself behind `since_ns`: without those inside it."""

    def __init__(self, since_ns: int) -> None:
        super().__init__()
        self.steps = self.context = self.lost = 0
        """Micro-batches that ended, the tokens of context in them, and records that the ring had lapped."""
        self._since_ns = since_ns
        self._own_ns: Counter[int] = Counter()
        self._inner: list[tuple[int, int]] = []
        """From when to when: what has ended inside an operation that has not."""

    def feed(self, rows: Sequence[Row], gone: Iterable[int] = ()) -> list[Row]:
        """See `Track.feed`."""
        first = next((row[SEQ] for row in rows if row[SEQ] > self.seen), 0)
        self.lost += max(0, first - self.seen - 1) if self.seen else 0
        ended = super().feed(rows, gone)
        # What is inside an operation began later, and goes first where both ended in one tick of the clock.
        ended.reverse()
        ended.sort(key=_done_ns)
        for row in ended:
            self._add(row)
        return ended

    def total_s(self, kinds: Iterable[int], now_ns: int = 0) -> float:
        """Return the seconds in operations of `kinds`; with `now_ns`, also in one that is still open."""
        wanted = set(kinds)
        ns = sum(self._own_ns[kind] for kind in wanted)
        op = self.open_op() if now_ns else None
        if op is not None and op.kind in wanted:
            ns += now_ns - max(op.enqueued_ns, self._since_ns)
        return ns / 1e9

    def _add(self, row: Row) -> None:
        kind, begun_ns, over_ns = row[KIND], max(row[BEGUN_NS], self._since_ns), row[DONE_NS]
        if over_ns <= self._since_ns:
            return
        own_ns = over_ns - begun_ns
        if kind == Kind.ON_DEVICE:
            # Beside what the thread did meanwhile, and in none of it.
            self._own_ns[kind] += own_ns
            return
        while self._inner and self._inner[-1][0] >= begun_ns:
            from_ns, to_ns = self._inner.pop()
            own_ns -= to_ns - from_ns
        self._own_ns[kind] += own_ns
        self._inner.append((begun_ns, over_ns))
        if kind in _OUTERMOST:
            self._inner.clear()
        if kind == Kind.STEP and row[SIZE]:
            self.steps += 1
            self.context += row[DETAIL]


@dataclass(frozen=True)
class DeviceTimes:
    """Work of a stage's device during a run, by its own clock: layers, head and sampling."""

    busy: float
    """Share of the run in which it worked."""
    ms: float
    """A micro-batch."""
    gbps: float
    """As `StageTimes.gbps`, over the time in which it worked."""


@dataclass(frozen=True)
class StageTimes:
    """One rank of a stage during a run. Milliseconds are those of the host, a micro-batch."""

    stage: int
    micro_batches: int
    idle: float
    """Share of the run in which the main thread waited for others: steps, messages, room on the wire. On a GPU, the
    share in which the device was idle."""
    device: float
    """Share in which the main thread waited for its device."""
    own_ms: float
    compute_ms: float
    """Embedding, layers and head: the work itself on a CPU, its launches on a GPU."""
    layers_ms: float
    """The part of the layers alone."""
    sample_ms: float
    send_ms: float
    memory_ms: float
    other_ms: float
    gbps: float
    """Weights once a micro-batch, and the keys and values of its context, over the whole run."""
    on_device: DeviceTimes | None = None
    """None where the host's cores do the work."""
    rank: int = 0
    """Tensor rank of the stage."""
    ranks_ms: float = 0.0
    """Waits for other ranks of its stage. Ranks on GPUs wait on their devices: 0."""


def slowest(stages: list[StageTimes]) -> list[StageTimes]:
    """Return the rank of each stage that works longest: the others wait for it."""
    found: dict[int, StageTimes] = {}
    for each in stages:
        if each.stage not in found or _work_ms(each) > _work_ms(found[each.stage]):
            found[each.stage] = each
    return list(found.values())


def _work_ms(stage: StageTimes) -> float:
    return stage.own_ms if stage.on_device is None else stage.on_device.ms


def table(stages: list[StageTimes], copy_gbps: float) -> list[str]:
    """Return the lines of a table, of GPUs of two; `copy_gbps` is what a copy on the device reaches."""
    lines = [
        "       micro-  share of run  |      ms a micro-batch: its own     |  read  of a",
        "stage batches   idle  device |   all  work sampl  send   mem rest |  GB/s  copy",
    ]
    several = any(stage.rank for stage in stages)
    names = [f"{stage.stage}.{stage.rank}" if several else str(stage.stage) for stage in stages]
    for name, stage in zip(names, stages, strict=True):
        parts = stage.own_ms, stage.compute_ms, stage.sample_ms, stage.send_ms, stage.memory_ms, stage.other_ms
        lines.append(
            f"{name:>5}{stage.micro_batches:8}{stage.idle:7.2f}{stage.device:8.2f} |"
            f"{''.join(f'{part:6.2f}' for part in parts[:-1])}{parts[-1]:5.2f} |"
            f"{stage.gbps:6.1f}{stage.gbps / copy_gbps:6.2f}"
        )
    devices = [(name, stage.on_device) for name, stage in zip(names, stages, strict=True) if stage.on_device]
    if devices:
        lines.append("stage  device: busy   ms a micro-batch   read GB/s while busy   of a copy")
    for name, each in devices:
        lines.append(f"{name:>5}{each.busy:14.2f}{each.ms:19.2f}{each.gbps:23.1f}{each.gbps / copy_gbps:12.2f}")
    return lines + _rank_lines(stages, names)


_LATE = 0.8
"""Waits above this share of the next shorter ones are as long: ranks of one pace differ by a few percent."""


def _rank_lines(stages: list[StageTimes], names: list[str]) -> list[str]:
    """Return the waits of ranks for each other; one that waits clearly less than all others comes late."""
    if not any(stage.ranks_ms for stage in stages):
        return []
    lines = ["stage  ms a micro-batch that a rank waits for others of its stage"]
    for name, stage in zip(names, stages, strict=True):
        others = [each.ranks_ms for each in stages if each.stage == stage.stage and each is not stage]
        late = "   comes last, the others wait for it" if others and stage.ranks_ms < _LATE * min(others) else ""
        lines.append(f"{name:>5}{stage.ranks_ms:10.2f}{late}")
    return lines


class Breakdown:
    """Reads the main rings of an engine of this host while the block lasts; `stages` has the result then.

    `looked_up`: bytes of the first stage's weights of which a step reads a few rows, the embedding, which its ranks
    divide. `problem`: why there is no result.
    """

    def __init__(self, config: EngineConfig, looked_up: int = 0) -> None:
        self.stages: list[StageTimes] = []
        self.problem = ""
        self._config, self._looked_up = config, looked_up
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Breakdown:
        self._since_ns = time.monotonic_ns()
        folder = Path(self._config.ring_dir)
        self._paths = [folder / f"s{place.stage}.{place.rank}.main.ring" for place in self._config.groups.places]
        self._files = [RingFile(path, path.stat().st_ino, Times(self._since_ns)) for path in self._paths]
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()
        for file in self._files:
            file.read()
        now_ns = time.monotonic_ns()
        for place, path, file in zip(self._config.groups.places, self._paths, self._files, strict=True):
            times = file.track
            assert isinstance(times, Times)
            if path.stat().st_ino != file.inode:
                self.problem = f"{self._config.groups.text(place)} was restarted meanwhile"
            elif times.lost:
                name = self._config.groups.text(place)
                self.problem = f"{name} recorded faster than was read: {times.lost} records are lost"
            self.stages.append(self._times(place, file.reader, times, now_ns))
            file.reader.close()
        if self.problem:
            self.stages = []

    def _look(self) -> None:
        while not self._stop.wait(LOOK_S):
            for file in self._files:
                file.read()

    def _times(self, place: Place, reader: RingReader, times: Times, now_ns: int) -> StageTimes:
        run_s = (now_ns - self._since_ns) / 1e9
        token_bytes = reader.gauge(Gauge.BLOCK_BYTES) / self._config.profile.memory.block_size
        weights = reader.gauge(Gauge.WEIGHTS_BYTES) - (
            0 if place.stage else self._looked_up / self._config.groups.tensor
        )
        read_gb = (times.steps * weights + times.context * token_bytes) / 1e9
        worked_s, on_device = times.total_s([Kind.ON_DEVICE]), None

        def each(kinds: Iterable[int]) -> float:
            return round(1e3 * times.total_s(kinds) / max(1, times.steps), 4)

        if worked_s:
            # Late sampling goes on beside the layers of the next step.
            busy, gbps = round(min(1.0, worked_s / run_s), 4), round(read_gb / worked_s, 3)
            on_device = DeviceTimes(busy, each([Kind.ON_DEVICE]), gbps)
        return StageTimes(
            stage=place.stage,
            rank=place.rank,
            ranks_ms=each(RANK_WAITS),
            micro_batches=times.steps,
            idle=round((max(0.0, run_s - worked_s) if worked_s else times.total_s(WAITS, now_ns)) / run_s, 4),
            device=round(times.total_s([Kind.DEVICE], now_ns) / run_s, 4),
            own_ms=each(set(Kind) - WAITS - {Kind.DEVICE, Kind.ON_DEVICE}),
            compute_ms=each(_COMPUTE),
            layers_ms=each([Kind.FORWARD]),
            sample_ms=each([Kind.SAMPLE]),
            send_ms=each([Kind.SEND]),
            memory_ms=each(_MEMORY),
            other_ms=each([Kind.STEP]),
            gbps=round(read_gb / run_s, 3),
            on_device=on_device,
        )
