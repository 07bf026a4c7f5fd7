"""Where the time of a micro-batch goes: what the main threads of all stages record while a piece of work runs."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppengine.config import EngineConfig
from ppengine.monitor.rings import BEGUN_NS, DETAIL, DONE_NS, KIND, RETURNED_NS, WAITS, Track
from ppengine.monitor.watch import RingFile
from ppengine.ring import Gauge, Kind, Row

LOOK_S = 0.05
"""A ring holds 4,096 records: at ten a step and a thousand steps a second, 0.4 s."""
_COMPUTE = (Kind.EMBED, Kind.FORWARD, Kind.HEAD)
_MEMORY = (Kind.SWAP_OUT, Kind.SWAP_IN, Kind.COPY, Kind.MAP)
_HOLDS = WAITS | {Kind.DEVICE}
"""What the thread only waits in: for others, or for its device."""
_OUTSIDE = (Kind.STEP, Kind.IDLE, Kind.DEVICE, Kind.ROOM)
"""Not parts of a step of their own: around it, beside it, or inside a send."""


class Times(Track):
    """Sums the operations of one main ring that end after `since_ns`, as far as they lie behind it."""

    def __init__(self, since_ns: int) -> None:
        super().__init__()
        self.steps = self.context = 0
        """Steps that ended, and the tokens of context in them."""
        self._since_ns = since_ns
        self._ns: Counter[int] = Counter()

    def feed(self, rows: Sequence[Row], gone: Iterable[int] = ()) -> list[Row]:
        """See `Track.feed`."""
        ended = super().feed(rows, gone)
        for row in ended:
            # A wait holds the thread only until its call comes back.
            over_ns = (row[RETURNED_NS] or row[DONE_NS]) if row[KIND] in _HOLDS else row[DONE_NS]
            if over_ns > self._since_ns:
                self._ns[row[KIND]] += over_ns - max(row[BEGUN_NS], self._since_ns)
                if row[KIND] == Kind.STEP:
                    self.steps += 1
                    self.context += row[DETAIL]
        return ended

    def total_s(self, kinds: Iterable[int], now_ns: int = 0) -> float:
        """Return the seconds in operations of `kinds`; with `now_ns`, also in one that is still open."""
        wanted = set(kinds)
        ns = sum(self._ns[kind] for kind in wanted)
        op = self.open_op() if now_ns else None
        if op is not None and op.kind in wanted:
            ns += now_ns - max(op.enqueued_ns, self._since_ns)
        return ns / 1e9


@dataclass(frozen=True)
class StageTimes:
    """One stage during a run. Milliseconds are those of the host, a micro-batch."""

    stage: int
    micro_batches: int
    idle: float
    """Share of the run in which the main thread waited for others: steps, messages, room on the wire."""
    device: float
    """Share in which it waited for its device."""
    own_ms: float
    compute_ms: float
    """Embedding, layers and head: the work itself on a CPU, its launches on a GPU."""
    sample_ms: float
    send_ms: float
    memory_ms: float
    other_ms: float
    gbps: float
    """Weights once a micro-batch, and the keys and values of its context, over the whole run."""


def table(stages: list[StageTimes], copy_gbps: float) -> list[str]:
    """Return the lines of a table; `copy_gbps` is what a copy on the device reaches."""
    lines = [
        "       micro-  share waiting |      ms a micro-batch: its own     |  read  of a",
        "stage batches others  device |   all  work sampl  send   mem rest |  GB/s  copy",
    ]
    for stage in stages:
        parts = stage.own_ms, stage.compute_ms, stage.sample_ms, stage.send_ms, stage.memory_ms, stage.other_ms
        lines.append(
            f"{stage.stage:5}{stage.micro_batches:8}{stage.idle:7.2f}{stage.device:8.2f} |"
            f"{''.join(f'{part:6.2f}' for part in parts[:-1])}{parts[-1]:5.2f} |"
            f"{stage.gbps:6.1f}{stage.gbps / copy_gbps:6.2f}"
        )
    return lines


class Breakdown:
    """Reads the main rings of an engine of this host while the block lasts; `stages` has the result then."""

    def __init__(self, config: EngineConfig) -> None:
        self.stages: list[StageTimes] = []
        self._config = config
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Breakdown:
        self._since_ns = time.monotonic_ns()
        paths = [Path(self._config.ring_dir) / f"s{stage}.0.main.ring" for stage in range(self._config.stages)]
        self._files = [RingFile(path, path.stat().st_ino, Times(self._since_ns)) for path in paths]
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()
        for file in self._files:
            file.read()
        now_ns = time.monotonic_ns()
        self.stages = [self._times(stage, file, now_ns) for stage, file in enumerate(self._files)]
        for file in self._files:
            file.reader.close()

    def _look(self) -> None:
        while not self._stop.wait(LOOK_S):
            for file in self._files:
                file.read()

    def _times(self, stage: int, file: RingFile, now_ns: int) -> StageTimes:
        times, run_s = file.track, (now_ns - self._since_ns) / 1e9
        assert isinstance(times, Times)
        steps = max(1, times.steps)
        inside = times.total_s(set(Kind) - set(_OUTSIDE))
        waited = times.total_s((WAITS | {Kind.ROOM}) - {Kind.IDLE})
        step_s, room_s = times.total_s([Kind.STEP]), times.total_s([Kind.ROOM])
        token_bytes = file.reader.gauge(Gauge.BLOCK_BYTES) / self._config.profile.memory.block_size
        read = times.steps * file.reader.gauge(Gauge.WEIGHTS_BYTES) + times.context * token_bytes

        def each(seconds: float) -> float:
            return round(1e3 * seconds / steps, 4)

        return StageTimes(
            stage=stage,
            micro_batches=times.steps,
            idle=round(times.total_s(WAITS, now_ns) / run_s, 4),
            device=round(times.total_s([Kind.DEVICE], now_ns) / run_s, 4),
            own_ms=each(step_s - waited),
            compute_ms=each(times.total_s(_COMPUTE)),
            sample_ms=each(times.total_s([Kind.SAMPLE])),
            send_ms=each(times.total_s([Kind.SEND]) - room_s),
            memory_ms=each(times.total_s(_MEMORY)),
            other_ms=each(step_s - inside),
            gbps=round(read / run_s / 1e9, 3),
        )
