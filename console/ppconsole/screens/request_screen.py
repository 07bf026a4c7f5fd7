"""The detail of one request."""

from __future__ import annotations

import time
from functools import partial
from typing import ClassVar

from ppengine.protocol.finished import FinishedInfo
from ppengine.protocol.inspection import RequestDetail
from ppengine.protocol.snapshot import RequestInfo
from textual.binding import Binding, BindingType

from ppconsole.link.finished_search import find_ended, meant
from ppconsole.link.kept_requests import KeptRequest
from ppconsole.link.source import QueryFailed
from ppconsole.model.request_names import AmbiguousError, means
from ppconsole.model.safe import clean
from ppconsole.screens.console import Console, Selected
from ppconsole.screens.line_screen import verb_keys
from ppconsole.screens.reader import Reader
from ppconsole.view import drilldown, kept_request
from ppconsole.view.cells import Row
from ppconsole.view.keys import ENDED_REQUEST_KEYS, REQUEST_SCREEN_KEYS, Key


class RequestScreen(Reader):
    """One request in full, fetched once a second."""

    topic: ClassVar[str] = "request"
    every_s: ClassVar[float] = 1.0
    follows_position: ClassVar[bool] = True
    keys: ClassVar[tuple[Key, ...]] = REQUEST_SCREEN_KEYS
    BINDINGS: ClassVar[list[BindingType]] = [
        *verb_keys("request", "memory", "engine"),
        Binding("Y", "copy_answer", "copy the answer", show=False),
    ]

    def __init__(self, console: Console, request: str, ended: FinishedInfo | None = None) -> None:
        """`ended`: the figures of its end, for one that the engine may have forgotten."""
        super().__init__(console)
        self.request = request
        self._ended, self._searched = ended, False
        self._lack = ""
        """The reason why nothing of an ended request was found; empty: something was, or it was not sought."""
        self._detail: RequestDetail | None = None
        self._kept: KeptRequest | None = None
        self._kept_at: float | None = None
        """The position in the past that `_kept` is of."""

    def heading(self) -> str:
        """Return the request's id."""
        return f"REQUEST {clean(self.request)}"

    def selected(self) -> Selected:
        """Return the request."""
        return Selected(request=self.request)

    def cli(self) -> str:
        """Return the verb that prints the same."""
        return f"show {self.request}"

    def shown_keys(self) -> tuple[Key, ...]:
        """Return the keys; of one that has ended without those of its verbs."""
        return ENDED_REQUEST_KEYS if self._has_ended() else self.keys

    def _has_ended(self) -> bool:
        """Return whether the request has ended, or the engine does not know it any more."""
        if self._ended is not None or (self._detail is not None and self._detail.state == "finished"):
            return True
        info = self._info()
        return bool(self.problem) if info is None else info.state == "finished"

    def _info(self) -> RequestInfo | None:
        snapshot = self.console.model.shown.snapshot
        return next((each for each in snapshot.requests if each.id == self.request), None) if snapshot else None

    def body(self, width: int) -> list[Row]:
        """Return everything that is known about the request; of one in the past, its last known state first."""
        if self._kept is not None:
            rows = kept_request.rows(self._kept, time.time(), width)
            return rows if self._detail is None else [*rows, *drilldown.request_rows(None, self._detail, "", width)]
        if self._ended is not None and (self._detail is None or self._detail.state != "finished"):
            return drilldown.finished_rows(self._ended, self.problem, width)  # a live one has taken its id
        return drilldown.request_rows(self._info(), self._detail, self.problem, width)

    async def load(self) -> None:
        """Fetch its detail; the kept record is read again only if the position in the past has moved."""
        at = self.loaded_at
        if self._kept is not None and at == self._kept_at:
            return
        self._kept = None
        try:
            answer = await self.console.source.inspect("request", request=self.request)
        except QueryFailed as error:
            if error.code != "NOT_FOUND" or self._ended is not None:
                raise
            if not self._searched:
                await self._search()
            raise QueryFailed(error.code, f"{error}{self._lack}") from None
        if isinstance(answer, KeptRequest):
            self._kept, self._kept_at = answer, at
        else:
            self._detail = answer if isinstance(answer, RequestDetail) else None

    async def _search(self) -> None:
        """Look for the figures of its end; it may be named by a part of its id. Raises LinkLost, QueryFailed."""
        snapshot = self.console.model.state.snapshot
        found = await find_ended(self.console.source, snapshot, partial(means, self.request))
        self._searched = True
        try:
            self._ended = meant(self.request, found.ended)
        except AmbiguousError as error:
            self._lack = f"; {error}"
            return
        if self._ended is not None:
            self.request = self._ended.id
        elif found.kept:
            self._lack = f"; {found.kept}"

    def action_copy_answer(self) -> None:
        """Copy the output so far."""
        if self._detail is None or not self._detail.output_text:
            self.console.report(f"{self.request} has no output yet", bad=True)
        else:
            self.console.copying.answer(self.request, self._detail.output_text)
