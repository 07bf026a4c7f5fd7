"""The position in a past: moving, speed, a mark, and the figures since it."""

from __future__ import annotations

from collections.abc import Callable

from ppengine.protocol.snapshot import Snapshot

from ppconsole.link.replay import SPEEDS, ReplaySource
from ppconsole.model.state import ConsoleState
from ppconsole.model.units import count_text, wall_text
from ppconsole.view import figures
from ppconsole.view.cells import Seg
from ppconsole.view.changes import Moment

_SHORT_S = 180.0
"""A past that is shorter has its position in seconds."""


class Playback:
    """Moves a source for the display. `forget` drops the present picture, `paint` shows the new one."""

    def __init__(
        self, source: ReplaySource, forget: Callable[[], None], paint: Callable[[], None],
        shown: Callable[[], ConsoleState],
    ) -> None:  # fmt: skip
        self._source, self._shown = source, shown
        source.on_rewind, source.on_arrival = forget, paint
        self._mark: Moment | None = None
        self._moves: dict[str, Callable[[], None]] = {
            "back": lambda: self.move(-10.0), "on": lambda: self.move(10.0),
            "far-back": lambda: self.move(-60.0), "far-on": lambda: self.move(60.0), "jump": self.jump,
        }  # fmt: skip
        self._others: dict[str, Callable[[], None]] = {
            "pause": self.toggle_pause, "mark": self.mark,
            "slower": lambda: self._change_speed(-1), "faster": lambda: self._change_speed(1),
        }  # fmt: skip

    @property
    def position(self) -> float:
        """The moment in view, in Unix seconds."""
        return self._source.position

    @property
    def at_end(self) -> bool:
        """Whether nothing of the record is after the moment in view."""
        return self._source.position >= self._source.history.end

    def act(self, name: str) -> bool:
        """Do what a key is for; return whether it shows at once. A move shows when the other moment was read."""
        move = self._moves.get(name)
        (move or self._others[name])()
        return move is None

    def toggle_pause(self) -> None:
        """Pause, or go on."""
        self._source.set_paused(not self._source.paused)

    def move(self, seconds: float) -> None:
        """Go on or back."""
        self._source.seek(self._source.goal + seconds)

    def mark(self) -> None:
        """Mark this moment; at the mark, remove it."""
        here = self._here()
        self._mark = None if self._mark is not None and self._mark.wall == here.wall else here

    def jump(self) -> None:
        """Go to the mark, and mark the moment that is left."""
        if (there := self._mark) is not None:
            self._mark = self._here()
            self._source.set_paused(True)
            self._source.seek(there.wall)

    def interval(self) -> tuple[Moment, Moment] | None:
        """Return the mark and the moment in view; None without a mark, or at it."""
        here = self._here()
        return None if self._mark is None or self._mark.wall == here.wall else (self._mark, here)

    def _here(self) -> Moment:
        state = self._shown()
        return Moment(self._source.position, state.snapshot, state.events)

    def segs(self) -> list[Seg]:
        """Return position, length and speed, and the figures since the mark."""
        return [(self._position(), "info"), *self._since_mark()]

    def _change_speed(self, by: int) -> None:
        speeds = SPEEDS
        nearest = min(range(len(speeds)), key=lambda at: abs(speeds[at] - self._source.speed))
        self._source.set_speed(speeds[max(0, min(len(speeds) - 1, nearest + by))])

    def _position(self) -> str:
        past = self._source.history
        length, at = past.end - past.begin, self._source.position - past.begin
        unit, divisor = ("s", 1.0) if length < _SHORT_S else ("min", 60.0)
        clock = wall_text(self._source.position)
        pace = "paused" if self._source.paused else f"x{self._source.speed:g}"
        return f"REPLAY {clock} {at / divisor:.0f}/{length / divisor:.0f} {unit} {pace}"

    def _since_mark(self) -> list[Seg]:
        """Return how tokens a second, queue and KV blocks in use change from the earlier moment to the later one.

        As in the table of `e`, whichever of the two is the mark: `from` an earlier mark, `to` a later one. Each
        figure is a segment: a narrow row drops the last ones.
        """
        now, mark = self._shown().snapshot, self._mark
        if mark is None:
            return []
        clock, ahead = wall_text(mark.wall), mark.wall > self._source.position
        word = "to" if ahead else "from"
        if now is None or mark.snapshot is None:
            return [(f" {word} {clock}", "warn")]
        first, last = (now, mark.snapshot) if ahead else (mark.snapshot, now)
        before, after = _figures(first), _figures(last)
        parts = [(f" {name}{_signed(after[name], before[name])}", "warn") for name in after]
        return [(f" {word} {clock}", "warn"), *parts]


def _figures(snapshot: Snapshot) -> dict[str, float | None]:
    """Return the main figures: output tokens a second, requests that wait, KV blocks in use."""
    used = next((stage.kv_blocks.used for stage in snapshot.stages), None)
    return {"tok/s": snapshot.throughput.output_tok_s, "wait": snapshot.queues.waiting, "kv": used}


def _signed(after: float | None, before: float | None) -> str:
    if after is None or before is None:
        return "?"
    change = after - before
    text = figures.rate(abs(change)) if isinstance(change, float) else count_text(abs(change))
    return f"{'-' if change < 0 else '+'}{text}"
