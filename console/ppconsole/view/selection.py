"""The selected request and stage of the main screen, and which of the two tables has the focus."""

from __future__ import annotations

from collections.abc import Sequence

from ppengine.protocol.snapshot import RequestInfo

from ppconsole.view import board
from ppconsole.view.cursor import Cursor
from ppconsole.view.display import DisplayModel
from ppconsole.view.frame import Frame, frame


class Selection:
    """A cursor a table. `frame`: the sizes at the last paint, which decide which stages have a row."""

    def __init__(self, model: DisplayModel) -> None:
        self.requests: Cursor[str] = Cursor()
        self.stages: Cursor[int] = Cursor()
        self.on_stages = False
        self.frame: Frame = frame(80, 24, 1, False)
        self._model = model

    def forget(self) -> None:
        """Go back to the first rows."""
        self.requests.forget()
        self.stages.forget()

    def request(self) -> str | None:
        """Return the selected request; None if it is gone, there is none, or the table is hidden."""
        if not self.frame.requests:
            return None
        return self.requests.sync(self._request_ids())

    def stage(self) -> int | None:
        """Return the selected stage; None if it has no row."""
        return self.stages.sync(self._stage_ids())

    def focused_stage(self) -> int | None:
        """Return the selected stage while the stages have the focus."""
        return self.stage() if self.on_stages else None

    def move(self, by: int) -> None:
        """Move in the table that has the focus."""
        if self.on_stages:
            self.stages.move(self._stage_ids(), by)
        else:
            self.requests.move(self._request_ids(), by)

    def picked(self, arranged: Sequence[RequestInfo], followed: str | None) -> board.Picked:
        """Anchor both cursors again, with the selected request in view, and return what they select."""
        ids = [request.id for request in arranged]
        request = self.requests.sync(ids) if self.frame.requests else None
        self.on_stages = self.frame.stages > 0 and (self.on_stages or not self.frame.requests)
        top = self.requests.window(len(ids), self.frame.requests)
        return board.Picked(request, self.stage(), self.on_stages, followed, top)

    def _request_ids(self) -> list[str]:
        return [request.id for request in self._model.arranged()]

    def _stage_ids(self) -> list[int]:
        return [stage.index for stage in board.shown_stages(self._model.shown, self.frame)]
