"""The console's state and the view of it that is on the display: freshness, freeze, order, filter, rate history."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ppengine.protocol.control import Fetched
from ppengine.protocol.recording import Update
from ppengine.protocol.severity import LEVELS
from ppengine.protocol.snapshot import Event, RequestInfo, Snapshot
from ppengine.protocol.verb_table import ROWS, Role, covers

from ppconsole.model.facts import freshness, why_no_verbs
from ppconsole.model.filters import Filter
from ppconsole.model.reduce import add_output, add_prompt, reduce, set_filter
from ppconsole.model.request_fields import FIELDS
from ppconsole.model.rows import visible_requests
from ppconsole.model.safe import clean
from ppconsole.model.sorting import BY_ARRIVAL, Order
from ppconsole.model.state import SPANS_MS, ConsoleState
from ppconsole.model.trends import Point, Trends
from ppconsole.view.banner import Link, fault_segs, link_segs, state_segs
from ppconsole.view.cells import Seg
from ppconsole.view.playback import Playback

HISTORY = 120
"""Seconds of throughput that are kept."""


class Change(NamedTuple):
    """The effect of one update, as far as it decides when to paint."""

    snapshot: bool = False
    first: bool = False
    """There was no snapshot before."""
    alarm: bool = False
    """The link's state, the engine's state or a verdict: it is painted at once."""
    epoch: bool = False
    """Another epoch of the engine: the old requests are gone."""


class DisplayModel:
    """Holds the state. Times are monotonic seconds of `clock`."""

    def __init__(self, state: ConsoleState, clock: Callable[[], float], title: str = "") -> None:
        self.state = state
        self.title = clean(title)
        self.problem = ""
        """A failure inside the console itself, for the banner."""
        self.history: deque[float] = deque(maxlen=HISTORY)
        self.trends = Trends()
        self._record: Sequence[Point] = ()
        """Points of a whole past; empty with a live engine, and until they are read."""
        self.marks: dict[str, str] = {}
        """Metrics past a threshold that marks them, with the level in words."""
        self.lines: dict[str, list[str]] = {}
        """Lines that were entered, by mode."""
        self.playback: Playback | None = None
        """The position in a past; None with a live engine, and with an export, which does not move."""
        self._clock = clock
        self._arranged_of: tuple[Snapshot | None, Filter, Order] = (None, Filter(), BY_ARRIVAL)
        """Snapshot, filter and order of `_arranged`."""
        self._arranged: list[RequestInfo] = []
        self._frozen: ConsoleState | None = None
        self._frozen_at = 0.0
        self._frozen_trends = self.trends

    def restart(self, *, live_source: bool = True) -> None:
        """Forget one engine before the console attaches to another; order and filter stay."""
        old = self.state
        self.state = _arranged_as(ConsoleState(read_only=old.read_only, live_source=live_source), old)
        self.title = self.problem = ""
        self.playback = None
        self.history.clear()
        self.trends, self._record = Trends(), ()
        self._frozen = None

    def put_record(self, points: Sequence[Point]) -> None:
        """Keep the points of a whole past: every moment of it has the trends up to there."""
        self._record = points
        self.trends.put_before(points)

    def take(self, update: Update) -> Change:
        """Apply one update from the source and return its effect."""
        old, self.state = self.state, reduce(self.state, update, self._clock())
        if isinstance(update, Event):
            return Change()
        epoch = old.epoch is not None and self.state.epoch != old.epoch
        if epoch:
            self._frozen = None
        if self.state.snapshot is not None and self.state.snapshot is not old.snapshot:
            moved = not self.trends.points
            self.trends.take(self.state.snapshot)
            if moved:
                self.trends.put_before(self._record)
        alarm = old.link.state != self.state.link.state or _alarm(old) != _alarm(self.state)
        return Change(self.state.snapshot is not old.snapshot, old.snapshot is None, alarm, epoch)

    def rewind(self) -> None:
        """Forget picture and events before the source delivers another moment; order and filter stay."""
        fresh = ConsoleState(past=self.state.past, live_source=self.state.live_source, read_only=self.state.read_only)
        self.state = _arranged_as(fresh, self.state)
        self.history.clear()
        self.trends = Trends()

    def add_output(self, fetched: Fetched) -> None:
        """Append fetched text to the output of its request."""
        self.state = add_output(self.state, fetched)

    def add_prompt(self, request: str, prompt: str) -> None:
        """Keep the prompt of a request beside its output."""
        self.state = add_prompt(self.state, request, prompt)

    def note_rate(self) -> None:
        """Add the present throughput to the history."""
        snapshot = self.state.snapshot
        if snapshot is not None and not self.grey:
            self.history.append(snapshot.throughput.output_tok_s or 0.0)

    def now(self) -> float:
        """Return the present time of the clock."""
        return self._clock()

    # --- the view of it -----------------------------------------------------------------------------------------

    @property
    def shown(self) -> ConsoleState:
        """The state on the display: the present one, or the one at the freeze."""
        if self._frozen is None:
            return self.state
        return _arranged_as(self._frozen, self.state)

    @property
    def shown_trends(self) -> Trends:
        """The trends on the display: those up to now, or up to the freeze."""
        return self.trends if self._frozen is None else self._frozen_trends

    @property
    def grey(self) -> bool:
        """Whether the figures are old, because the link is not live."""
        return freshness(self.state, self._clock()).grey

    def arranged(self) -> list[RequestInfo]:
        """Return the requests in the table's order; once for a snapshot, as a paint asks several times."""
        state = self.shown
        snapshot, wanted, order = self._arranged_of
        if state.snapshot is not snapshot or (state.wanted, state.order) != (wanted, order):
            self._arranged_of = state.snapshot, state.wanted, state.order
            self._arranged = visible_requests(state)
        return self._arranged

    def link(self) -> Link:
        """Return the link's part of the banner."""
        now = self._clock()
        fresh = freshness(self.state, now)
        return Link(
            state=fresh.state,
            age_s=fresh.age_s,
            retry_in_s=self.state.link.retry_in_s,
            text=self._link_text(),
            read_only=self.state.read_only or not self.state.live_source,
            frozen_s=None if self._frozen is None else now - self._frozen_at,
            problem=self.problem,
            role=self.state.role,
            alarms=tuple(f"{metric} {level}" for metric, level in self.marks.items()),
            position=() if self.playback is None else tuple(self.playback.segs()),
        )

    def _link_text(self) -> str:
        """Return the text of the link's state; of a recording, why it is cut short, if it is."""
        link = self.state.link
        return link.text if self.state.live_source or link.state in ("lost", "ended") else ""

    def link_segs(self, room: int) -> list[Seg]:
        """Return link state and age for a title line that has `room` cells for them."""
        return link_segs(self.link(), room)

    def state_segs(self) -> list[Seg]:
        """Return the engine's state for a title line; nothing while it serves without a fault."""
        return state_segs(self.shown.snapshot, self.link())

    def fault_segs(self, room: int) -> list[Seg]:
        """Return the fault for a title line that has `room` cells for it."""
        return fault_segs(self.shown.snapshot, self.link(), room)

    def verbs_off(self) -> str:
        """Return why no verb is possible now; empty if verbs are possible."""
        return why_no_verbs(self.state, self._clock())

    def refusal(self, name: str, label: str = "") -> str:
        """Return why the verb `name` is not possible now, with its `label` or name; empty if it is possible."""
        label, least, role = label or name, ROWS[name].role, self.state.role
        if why := self.verbs_off():
            return f"{label}: {why}"
        return "" if covers(role, least) else f"you are {role} here; {label} needs {least}"

    def role(self) -> Role | None:
        """Return the role with which verbs are possible now; None: none is."""
        return None if self.verbs_off() else self.state.role

    # --- changing the view --------------------------------------------------------------------------------------

    def toggle_freeze(self) -> None:
        """Freeze the display while figures still arrive, or thaw it."""
        self._frozen = None if self._frozen is not None else self.state
        self._frozen_at = self._clock()
        self._frozen_trends = self.trends.copy() if self._frozen is not None else self.trends

    def set_filter(self, text: str) -> None:
        """Show only the requests that match `text`."""
        self.state = set_filter(self.state, text)

    def sort_by(self, column: str) -> None:
        """Sort by `column`, figures with the largest first; if it is the present one, reverse the order."""
        self.state = replace(self.state, order=self.state.order.by(column, FIELDS))

    def raise_level(self) -> None:
        """Show events of the next level and above; after errors alone, all of them."""
        at = LEVELS.index(self.state.level) + 1
        self.state = replace(self.state, level=LEVELS[at % len(LEVELS)])

    def scale_timeline(self, by: int) -> None:
        """Cover `by` steps more time with the timeline, or less if it is negative."""
        at = SPANS_MS.index(self.state.span_ms) + by
        self.state = replace(self.state, span_ms=SPANS_MS[max(0, min(at, len(SPANS_MS) - 1))])

    def reverse_sort(self) -> None:
        """Reverse the order."""
        self.state = replace(self.state, order=self.state.order.reversed())


def _arranged_as(state: ConsoleState, other: ConsoleState) -> ConsoleState:
    """Return `state` with filter, order, level of events and the timeline's scale of another."""
    return replace(
        state, filter=other.filter, wanted=other.wanted, filter_error=other.filter_error,
        order=other.order, span_ms=other.span_ms, level=other.level,
    )  # fmt: skip


def _alarm(state: ConsoleState) -> tuple[object, ...]:
    """Return the engine's state and its verdicts: a change of these is painted at once."""
    snapshot = state.snapshot
    if snapshot is None:
        return ()
    return (snapshot.engine.state, *((verdict.stage, verdict.cause) for verdict in snapshot.verdicts))
