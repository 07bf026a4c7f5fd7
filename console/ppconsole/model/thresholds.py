"""Thresholds of figures, and the incidents of an engine, as alarms that are raised and cleared once each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, get_args

import msgspec
from ppengine.protocol.snapshot import IncidentInfo, Snapshot, is_beside

from ppconsole.model.safe import clean
from ppconsole.model.trends import Point, measure

Metric = Literal["waiting", "running", "kv_use", "output_tok_s", "stage_memory_use", "ttft_p99_s"]
METRICS: tuple[Metric, ...] = get_args(Metric)
_GAP_S = 5.0
"""After a longer silence of the engine a figure must be past its level for the whole time again."""


class Threshold(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One level of one figure; `above` or `below` is given, not both."""

    metric: Metric
    above: float | None = None
    """The alarm is raised above this."""
    below: float | None = None
    """The alarm is raised below this."""
    for_s: float = 5.0
    """Seconds that the figure must be past the level, to raise and to clear the alarm."""
    clear_below: float | None = None
    """With `above`: the alarm is cleared at this or below; if not given, at `above`."""
    clear_above: float | None = None
    """With `below`: the alarm is cleared at this or above; if not given, at `below`."""
    mark: bool = True
    """The figure is marked in the banner and in the trends."""
    bell: bool = False
    """The terminal's bell rings when the alarm is raised."""
    command: list[str] = []
    """Program and arguments that are run when the alarm is raised and when it is cleared; no shell."""


class OnIncident(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Effects of an incident of the engine."""

    bell: bool = False
    """The terminal's bell rings when an incident begins."""
    command: list[str] = []
    """Program and arguments that are run when an incident begins and when it is over; no shell."""


class AlarmConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file `config.toml` of the console."""

    thresholds: list[Threshold] = []
    """Levels of figures."""
    on_incident: OnIncident | None = None
    """Effects of incidents."""


class Alarm(NamedTuple):
    """One alarm that was raised or cleared. `key` names its rule; `value` is text for the command."""

    key: str
    metric: str
    raised: bool
    value: str
    text: str
    bell: bool
    command: tuple[str, ...]
    incident: int | None


def problem_of(threshold: Threshold) -> tuple[str, str] | None:
    """Return the key of a threshold that is wrong, and what would be right; None: it is fine."""
    above, below = threshold.above, threshold.below
    if (above is None) == (below is None):
        return "above", "exactly one of above and below must be given"
    if not 0 <= threshold.for_s <= 3600:
        return "for_s", "it must be 0 to 3600 seconds"
    if threshold.clear_below is not None and (above is None or threshold.clear_below > above):
        return "clear_below", "it goes with above and must be at most that"
    if threshold.clear_above is not None and (below is None or threshold.clear_above < below):
        return "clear_above", "it goes with below and must be at least that"
    return None


class _Watch:
    """The state of one threshold."""

    def __init__(self, threshold: Threshold) -> None:
        self.threshold = threshold
        self.raised = False
        self.since: float | None = None
        """Time since when the figure is past the level that changes the state."""

    @property
    def level(self) -> str:
        """The level in words: `above 100`."""
        threshold = self.threshold
        return f"below {threshold.below:g}" if threshold.above is None else f"above {threshold.above:g}"

    def look(self, value: float | None, now: float) -> bool:
        """Take the figure and return whether the state has changed. An unknown figure changes nothing."""
        if value is None or not self._changes(value):
            self.since = None
            return False
        if self.since is None:
            self.since = now
        if now - self.since < self.threshold.for_s:
            return False
        self.raised, self.since = not self.raised, None
        return True

    def _changes(self, value: float) -> bool:
        threshold = self.threshold
        if threshold.above is not None:
            clear = threshold.above if threshold.clear_below is None else threshold.clear_below
            return value <= clear if self.raised else value > threshold.above
        assert threshold.below is not None
        clear = threshold.below if threshold.clear_above is None else threshold.clear_above
        return value >= clear if self.raised else value < threshold.below


class Watches:
    """All thresholds and the incidents of one engine. `clock`: monotonic seconds."""

    def __init__(self, config: AlarmConfig, clock: Callable[[], float]) -> None:
        self._config, self._clock = config, clock
        self.restart()

    def restart(self) -> None:
        """Forget every state: the snapshots are of another engine from now on."""
        self._watches = [_Watch(each) for each in self._config.thresholds]
        self._known: set[int] | None = None
        """Numbers of the incidents that were seen; None: no snapshot was seen yet."""
        self._open: dict[int, IncidentInfo] = {}
        """Those that are not known to be over. A snapshot has the newest of them alone."""
        self._looked = self._clock()

    @property
    def marks(self) -> dict[str, str]:
        """Raised alarms that are marked, their levels by metric."""
        return {watch.threshold.metric: watch.level for watch in self._watches if watch.raised and watch.threshold.mark}

    def look(self, snapshot: Snapshot) -> list[Alarm]:
        """Take a snapshot and return the alarms that it raises and clears."""
        now, point = self._clock(), measure(snapshot)
        if now - self._looked > _GAP_S:
            for watch in self._watches:
                watch.since = None
        self._looked = now
        alarms = list(self._incidents(snapshot))
        number = max(self._open, default=None)
        alarms += [
            _alarm(index, watch, point, number)
            for index, watch in enumerate(self._watches)
            if watch.look(getattr(point, watch.threshold.metric), now)
        ]
        return alarms

    def _incidents(self, snapshot: Snapshot) -> Iterator[Alarm]:
        """Yield the begin and the end of incidents; one that was over at the first snapshot is no alarm."""
        info, known = snapshot.incident, self._known
        self._known = set() if known is None else known
        newest = info if info is not None and info.over_wall is None and not info.ended else None
        for number, before in list(self._open.items()):
            if (
                newest is None
                or number > newest.number
                or (number != newest.number and _place(before) == _place(newest))
            ):
                del self._open[number]
                yield self._of_incident(number, False, "" if info is None or info.number != number else info.ended)
        if info is None:
            return
        if info.number not in self._known and (newest is not None or known is not None):
            yield self._of_incident(info.number, True, f"{info.cause}: {info.summary}")
            if newest is None:
                yield self._of_incident(info.number, False, info.ended)
        self._known.add(info.number)
        if newest is not None:
            self._open[info.number] = info

    def _of_incident(self, number: int, raised: bool, text: str) -> Alarm:
        effects = self._config.on_incident or OnIncident()
        words = f"incident {number} {'began' if raised else 'is over'}" + (f": {clean(text)}" if text else "")
        command = tuple(effects.command)
        return Alarm("on_incident", "incident", raised, clean(text), words, effects.bell and raised, command, number)


def _place(info: IncidentInfo) -> str:
    """Return the place where one incident lasts at a time: the pipeline, or a cause beside it."""
    return info.cause if is_beside(info.cause, info.stage) else ""


def _alarm(index: int, watch: _Watch, point: Point, incident: int | None) -> Alarm:
    threshold, value = watch.threshold, getattr(point, watch.threshold.metric)
    state = f"{watch.level} for {threshold.for_s:g} s" if watch.raised else f"not {watch.level} any more"
    return Alarm(
        f"thresholds[{index}]", threshold.metric, watch.raised, f"{value:g}",
        f"{threshold.metric} is {value:.4g}, {state}", threshold.bell and watch.raised, tuple(threshold.command),
        incident,
    )  # fmt: skip
