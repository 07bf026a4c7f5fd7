"""Events of stages that come to load, stop or die, and that leave these states."""

from __future__ import annotations

from collections.abc import Mapping

from ppengine.common.groups import Groups
from ppengine.diagnosis.evidence import Key
from ppengine.diagnosis.process_history import Sighting
from ppengine.diagnosis.tracker import newest_process
from ppengine.gateway.event_log import EventLog
from ppengine.gateway.merge import stage_state
from ppengine.protocol.reports import CoreReport, ProcessInfo
from ppengine.protocol.snapshot import Verdict
from ppengine.protocol.stage_info import StageState

_NOTABLE: frozenset[StageState] = frozenset({"loading", "stopped", "dead"})
"""States whose begin and end are events; the others change many times a second."""


class StageChanges:
    """The newest state of each stage."""

    def __init__(self, groups: Groups, events: EventLog) -> None:
        self._groups, self._events = groups, events
        self._states: dict[Key, StageState] = {}

    def note(
        self, core: CoreReport | None, sightings: Mapping[Key, Sighting], processes: list[ProcessInfo],
        verdicts: list[Verdict], *, stopping: bool = False,
    ) -> bool:  # fmt: skip
        """Make events of the notable changes; return whether there was one. `stopping`: ends of stages are none."""
        changed = False
        views = {(view.index, view.rank): view for view in core.stages} if core else {}
        for key in self._groups.places:
            seen, process = sightings.get(key), newest_process(processes, "stage", key)
            sample = seen.sample if seen else None
            state = stage_state(views.get(key), sample, process, verdicts, key)
            before = self._states.get(key, "loading")
            self._states[key] = state
            if before == state or not {before, state} & _NOTABLE or (stopping and state == "dead"):
                continue
            changed = True
            pid = process.pid if process else sample.pid if sample else None
            where = self._groups.text(key) + (f" (pid {pid})" if pid else "")
            if state in _NOTABLE:
                detail = f": {process.detail}" if process and process.detail else ""
                self._events.say(f"stage.{state}", f"{where} is {state}{detail}", stage=key.stage)
            elif before != "loading":  # The core itself reports that a stage is ready.
                word = "continued" if before == "stopped" else "back"
                self._events.say(f"stage.{word}", f"{where} is {word}, now {state}", stage=key.stage)
        return changed
