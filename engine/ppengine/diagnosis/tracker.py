"""Turns the newest reports, and missing ones, into `Evidence`, with the little memory that its ages need.

This is the memory of the pipeline: the last retirement, slowing checks, cards. `process_history` has that of a process.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ppengine.common.ptrace_pauses import PauseHistory
from ppengine.diagnosis.budgets import UNSEEN_AFTER_S, expected_ms
from ppengine.diagnosis.device_evidence import aged_stream
from ppengine.diagnosis.evidence import CoreEvidence, Evidence, Key, Stack, StageEvidence
from ppengine.diagnosis.process_history import ProcessHistory, Run
from ppengine.protocol.reports import TRACED, CoreReport, ProcessInfo, ProcessReport, StageSample, StageView, WireLoss

SLOWED_NS = 3_000_000_000
"""Nanoseconds after a check in which steps may still be slow: the paces need a whole second without it."""


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
        self._processes: dict[object, ProcessHistory] = {}
        self._retired: dict[Key, int] = {}
        self._retired_ns: int | None = None
        self._unscheduled: Run | None = None
        self._slowed_ns: int | None = None
        self._cards: dict[Key, str] = {}
        """UUIDs of GPUs, kept while a stage restarts."""
        self.pauses: dict[str, PauseHistory] = {}
        """By node: the pauses of its stages for their stacks."""

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

        `core_tracer`: name and pid of the tracer of a core in state t.
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
            since_retired_s=self._without_pauses(
                None if self._retired_ns is None else (now_ns - self._retired_ns) / 1e9, now_ns
            ),
            stopping=stopping,
        )

    def restart_clock(self, now_ns: int) -> None:
        """Restart the clock of retirements: no process was scheduled until now."""
        self._retired_ns = now_ns

    def _note_slowed(self, now_ns: int, core: CoreReport | None) -> bool:
        """Return whether a check that slows down steps is on, or was a moment ago."""
        if core is not None and (core.engine.checks.finite or core.engine.checks.strict):
            self._slowed_ns = now_ns
        return self._slowed_ns is not None and now_ns - self._slowed_ns < SLOWED_NS

    def _note_retired(self, now_ns: int, views: dict[Key, StageView]) -> None:
        retired = {key: view.retired_step for key, view in views.items()}
        if retired != self._retired:
            self._retired, self._retired_ns = retired, now_ns

    def _without_pauses(self, age_s: float | None, at_ns: int) -> float | None:
        """Return an age of `at_ns` without the pauses of any stage: a paused one delays the others."""
        if age_s is None:
            return None
        from_ns = at_ns - int(age_s * 1e9)
        return max(0.0, age_s - sum(pauses.within_s(from_ns) for pauses in self.pauses.values()))

    def _history(self, name: object, pid: int) -> ProcessHistory:
        known = self._processes.get(name)
        if known is None or known.pid != pid:
            known = self._processes[name] = ProcessHistory(pid)
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
            unretired_age_s=self._without_pauses(_seconds(view.oldest_unretired_age_ms), now_ns) if view else None,
            unretired_step=view.oldest_unretired_step if view else None,
            unretired_tokens=view.oldest_unretired_tokens if view else 0,
            unretired_moved=view.oldest_unretired_moved * (view.block_bytes or 0) if view else 0,
            mapping_bytes=view.mapping_blocks * (view.block_bytes or 0) if view else 0,
            card=self._card(key, view),
        )
        if pid is None:
            return base
        history = self._history(key, pid)
        lost = (view.lost, view.lost_generation) if view is not None else ("", 0)
        if lost != history.lost:
            history.lost, history.lost_ns = lost, now_ns
        if lost[0]:
            since_s = (now_ns - history.lost_ns) / 1e9
            base = msgspec.structs.replace(base, lost=lost[0], lost_for_s=since_s, lost_generation=lost[1])
        if seen is not None and seen.sample.pid == pid:
            base = self._with_sample(base, history, seen, now_ns)
        if process is not None and process.exit_code is not None:
            history.dead_ns = history.dead_ns or now_ns
            base = msgspec.structs.replace(base, exit_code=process.exit_code, exit_detail=process.detail)
        dead_for = None if history.dead_ns is None else (now_ns - history.dead_ns) / 1e9
        stopped = None if history.stopped is None else history.stopped.length_s
        if stopped is not None and base.process_state == TRACED:
            # A process under strace is stopped at every system call, and makes progress.
            stopped = min(stopped, base.progress_age_s or 0.0)
        return msgspec.structs.replace(base, dead_for_s=dead_for, stopped_for_s=stopped)

    def _card(self, key: Key, view: StageView | None) -> str | None:
        if view is not None and view.device_uuid is not None:
            self._cards[key] = view.device_uuid
        return self._cards.get(key)

    def _with_sample(self, base: StageEvidence, history: ProcessHistory, seen: Sighting, now_ns: int) -> StageEvidence:
        sample, age = seen.sample, max(0.0, (now_ns - seen.mono_ns) / 1e9)
        if history.note_state(sample.process_state, seen.mono_ns):
            self._retired_ns = now_ns  # It resumes its work: the time limit for it restarts.
        tick = self._without_pauses(_seconds(sample.tick_age_ms), seen.mono_ns)
        tick = None if tick is None else history.note_tick(tick, seen.mono_ns)
        progress = self._without_pauses(_seconds(sample.progress_age_ms), seen.mono_ns)
        progress = None if progress is None else history.since_resumed(progress, seen.mono_ns)
        op_age = self._without_pauses(_seconds(sample.op_age_ms), seen.mono_ns)
        mapping = self._without_pauses(_seconds(sample.mapping_ms), seen.mono_ns)
        mapping = None if mapping is None else history.since_resumed(mapping, seen.mono_ns)
        expected = expected_ms(sample.work_ms, base.unretired_tokens)
        return msgspec.structs.replace(
            base,
            process_state=sample.process_state,
            oom_kills=history.note_kills(sample.oom_kills, seen.mono_ns),
            main_state=sample.main_state,
            tracer=sample.tracer,
            wchan=sample.wchan,
            cpu=sample.cpu,
            tick_age_s=tick,
            tick_stale_for_s=None if history.stale is None else history.stale.length_s,
            # The sample is too old: its phase excuses nothing now.
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
        history = self._history("core", pid)
        if state is not None and state[0] == pid and history.note_state(state[1], now_ns):
            self._retired_ns = now_ns
        if process is not None and process.exit_code is not None:
            history.dead_ns = history.dead_ns or now_ns
        stopped = None if history.stopped is None else history.stopped.length_s
        if stopped is not None and history.traced:
            stopped = min(stopped, age or 0.0)  # As for a stage: a core that reports is only under strace.
        unscheduled = self._note_unscheduled(now_ns, core)
        return CoreEvidence(
            pid=pid,
            exit_code=process.exit_code if process else None,
            exit_detail=process.detail if process else "",
            process_state=state[1] if state else None,
            stopped_for_s=stopped,
            tracer=tracer,
            dead_for_s=None if history.dead_ns is None else (now_ns - history.dead_ns) / 1e9,
            report_age_s=age,
            report_limit_s=self._limit_s,
            unscheduled_for_s=unscheduled,
            running=core.queues.running if core else 0,
        )

    def _note_unscheduled(self, now_ns: int, core: CoreReport | None) -> float | None:
        """Return the seconds for which requests have run without a step in flight."""
        if core is None or core.engine.state != "serving" or not core.queues.running or core.steps_in_flight:
            self._unscheduled = None
            return None
        self._unscheduled = self._unscheduled or Run(core.mono_ns, core.mono_ns)
        self._unscheduled.last_ns = core.mono_ns
        return self._unscheduled.length_s


def newest_process(listed: list[ProcessInfo], role: str, key: Key | None = None) -> ProcessInfo | None:
    """Return the process of a role (and stage): a running one, otherwise the last one listed."""
    mine = [
        process
        for process in listed
        if process.role == role and (key is None or (process.stage, process.rank or 0) == key)
    ]
    running = [process for process in mine if process.exit_code is None]
    return next(reversed(running or mine), None)


def _aged(core: CoreReport, now_ns: int) -> tuple[WireLoss, ...]:
    """Return the losses of a report, older by the age of the report."""
    age = (now_ns - core.mono_ns) / 1e9
    return tuple(
        msgspec.structs.replace(
            loss, since_s=loss.since_s + age, healed_s=None if loss.healed_s is None else loss.healed_s + age
        )
        for loss in core.losses
    )


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1e3
