"""Turns the newest reports, missing ones and the facts of faults into `Evidence`, with the memory that its ages need.

This is the memory of the pipeline: the last retirement, slowing checks, cards. `process_history` has that of a
process, `fault_log` that of ends.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from ppengine.common.groups import Groups
from ppengine.common.ptrace_pauses import PauseHistory
from ppengine.diagnosis.budgets import HELD_S, UNSEEN_AFTER_S, expected_ms
from ppengine.diagnosis.device_evidence import aged_stream
from ppengine.diagnosis.evidence import CoreEvidence, Evidence, Key, Stack, StageEvidence
from ppengine.diagnosis.fault_log import End, FaultLog
from ppengine.diagnosis.helper_evidence import HelperEvidence
from ppengine.diagnosis.process_history import ProcessHistory, Run, Sighting
from ppengine.protocol.reports import CoreReport, ProcessInfo, ProcessReport, StageView
from ppengine.protocol.stage_lifecycle import FIRST_GENERATION
from ppengine.protocol.stage_samples import TRACED

SLOWED_NS = 3_000_000_000
"""Nanoseconds after a check in which steps may still be slow: the paces need a whole second without it."""


class EvidenceTracker:
    """Turns the newest reports into `Evidence`."""

    def __init__(self, stages: int, publish_hz: float, ranks: int = 1) -> None:
        self._keys: list[Key] = list(Groups(stages, ranks).places)
        self._ranks = ranks
        self._limit_s = max(2.0, 3.0 / publish_hz)
        self._processes: dict[object, dict[int | None, ProcessHistory]] = {}
        """By the name of a place and pid: the process there, and its predecessor while that one's end is news."""
        self._retired: dict[Key, int] = {}
        self._retired_ns: int | None = None
        self._unscheduled: Run | None = None
        self._held: Run | None = None
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
        faults: FaultLog | None = None,
        core_tracer: str | None = None,
        core_frozen: str = "",
        agent: tuple[int, str | None] | None = None,
        stacks: Mapping[tuple[int | None, int], Stack] | None = None,
        helpers: tuple[HelperEvidence, ...] = (),
        stopping: bool = False,
    ) -> Evidence:
        """Return the evidence at `now_ns`. `core_state`: pid and state letter of the core.

        `stacks`: by stage (None: the core) and pid.
        `core_tracer`: name and pid of the tracer of a core in state t; `core_frozen`: the file that freezes it.
        `agent`: pid and state letter of an agent that is silent.
        """
        listed = processes.processes if processes else []
        views = {(view.index, view.rank): view for view in core.stages} if core else {}
        self._note_retired(now_ns if core is None else min(now_ns, core.mono_ns), views)
        faults = faults or FaultLog()
        faults.note_findings(core.findings if core else (), now_ns)
        stages = tuple(
            self._stage(
                now_ns, key, views.get(key), sightings.get(key), newest_process(listed, "stage", key),
                faults.end(key, now_ns),
            )
            for key in self._keys
        )  # fmt: skip
        if len({seen.node for seen in sightings.values()}) > 1:
            at = {key[0]: seen.node for key, seen in sightings.items()}
            stages = tuple(replace(stage, node=at.get(stage.stage, "")) for stage in stages)
        known = stacks or {}
        stages = tuple(replace(stage, stack=known.get((stage.stage, stage.pid or 0))) for stage in stages)
        if core_state is not None:
            core_state = core_state[0], _stop_state(core_state[1], core_frozen)
        if any(each.parent == "core" and (each.stopped_for_s, each.owes_for_s) != (None, None) for each in helpers):
            self._unscheduled = None  # Requests may wait for it, as for the one that makes masks.
        seen = self._core(now_ns, core, newest_process(listed, "core"), core_state, core_tracer)
        seen = replace(seen, frozen=core_frozen)
        if (gone := faults.core_end(now_ns)) is not None:
            seen = replace(
                seen, role=gone.role, pid=gone.pid, exit_code=gone.exit_code, exit_detail=gone.detail,
                process_state=None, stopped_for_s=None, frozen=CoreEvidence().frozen,
                dead_for_s=(now_ns - gone.mono_ns) / 1e9,
            )  # fmt: skip
        seen = replace(seen, stack=known.get((None, seen.pid or 0)))
        return Evidence(
            stages=stages,
            core=seen,
            steps_in_flight=tuple(core.steps_in_flight) if core else (),
            findings=tuple(core.findings) if core else (),
            losses=faults.losses(now_ns),
            slowed=self._note_slowed(now_ns, core),
            since_retired_s=self._without_pauses(
                None if self._retired_ns is None else (now_ns - self._retired_ns) / 1e9, now_ns
            ),
            stopping=stopping,
            agent=agent,
            helpers=helpers,
        )

    def restart_clock(self, now_ns: int) -> None:
        """Restart the clock of retirements: no process was scheduled until now."""
        self._retired_ns = now_ns

    def _note_slowed(self, now_ns: int, core: CoreReport | None) -> bool:
        """Return whether a check that slows down steps is on, or was a moment ago."""
        if core is not None and (core.engine.checks.finite or core.engine.checks.strict):
            self._slowed_ns = now_ns
        return self._slowed_ns is not None and now_ns - self._slowed_ns < SLOWED_NS

    def _note_retired(self, at_ns: int, views: dict[Key, StageView]) -> None:
        """Note a retirement that a report of `at_ns` shows: the gateway may look at it 0.3 s later."""
        retired = {key: view.retired_step for key, view in views.items()}
        if retired != self._retired:
            self._retired, self._retired_ns = retired, max(at_ns, self._retired_ns or 0)

    def _without_pauses(self, age_s: float | None, at_ns: int) -> float | None:
        """Return an age of `at_ns` without the pauses of any stage: a paused one delays the others."""
        if age_s is None:
            return None
        from_ns = at_ns - int(age_s * 1e9)
        return max(0.0, age_s - sum(pauses.within_s(from_ns) for pauses in self.pauses.values()))

    def _histories(self, name: object, *pids: int | None) -> dict[int | None, ProcessHistory]:
        """Return the memory of these processes by pid; that of others under `name` is dropped."""
        known = self._processes.get(name, {})
        kept: dict[int | None, ProcessHistory]
        kept = {pid: known.get(pid) or ProcessHistory() for pid in pids if pid is not None}
        self._processes[name] = kept
        return kept

    def _stage(
        self,
        now_ns: int,
        key: Key,
        view: StageView | None,
        seen: Sighting | None,
        process: ProcessInfo | None,
        end: End | None,
    ) -> StageEvidence:
        """Return the evidence of the process of a place, or of its predecessor while that one's end is news."""
        pid = process.pid if process else seen.sample.pid if seen else view.pid if view else None
        generation = process.generation if process else end.generation if end else FIRST_GENERATION
        replaced = process is not None and process.replaced
        base = StageEvidence(
            stage=key[0],
            rank=key[1],
            ranks=self._ranks,
            pid=pid,
            generation=generation,
            retired_step=view.retired_step if view else None,
            unretired_age_s=self._without_pauses(_seconds(view.oldest_unretired_age_ms), now_ns) if view else None,
            unretired_step=view.oldest_unretired_step if view else None,
            unretired_tokens=view.oldest_unretired_tokens if view else 0,
            unretired_moved=view.oldest_unretired_moved * (view.block_bytes or 0) if view else 0,
            mapping_bytes=view.mapping_blocks * (view.block_bytes or 0) if view else 0,
            card=self._card(key, view),
        )
        # The samples of a process that is replaced show an end that is no fault.
        if end is None:
            histories = self._histories(key, pid)
            return base if replaced else self._process(now_ns, base, histories.get(pid), seen)
        follows = end.generation < generation
        gone = end.pid or (None if follows else pid)
        histories = self._histories(key, pid, gone)
        ended = replace(base, pid=gone, generation=end.generation)
        ended = self._ended(now_ns, ended, histories.get(gone), seen, end, replaced=replaced or follows)
        if not follows:
            return ended
        present = base if replaced else self._process(now_ns, base, histories.get(pid), seen)
        return replace(ended, successor=pid, successor_phase=present.phase)

    def _process(
        self, now_ns: int, base: StageEvidence, history: ProcessHistory | None, seen: Sighting | None
    ) -> StageEvidence:
        """Return `base` with the newest sample of its process."""
        if history is None:
            return base
        if seen is not None and seen.sample.pid == base.pid:
            history.look(seen)
        if history.seen is not None:
            base = self._with_sample(base, history, history.seen, now_ns)
        dead_for = None if history.dead_ns is None else (now_ns - history.dead_ns) / 1e9
        stopped = None if history.stopped is None else history.stopped.length_s
        if stopped is not None and base.process_state == TRACED:
            # A process under strace is stopped at every system call, and makes progress.
            stopped = min(stopped, base.progress_age_s or 0.0)
        return replace(base, dead_for_s=dead_for, stopped_for_s=stopped)

    def _ended(
        self,
        now_ns: int,
        base: StageEvidence,
        history: ProcessHistory | None,
        seen: Sighting | None,
        end: End,
        *,
        replaced: bool,
    ) -> StageEvidence:
        """Return `base` with the newest sample of its process and the facts of its end."""
        if history is not None:
            before = seen.sample.before if seen is not None else None
            history.end(end.dead_ns, before[1] if before is not None and before[0] == base.pid else None)
        return end.entered(self._process(now_ns, base, history, seen), now_ns, replaced=replaced)

    def _card(self, key: Key, view: StageView | None) -> str | None:
        if view is not None and view.device_uuid is not None:
            self._cards[key] = view.device_uuid
        return self._cards.get(key)

    def _with_sample(self, base: StageEvidence, history: ProcessHistory, seen: Sighting, now_ns: int) -> StageEvidence:
        sample, age = seen.sample, max(0.0, (now_ns - seen.mono_ns) / 1e9)
        state = seen.state
        if history.note_state(_stop_state(state.state, state.frozen), state.mono_ns):
            self._retired_ns = now_ns  # It resumes its work: the time limit for it restarts.
        tick = self._without_pauses(_seconds(sample.tick_age_ms), seen.mono_ns)
        if tick is not None:
            tick_ns = seen.mono_ns - int((sample.tick_age_ms or 0.0) * 1e6)
            tick = history.note_tick(tick, seen.mono_ns, tick_ns, sample.control_state)
        progress = self._without_pauses(_seconds(sample.progress_age_ms), seen.mono_ns)
        progress = None if progress is None else history.since_resumed(progress, seen.mono_ns)
        op_age = self._without_pauses(_seconds(sample.op_age_ms), seen.mono_ns)
        mapping = self._without_pauses(_seconds(sample.mapping_ms), seen.mono_ns)
        mapping = None if mapping is None else history.since_resumed(mapping, seen.mono_ns)
        expected = expected_ms(sample.work_ms, base.unretired_tokens)
        return replace(
            base,
            process_state=state.state,
            glanced=seen.glance is not None,
            state_age_s=max(0.0, (now_ns - state.mono_ns) / 1e9),
            oom_kills=history.note_kills(sample.oom_kills, seen.mono_ns),
            main_state=sample.main_state if seen.glance is None else state.state,
            tracer=state.tracer,
            frozen=state.frozen,
            quota=sample.quota,
            starved=sample.starved,
            growth=sample.growth,
            gil=sample.gil,
            wchan=state.wchan,
            cpu=sample.cpu,
            tick_age_s=tick,
            tick_stale_for_s=None if history.stale is None else history.stale.length_s,
            tick_without_core=history.stale is not None and not history.stale_slept,
            # The sample is too old: the phase of a process that lives excuses nothing now.
            phase=None if age > UNSEEN_AFTER_S and not history.ended else sample.phase,
            phase_age_s=sample.phase_age_ms / 1e3 + age,
            sample_age_s=age,
            op=sample.op,
            op_age_s=None if op_age is None else op_age + age,
            op_step=sample.op_step,
            op_peer=sample.op_peer,
            op_site=sample.op_site,
            rank_wait=sample.rank_wait,
            last_op=sample.last_op,
            outbox=sample.outbox,
            edges=tuple(sample.edges),
            pace=sample.pace,
            progress_age_s=None if progress is None else progress + age,
            mapping_age_s=None if mapping is None else mapping + age,
            finished_step=sample.finished_step,
            expected_s=_seconds(expected),
            cpu_s=sample.cpu_s,
            cpu_limits_s=sample.cpu_limits_s,
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
        history = self._histories("core", pid)[pid]
        if state is not None and state[0] == pid and history.note_state(state[1], now_ns):
            self._retired_ns = now_ns
        if process is not None and process.exit_code is not None:
            history.dead_ns = history.dead_ns or now_ns
        stopped = None if history.stopped is None else history.stopped.length_s
        if stopped is not None and history.traced:
            stopped = min(stopped, age or 0.0)  # As for a stage: a core that reports is only under strace.
        unscheduled = self._note_unscheduled(now_ns, core)
        held = core.held if core else None
        self._held = _run_on(self._held, core.mono_ns) if core and held and held.held_s >= HELD_S else None
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
            held=held,
            held_for_s=self._held.length_s if self._held else 0.0,
        )

    def _note_unscheduled(self, now_ns: int, core: CoreReport | None) -> float | None:
        """Return the seconds for which requests have run without a step in flight."""
        if core is None or core.engine.state != "serving" or not core.queues.running or core.steps_in_flight:
            self._unscheduled = None
            return None
        self._unscheduled = _run_on(self._unscheduled, core.mono_ns)
        return self._unscheduled.length_s


def _run_on(run: Run | None, now_ns: int) -> Run:
    """Return `run`, or a new one, as it goes on until now."""
    run = run or Run(now_ns, now_ns)
    run.last_ns = now_ns
    return run


def newest_process(listed: list[ProcessInfo], role: str, key: Key | None = None) -> ProcessInfo | None:
    """Return the process of a role (and stage): a running one, otherwise the last one listed."""
    mine = [
        process
        for process in listed
        if process.role == role and (key is None or (process.stage, process.rank or 0) == key)
    ]
    running = [process for process in mine if process.exit_code is None]
    return next(reversed(running or mine), None)


def _stop_state(state: str | None, frozen: str) -> str | None:
    """Return the state letter by which a stop is judged: to the kernel a frozen process sleeps."""
    return "T" if frozen and state not in (None, "Z", "X") else state


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1e3
