"""From reports that come and stay away to `Evidence`, with the little memory that ages need.

Since when a process is stopped, dead or silent, when a step last retired, how often the out-of-memory killer struck.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import msgspec

from ppengine.common.ptrace_pauses import Held
from ppengine.diagnosis.budgets import TRACED_AFTER_S, UNSEEN_AFTER_S, expected_ms
from ppengine.diagnosis.device_evidence import aged_stream
from ppengine.diagnosis.evidence import CoreEvidence, Evidence, Key, Stack, StageEvidence
from ppengine.protocol.reports import TRACED, CoreReport, ProcessInfo, ProcessReport, StageSample, StageView, WireLoss

TICK_OLD_S = 1.0
"""The control thread ticks ten times a second; older than this is not bad luck."""
OOM_WINDOW_NS, OOM_LATE_NS = 3_000_000_000, 1_500_000_000
"""A kill is counted before its victim is gone, which can take a while; and read a moment later."""

SLOWED_NS = 3_000_000_000
"""Until the steps of a stage have been as they are without a check for more than a second."""


class Run(msgspec.Struct):
    """An unbroken run of one observation, in monotonic ns."""

    first_ns: int
    last_ns: int

    @property
    def length_s(self) -> float:
        """How long it has lasted."""
        return (self.last_ns - self.first_ns) / 1e9


class Tracked(msgspec.Struct):
    """Memory of one process; reset with another pid."""

    pid: int
    stopped: Run | None = None
    traced: bool = False
    """Whether the newest stop was a tracer's."""
    dead_ns: int | None = None
    lost: tuple[str, int] = "", 0
    """The core's reason why the stage cannot go on, the generation of that process, and the time."""
    lost_ns: int = 0
    resumed_ns: int | None = None
    stale: Run | None = None
    kills: deque[tuple[int, int]] = msgspec.field(default_factory=deque)
    """Counts of out-of-memory kills with their times, over `OOM_WINDOW_NS`."""
    grown: int | None = None

    def saw(self, state: str | None, at_ns: int) -> bool:
        """Enter the state letter of one look (None: no such process); return whether a stop has just ended."""
        ended = self.stopped
        if state in ("T", TRACED):
            self.traced = state == TRACED
            self.stopped = self.stopped or Run(at_ns, at_ns)
            self.stopped.last_ns = max(self.stopped.last_ns, at_ns)
        else:
            self.stopped = None
        if state in (None, "Z", "X"):
            self.dead_ns = self.dead_ns or at_ns
        if ended is None or self.stopped is not None:
            return False
        if self.traced and ended.length_s < TRACED_AFTER_S:
            return False  # Somebody had a look: who hung before hangs on.
        self.resumed_ns = at_ns
        return True

    def since_resumed(self, age_s: float, at_ns: int) -> float:
        """Return an age without the time of a stop."""
        return age_s if self.resumed_ns is None else min(age_s, (at_ns - self.resumed_ns) / 1e9)

    def ticked(self, age_s: float, at_ns: int) -> float:
        """Enter the age of the control thread's tick; return it without the time of a stop."""
        age_s = self.since_resumed(age_s, at_ns)
        if age_s < TICK_OLD_S or self.stopped is not None:
            self.stale = None
        else:
            self.stale = self.stale or Run(at_ns, at_ns)
            self.stale.last_ns = max(self.stale.last_ns, at_ns)
        return age_s

    def killed(self, count: int | None, at_ns: int) -> int | None:
        """Enter a count of out-of-memory kills; return by how much it grew around the death, or lately."""
        if count is not None and (self.dead_ns is None or at_ns - self.dead_ns < OOM_LATE_NS):
            self.kills.append((at_ns, count))
            while self.dead_ns is None and at_ns - self.kills[0][0] > OOM_WINDOW_NS:
                self.kills.popleft()
            self.grown = max(0, count - self.kills[0][1])
        return self.grown


class Sighting(msgspec.Struct, frozen=True):
    """A stage sample with the time of its report on this host's clock. `here`: the stage runs on this host."""

    sample: StageSample
    mono_ns: int
    here: bool = True


class EvidenceTracker:
    """Turns the newest reports into `Evidence`."""

    def __init__(self, stages: int, publish_hz: float) -> None:
        self._keys = [(stage, 0) for stage in range(stages)]
        self._limit_s = max(2.0, 3.0 / publish_hz)
        self._processes: dict[object, Tracked] = {}
        self._retired: dict[Key, int] = {}
        self._retired_ns: int | None = None
        self._unscheduled: Run | None = None
        self._slowed_ns: int | None = None
        self._cards: dict[Key, str] = {}
        """UUIDs of GPUs, kept while a stage restarts."""
        self.held: dict[str, Held] = {}
        """By node: when its stages were held for their stacks."""

    def build(
        self,
        now_ns: int,
        core: CoreReport | None,
        sightings: dict[Key, Sighting],
        processes: ProcessReport | None,
        core_state: tuple[int, str | None] | None,
        *,
        core_tracer: str | None = None,
        stacks: Mapping[int, Stack] | None = None,
        stopping: bool = False,
    ) -> Evidence:
        """Return the evidence at `now_ns`. `core_state`: pid and state letter of the core; `stacks`: by pid.

        `core_tracer`: who has the core in state t.
        """
        listed = processes.processes if processes else []
        views = {(view.index, view.rank): view for view in core.stages} if core else {}
        self._note_retired(now_ns, views)
        stages = tuple(
            self._stage(now_ns, key, views.get(key), sightings.get(key), newest_process(listed, "stage", key))
            for key in self._keys
        )
        known = stacks or {}
        stages = tuple(msgspec.structs.replace(stage, stack=known.get(stage.pid or 0)) for stage in stages)
        seen = self._core(now_ns, core, newest_process(listed, "core"), core_state, core_tracer)
        seen = msgspec.structs.replace(seen, stack=known.get(seen.pid or 0))
        return Evidence(
            stages=stages,
            core=seen,
            steps_in_flight=tuple(core.steps_in_flight) if core else (),
            findings=tuple(core.findings) if core else (),
            losses=_aged(core, now_ns) if core else (),
            slowed=self._note_slowed(now_ns, core),
            since_retired_s=self._unheld(
                None if self._retired_ns is None else (now_ns - self._retired_ns) / 1e9, now_ns
            ),
            stopping=stopping,
        )

    def begin_anew(self, now_ns: int) -> None:
        """Restart the clock of retirements: no process had a turn until now."""
        self._retired_ns = now_ns

    def _note_slowed(self, now_ns: int, core: CoreReport | None) -> bool:
        """Return whether a check is on, or was a moment ago, behind which steps are slow."""
        if core is not None and (core.engine.checks.finite or core.engine.checks.strict):
            self._slowed_ns = now_ns
        return self._slowed_ns is not None and now_ns - self._slowed_ns < SLOWED_NS

    def _note_retired(self, now_ns: int, views: dict[Key, StageView]) -> None:
        retired = {key: view.retired_step for key, view in views.items()}
        if retired != self._retired:
            self._retired, self._retired_ns = retired, now_ns

    def _unheld(self, age_s: float | None, at_ns: int) -> float | None:
        """Return an age of `at_ns` without the time in which we held stages: one that is held holds up the others."""
        if age_s is None:
            return None
        from_ns = at_ns - int(age_s * 1e9)
        return max(0.0, age_s - sum(held.within_s(from_ns) for held in self.held.values()))

    def _tracked(self, name: object, pid: int) -> Tracked:
        known = self._processes.get(name)
        if known is None or known.pid != pid:
            known = self._processes[name] = Tracked(pid)
        return known

    def _stage(
        self, now_ns: int, key: Key, view: StageView | None, seen: Sighting | None, process: ProcessInfo | None
    ) -> StageEvidence:
        if seen is not None and process is not None and process.exit_code is None and process.pid != seen.sample.pid:
            seen = None  # The rings of its predecessor.
        pid = process.pid if process else seen.sample.pid if seen else view.pid if view else None
        base = StageEvidence(
            stage=key[0],
            rank=key[1],
            pid=pid,
            generation=process.generation if process else view.lost_generation if view else 1,
            retired_step=view.retired_step if view else None,
            unretired_age_s=self._unheld(_seconds(view.oldest_unretired_age_ms), now_ns) if view else None,
            unretired_step=view.oldest_unretired_step if view else None,
            unretired_tokens=view.oldest_unretired_tokens if view else 0,
            unretired_moved=view.oldest_unretired_moved * (view.block_bytes or 0) if view else 0,
            mapping_bytes=view.mapping_blocks * (view.block_bytes or 0) if view else 0,
            card=self._card(key, view),
        )
        if pid is None:
            return base
        tracked = self._tracked(key, pid)
        lost = (view.lost, view.lost_generation) if view is not None else ("", 0)
        if lost != tracked.lost:
            tracked.lost, tracked.lost_ns = lost, now_ns
        if lost[0]:
            since_s = (now_ns - tracked.lost_ns) / 1e9
            base = msgspec.structs.replace(base, lost=lost[0], lost_for_s=since_s, lost_generation=lost[1])
        if seen is not None and seen.sample.pid == pid:
            base = self._with_sample(base, tracked, seen, now_ns)
        if process is not None and process.exit_code is not None:
            tracked.dead_ns = tracked.dead_ns or now_ns
            base = msgspec.structs.replace(base, exit_code=process.exit_code, exit_detail=process.detail)
        dead_for = None if tracked.dead_ns is None else (now_ns - tracked.dead_ns) / 1e9
        stopped = None if tracked.stopped is None else tracked.stopped.length_s
        if stopped is not None and base.process_state == TRACED:
            # Who is only listened to is stopped at every system call, and moves.
            stopped = min(stopped, base.progress_age_s or 0.0)
        return msgspec.structs.replace(base, dead_for_s=dead_for, stopped_for_s=stopped)

    def _card(self, key: Key, view: StageView | None) -> str | None:
        if view is not None and view.device_uuid is not None:
            self._cards[key] = view.device_uuid
        return self._cards.get(key)

    def _with_sample(self, base: StageEvidence, tracked: Tracked, seen: Sighting, now_ns: int) -> StageEvidence:
        sample, age = seen.sample, max(0.0, (now_ns - seen.mono_ns) / 1e9)
        if tracked.saw(sample.process_state, seen.mono_ns):
            self._retired_ns = now_ns  # It takes up its work again: the time for it begins anew.
        tick = self._unheld(_seconds(sample.tick_age_ms), seen.mono_ns)
        tick = None if tick is None else tracked.ticked(tick, seen.mono_ns)
        progress = self._unheld(_seconds(sample.progress_age_ms), seen.mono_ns)
        progress = None if progress is None else tracked.since_resumed(progress, seen.mono_ns)
        op_age = self._unheld(_seconds(sample.op_age_ms), seen.mono_ns)
        mapping = self._unheld(_seconds(sample.mapping_ms), seen.mono_ns)
        mapping = None if mapping is None else tracked.since_resumed(mapping, seen.mono_ns)
        expected = expected_ms(sample.work_ms, base.unretired_tokens)
        return msgspec.structs.replace(
            base,
            process_state=sample.process_state,
            oom_kills=tracked.killed(sample.oom_kills, seen.mono_ns),
            main_state=sample.main_state,
            tracer=sample.tracer,
            wchan=sample.wchan,
            cpu=sample.cpu,
            tick_age_s=tick,
            tick_stale_for_s=None if tracked.stale is None else tracked.stale.length_s,
            # Nobody has looked for too long: what it was at then excuses nothing now.
            phase=None if age > UNSEEN_AFTER_S else sample.phase,
            phase_age_s=sample.phase_age_ms / 1e3 + age,
            sample_age_s=age,
            op=sample.op,
            op_age_s=None if op_age is None else op_age + age,
            op_step=sample.op_step,
            op_peer=sample.op_peer,
            last_op=sample.last_op,
            outbox=sample.outbox,
            edges=tuple(sample.edges),
            pace=sample.pace,
            progress_age_s=None if progress is None else progress + age,
            mapping_age_s=None if mapping is None else mapping + age,
            finished_step=sample.finished_step,
            expected_s=_seconds(expected),
            cpu_s=sample.cpu_s,
            streams=tuple(aged_stream(stream, age * 1e3) for stream in sample.streams if stream.on_device),
        )

    def _core(
        self,
        now_ns: int,
        core: CoreReport | None,
        process: ProcessInfo | None,
        state: tuple[int, str | None] | None,
        tracer: str | None,
    ) -> CoreEvidence:
        pid = process.pid if process else state[0] if state else None
        age = None if core is None else (now_ns - core.mono_ns) / 1e9
        if pid is None:
            return CoreEvidence(report_age_s=age, report_limit_s=self._limit_s)
        tracked = self._tracked("core", pid)
        if state is not None and state[0] == pid and tracked.saw(state[1], now_ns):
            self._retired_ns = now_ns
        if process is not None and process.exit_code is not None:
            tracked.dead_ns = tracked.dead_ns or now_ns
        stopped = None if tracked.stopped is None else tracked.stopped.length_s
        if stopped is not None and tracked.traced:
            stopped = min(stopped, age or 0.0)  # As of a stage: who reports on is only listened to.
        unscheduled = self._note_unscheduled(now_ns, core)
        return CoreEvidence(
            pid=pid,
            exit_code=process.exit_code if process else None,
            exit_detail=process.detail if process else "",
            process_state=state[1] if state else None,
            stopped_for_s=stopped,
            tracer=tracer,
            dead_for_s=None if tracked.dead_ns is None else (now_ns - tracked.dead_ns) / 1e9,
            report_age_s=age,
            report_limit_s=self._limit_s,
            unscheduled_for_s=unscheduled,
            running=core.queues.running if core else 0,
        )

    def _note_unscheduled(self, now_ns: int, core: CoreReport | None) -> float | None:
        """Return for how long requests have run without a step in flight."""
        if core is None or core.engine.state != "serving" or not core.queues.running or core.steps_in_flight:
            self._unscheduled = None
            return None
        self._unscheduled = self._unscheduled or Run(core.mono_ns, core.mono_ns)
        self._unscheduled.last_ns = core.mono_ns
        return self._unscheduled.length_s


def newest_process(listed: list[ProcessInfo], role: str, key: Key | None = None) -> ProcessInfo | None:
    """Return the process of a role (and stage): one that runs, else the last one listed."""
    mine = [
        process
        for process in listed
        if process.role == role and (key is None or (process.stage, process.rank or 0) == key)
    ]
    running = [process for process in mine if process.exit_code is None]
    return next(reversed(running or mine), None)


def _aged(core: CoreReport, now_ns: int) -> tuple[WireLoss, ...]:
    """Return the losses of a report with what the report itself has aged."""
    age = (now_ns - core.mono_ns) / 1e9
    return tuple(
        msgspec.structs.replace(
            loss, since_s=loss.since_s + age, healed_s=None if loss.healed_s is None else loss.healed_s + age
        )
        for loss in core.losses
    )


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1e3
