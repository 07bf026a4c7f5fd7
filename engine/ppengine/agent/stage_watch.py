"""One stage observed from outside: its rings, the page of its device, and its process."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from ppengine.agent.device_watch import DeviceWatch
from ppengine.agent.host_load import HostLoad
from ppengine.agent.pace import Totals
from ppengine.agent.process_watch import ProcessLook, ProcessWatch
from ppengine.agent.rank_waits import RankWaits
from ppengine.agent.ring_state import Track, kind_name, stream_info, waiting_on
from ppengine.agent.step_history import History
from ppengine.common import cgroup_limits, procfs
from ppengine.common.edge_messages import MessageTrack
from ppengine.common.groups import Groups, site_text
from ppengine.common.ring import KIND, MAP_RING, SIZE, STEP, Kind, Phase, RingReader, Row, Word
from ppengine.protocol.operation_kinds import RANK_WAITS
from ppengine.protocol.place import Place
from ppengine.protocol.stage_info import StreamInfo
from ppengine.protocol.stage_samples import TRACED, StageSample

_STEPS_SHOWN = 8
_MESSAGE_RINGS = frozenset({"send", "receive"})
"""Rings whose records are messages; the thousands of others are not searched for one."""
DEVICE_PAGE = "device.page"
"""The one file of a stage that is not a ring (see `ppengine.common.device_page`)."""
_READINGS, _AT_ONCE_NS = 3, 50_000_000
"""Most readings of the rings for one sample, and the longest that is of one moment: one takes a millisecond or less."""
_LATE_NS = 500_000_000
"""Age from which the tick of a control thread is late."""
_OWNERS = {"receive": "main", "send": "main"}
"""Threads that write a ring of another name."""


class RingFile:
    """One ring file and the state read from it. Another inode under the same path is another ring."""

    def __init__(self, path: Path, inode: int, track: Track) -> None:
        """Open `path`. Raises OSError or ValueError while the writer is still making it."""
        self.inode = inode
        self.reader = RingReader(path)
        self.track = track
        self.messages = MessageTrack()

    def read(self) -> None:
        """Read the new records, and the open ones again."""
        known = {seq: self.reader.record(seq) for seq in sorted(self.track.pending())}
        rows: list[Row] = [record for record in known.values() if record is not None]
        rows += self.reader.rows(self.track.seen)
        self.track.feed(rows, gone=[seq for seq, record in known.items() if record is None])
        if self.reader.name in _MESSAGE_RINGS:
            self.messages.feed(rows)


class StageWatch:
    """Reads one stage (one tensor rank). `look` returns a sample, None before its main ring exists."""

    def __init__(self, stage: int, rank: int, groups: Groups | None = None) -> None:
        """`groups`: the places of the engine; None: stages have one rank."""
        self.stage, self.rank = stage, rank
        self._places = groups
        self._ranks = RankWaits() if groups is not None and groups.tensor > 1 else None
        self._files: dict[str, RingFile] = {}
        self._device: DeviceWatch | None = None
        self._history = History()
        """Past of the main ring."""
        self._step_ms: tuple[float | None, float | None] = (None, None)
        self._process = ProcessWatch(0)
        """The process that wrote the main ring; 0: there is none."""
        self._before: tuple[int, int | None] | None = None
        """Pid of the process before it, and the out-of-memory kills that its cgroup had counted."""

    @property
    def waited_ns(self) -> int:
        """Time so far in which its main thread could run and had no core; 0: the kernel does not say."""
        return self._process.waited_ns

    @property
    def throttled_us(self) -> int:
        """Microseconds so far in which a quota held it back; 0: there is none, or it is not readable."""
        return self._process.throttled_us

    @property
    def by_device(self) -> bool:
        """Whether a device does its work, so that the load of the processors does not matter."""
        return self._history.by_device

    @property
    def pid(self) -> int | None:
        """Process that wrote the main ring."""
        return self._process.pid or None

    def update(self, paths: dict[str, tuple[Path, int]]) -> None:
        """Follow the ring files, and the page of a device: `paths` maps a name to path and inode."""
        paths = dict(paths)
        self._follow_page(*paths.pop(DEVICE_PAGE, (Path(), 0)))
        for name in [name for name in self._files if name not in paths or paths[name][1] != self._files[name].inode]:
            self._files.pop(name).reader.close()
        for name, (path, inode) in paths.items():
            if name not in self._files:
                # A ring under construction is complete at the next look.
                with contextlib.suppress(OSError, ValueError):
                    track = History() if name == "main" else Track()
                    self._files[name] = RingFile(path, inode, track)
                    self._history = track if isinstance(track, History) else self._history
                    self._files = dict(sorted(self._files.items(), key=lambda item: (item[0] != "main", item[0])))
        main = self._files.get("main")
        pid = main.reader.word(Word.PID) if main else 0
        if pid != self._process.pid:
            if self._process.pid:
                # Its successor starts at once: this may be the first look since its end.
                self._process.kills.read()
                self._before = self._process.pid, self._process.kills.total
            self._process = ProcessWatch(pid)
            self._ranks = None if self._ranks is None else RankWaits()

    def look(self, host: HostLoad | None = None, paused_ns: int = 0) -> StageSample | None:
        """Return a sample of this moment. `paused_ns`: time so far in which a stage was paused for its stacks."""
        main, past = self._files.get("main"), self._history
        if main is None:
            return None
        now_ns, process, control = self._read(), self._process, self._files.get("control")
        seen = process.look()
        full_ns = None if host is None else host.full_ns
        if process.look_slowly(
            main.reader, None if control is None else control.reader, paused_ns, full_ns, alive=seen.alive
        ):
            self._step_ms = past.step_ms(time.monotonic_ns())
        if past.pace.due(now_ns):
            beside_ns = None if host is None or self.by_device else host.beside_ns
            waits = procfs.threads_waited_ns(process.pid), process.quota.throttled_us
            ran_ns = None if seen.thread is None or self.by_device else int(seen.thread.cpu_s * 1e9)
            past.pace.close(now_ns, Totals(*waits, beside_ns, ran_ns))
        return self._sample(main, seen, now_ns)

    def _read(self) -> int:
        """Read the rings and return the time of that.

        If the agent lost its core in between, an operation that has ended since would seem to last.
        """
        for _ in range(_READINGS):
            begun_ns = time.monotonic_ns()
            for file in self._files.values():
                file.read()
            now_ns = time.monotonic_ns()
            if now_ns - begun_ns <= _AT_ONCE_NS:
                break
        return now_ns

    def _sample(self, main: RingFile, seen: ProcessLook, now_ns: int) -> StageSample:
        past, process, (stat, thread, alive, waited_ns, groups) = self._history, self._process, seen
        last = past.last_op()
        words, gauges, op = main.reader.words(), main.reader.gauges(), past.open_op()
        tick_ns = max(file.reader.word(Word.THREAD_TICK_NS) for file in self._files.values())
        moved_ns = max(past.newest_ns, words[Word.MAIN_TICK_NS])
        begun, finished = gauges["step_begun"], gauges["step_finished"]
        return StageSample(
            index=self.stage,
            rank=self.rank,
            pid=process.pid,
            process_state=stat.state if stat else None,
            process_start=stat.start if stat else None,
            phase=_phase(words[Word.PHASE]),
            phase_age_ms=_age(now_ns, words[Word.PHASE_NS]) or 0.0,
            progress_age_ms=_age(now_ns, moved_ns),
            tick_age_ms=_age(now_ns, tick_ns),
            op=None if op is None else kind_name(op.kind),
            op_age_ms=None if op is None else _age(now_ns, op.enqueued_ns),
            op_step=None if op is None else op.step,
            op_peer=None if op is None or op.peer < 0 else op.peer,
            waiting_on=waiting_on(op, now_ns, self.stage),
            inbox=gauges["inbox"],
            outbox=gauges["outbox"],
            begun_step=begun,
            finished_step=finished,
            micro_batches=list(range(max(finished, begun - _STEPS_SHOWN) + 1, begun + 1)),
            step_ms_p50=self._step_ms[0],
            step_ms_p99=self._step_ms[1],
            idle_fraction=past.idle_fraction(now_ns),
            gauges=gauges if gauges["total_bytes"] else {},
            kv_resident=process.memory.resident if alive else None,
            gil=process.gil if alive else None,
            growth=process.memory.growth if alive else None,
            streams=[
                self._stream(file.reader.name or name, _OWNERS.get(name, name), file.track, now_ns)
                for name, file in self._files.items()
            ]
            + (self._device.look(process.pid) if self._device is not None else []),
            mapping_ms=self._mapping_ms(now_ns),
            timeline=past.timeline(now_ns),
            oom_kills=process.kills.total,
            before=self._before,
            cpu_s=stat.cpu_s if stat else None,
            cpu_limits_s=process.cpu_limits_s,
            main_state=thread.state if thread else None,
            control_state=self._control_state() if now_ns - tick_ns >= _LATE_NS else None,
            tracer=procfs.tracer(process.pid) if stat is not None and stat.state == TRACED else None,
            wchan=procfs.wchan(process.pid) if alive else None,
            last_op=None if last is None else kind_name(last.kind),
            cpu=process.cpu.shares(now_ns, stat, thread, waited_ns) if stat and thread else None,
            quota=process.quota.sample if alive else None,
            starved=process.starved if alive else None,
            frozen=str(cgroup_limits.frozen_by(groups) or "") if alive else "",
            edges=[edge for file in self._files.values() for edge in file.messages.samples(now_ns)],
            pace=past.pace.sample(now_ns),
            work_ms=past.work_ms(),
            op_site=site_text(op.detail) if op is not None and op.kind in RANK_WAITS else "",
            rank_wait=None if self._ranks is None else self._ranks.share(now_ns, gauges["collective_wait_ns"], op),
        )

    def _control_state(self) -> str | None:
        """Return the state letter of the control thread: without a core it is R, and S while it waits for the GIL."""
        control = self._files.get("control")
        thread = 0 if control is None else control.reader.word(Word.THREAD_ID)
        stat = procfs.read_stat(self._process.pid, thread) if thread else None
        return None if stat is None else stat.state

    def _stream(self, name: str, owner: str, track: Track, now_ns: int) -> StreamInfo:
        return stream_info(name, owner, track, now_ns, Place(self.stage, self.rank), self._places)

    def _mapping_ms(self, now_ns: int) -> float | None:
        """Return the age of the mapping thread's present change; None without one."""
        file = self._files.get(MAP_RING)
        # The ring of a dead process stays until its successor gets to its device.
        if file is None or file.reader.word(Word.PID) != self._process.pid:
            return None
        op = file.track.open_op()
        return None if op is None or op.kind != Kind.MAP else _age(now_ns, op.enqueued_ns)

    def messages(self, ring: str) -> MessageTrack | None:
        """Return the messages of the ring `send` or `receive`."""
        file = self._files.get(ring)
        return None if file is None else file.messages

    def tokens_of(self, step: int) -> int | None:
        """Return the tokens of a recent step by the stage's own record of it; None: it is not in the ring."""
        main = self._files.get("main")
        rows = [] if main is None else main.reader.rows(0)
        return next((row[SIZE] for row in reversed(rows) if row[KIND] == Kind.STEP and row[STEP] == step), None)

    def close(self) -> None:
        """Unmap all rings."""
        for file in self._files.values():
            file.reader.close()
        self._files.clear()
        self._follow_page(Path(), 0)

    def _follow_page(self, path: Path, inode: int) -> None:
        """Read the page of that inode from now on; 0: there is none."""
        if self._device is not None and self._device.inode != inode:
            self._device.close()
            self._device = None
        if self._device is None and inode:
            self._device = DeviceWatch(path, inode)


def _phase(value: int) -> str:
    return Phase(value).name.lower() if value in Phase._value2member_map_ else f"phase{value}"


def _age(now_ns: int, then_ns: int) -> float | None:
    return round((now_ns - then_ns) / 1e6, 2) if then_ns else None
