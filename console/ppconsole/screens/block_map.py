"""Fetching the block map of the main screen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ppengine.protocol.inspection import BlocksDetail

from ppconsole.link.source import LinkLost, QueryFailed
from ppconsole.screens.console import Console


class BlockMapFeed:
    """Fetches the map on request. One worker serves all fetches: starting one costs more than a fetch."""

    def __init__(self, console: Console, on_new_request: Callable[[], None]) -> None:
        self.blocks: BlocksDetail | None = None
        self._console = console
        self._on_new_request = on_new_request
        self._cells = 0
        self._request: str | None = None
        self._wanted = asyncio.Event()

    def fit(self, cells: int, request: str | None) -> bool:
        """Note the map's size in cells and the request that it lights; return whether that is another request."""
        changed = self._request != request
        self._cells, self._request = cells, request
        return changed and self.blocks is not None

    def fetch(self) -> None:
        """Fetch the map soon."""
        self._wanted.set()

    def start(self) -> None:
        """Start the worker, or restart it after a failure."""
        self._console.run_worker(self._run(), exit_on_error=False, name="block map")

    async def _run(self) -> None:
        while await self._wanted.wait():
            self._wanted.clear()
            before, request = self.blocks, self._request
            try:
                answer = await self._console.source.inspect("blocks", cells=max(1, self._cells), request=request)
            except (LinkLost, QueryFailed):
                self.blocks = None  # the map shows that there is none; the link's own state shows why
            else:
                self.blocks = answer if isinstance(answer, BlocksDetail) else None
            if before is not None and before.request != request:
                self._on_new_request()
