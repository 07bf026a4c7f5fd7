"""The selected request and stage of the main screen, the marks, and which of the two tables has the focus."""

from __future__ import annotations

from collections.abc import Sequence

from ppengine.protocol.snapshot import RequestInfo

from ppconsole.model.ranks import several
from ppconsole.view import board, stage_rows
from ppconsole.view.cursor import Cursor
from ppconsole.view.display import DisplayModel
from ppconsole.view.frame import Frame, frame
from ppconsole.view.marked import Marked
from ppconsole.view.stage_rows import RowKey

SURPRISE_S = 2.0
"""Seconds after the end of the selected request in which a key may have been meant for it."""


class Selection:
    """A cursor a table. `frame`: the sizes at the last paint, which decide which stages have a row."""

    def __init__(self, model: DisplayModel) -> None:
        self.requests: Cursor[str] = Cursor()
        self.stages: Cursor[RowKey] = Cursor()
        self.opened: frozenset[int] = stage_rows.NONE_OPENED
        """Stages with a row a rank."""
        self.marked = Marked()
        self.on_stages = False
        self.frame: Frame = frame(80, 24, 1, False)
        self._model = model
        self._at_top = False
        """Whether the first rows are in view and not the selected one: after a sort, while requests are marked."""
        self._noted: str | None = None
        """The lost request that was seen last, since `_noted_at`."""
        self._noted_at = 0.0

    def forget(self) -> None:
        """Go back to the first rows, without marks."""
        self.requests.forget()
        self.stages.forget()
        self.opened = stage_rows.NONE_OPENED
        self.marked.clear()

    def request(self) -> str | None:
        """Return the selected request; None if it is gone, there is none, or the table is hidden."""
        if not self.frame.requests:
            return None
        return self._sync(self._model.arranged())

    def surprise(self) -> str:
        """Return, once, the selected request that has just ended, so that another one took its place; else nothing."""
        lost = self._noted if self._model.now() - self._noted_at < SURPRISE_S else None
        self._noted_at = -SURPRISE_S
        return lost or ""

    def _sync(self, arranged: Sequence[RequestInfo]) -> str | None:
        """Find the selected request again, and note when it is lost."""
        found = self.requests.sync(*_ids(arranged))
        if self.requests.lost != self._noted:
            self._noted, self._noted_at = self.requests.lost, self._model.now()
        return found

    def marked_ids(self) -> tuple[str, ...]:
        """Return the marked requests that are live now, even if the display is frozen."""
        return self.marked.sync(self._model.state.snapshot)

    def toggle_marks(self, ids: Sequence[str]) -> bool:
        """Mark those of `ids` that are live now; where all are marked, unmark them. Return whether any is live."""
        snapshot = self._model.state.snapshot
        known = {request.id for request in snapshot.requests if request.state != "finished"} if snapshot else set()
        live = [each for each in ids if each in known]
        self.marked.toggle(live)
        return bool(live)

    def stage_row(self) -> RowKey | None:
        """Return the selected row of a stage, or of a rank of it; None if there is none."""
        return self.stages.sync(self._stage_keys())

    def focused_row(self) -> RowKey | None:
        """Return the selected row of a stage while the stages have the focus."""
        return self.stage_row() if self.on_stages else None

    def stage(self) -> int | None:
        """Return the selected stage; None if it has no row."""
        row = self.stage_row()
        return None if row is None else row.stage

    def focused_stage(self) -> int | None:
        """Return the selected stage while the stages have the focus."""
        return self.stage() if self.on_stages else None

    def has_ranks(self) -> bool:
        """Return whether a stage has several ranks, which have rows of their own when it is opened."""
        snapshot = self._model.shown.snapshot
        return snapshot is not None and several(snapshot)

    def toggle_ranks(self) -> None:
        """Open the selected stage into its ranks, or fold them; without the focus on stages, open or fold all.

        The rank whose state the folded row had is selected.
        """
        row, snapshot = self.focused_row(), self._model.shown.snapshot
        every = frozenset() if snapshot is None else frozenset(stage.index for stage in snapshot.stages)
        if row is None:
            self.opened = stage_rows.NONE_OPENED if self.opened else every
        elif row.stage in self.opened:
            self.opened -= {row.stage}
            self.stages.choose(RowKey(row.stage))
        else:
            worst = [each.info for each in self._stage_rows() if each.key == row]
            self.opened |= {row.stage}
            self.stages.choose(RowKey(row.stage, worst[0].tensor_rank if worst else 0))

    def move(self, by: int) -> None:
        """Move in the table that has the focus."""
        self.marked.lost = self._at_top = False
        if self.on_stages:
            self.stages.move(self._stage_keys(), by)
        else:
            self._move_request(by)

    def move_to_next_live(self) -> None:
        """Select the next request, unless it has ended."""
        self._at_top = False
        ids, live = _ids(self._model.arranged())
        self.requests.move(ids[:live], 1)

    def begin_order(self) -> None:
        """Show the first rows of a new order. The first one is selected, unless requests are marked."""
        self._at_top = bool(self.marked_ids())
        if not self._at_top:
            self.requests.forget()
            self._move_request(0)

    def _move_request(self, by: int) -> None:
        ids, live = _ids(self._model.arranged())
        self.requests.move(ids, by, live)

    def picked(self, arranged: Sequence[RequestInfo], followed: str | None) -> board.Picked:
        """Anchor both cursors again; return what they select. After a sort the selected request may be out of view."""
        request = self._sync(arranged) if self.frame.requests else None
        self.on_stages = self.frame.stages > 0 and (self.on_stages or not self.frame.requests)
        marked = self.marked_ids()
        self._at_top = self._at_top and bool(marked)
        if self._at_top:
            self.requests.top = 0
        else:
            self.requests.window(len(arranged), self.frame.requests)
        top = self.requests.top
        return board.Picked(request, self.stage_row(), self.on_stages, followed, top, marked, self.opened)

    def _stage_rows(self) -> list[stage_rows.StageRow]:
        return board.shown_stages(self._model.shown, self.frame, self.opened)

    def _stage_keys(self) -> list[RowKey]:
        return [each.key for each in self._stage_rows()]


def _ids(arranged: Sequence[RequestInfo]) -> tuple[list[str], int]:
    """Return the ids of requests, and how many of these are live: the others are the last ones."""
    return [request.id for request in arranged], sum(request.state != "finished" for request in arranged)
