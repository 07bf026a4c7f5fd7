"""A source before an engine was chosen: nothing comes from it, and nothing can be asked of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from ppengine.protocol.recording import Update

from ppconsole.link.source import LinkLost

_TEXT = "no engine is chosen"


class Unattached:
    """Delivers nothing. It counts as live, so that a console without an engine is no replay."""

    live = True

    async def start(self, on_update: Callable[[Update], None]) -> None:
        """Begin to deliver nothing."""

    async def command(self, verb: Any, **options: Any) -> NoReturn:
        """Refuse: there is no engine."""
        raise LinkLost(_TEXT, sent=False)

    async def fetch(self, request: str, **options: Any) -> NoReturn:
        """Refuse: there is no engine."""
        raise LinkLost(_TEXT, sent=False)

    async def inspect(self, what: Any, **options: Any) -> NoReturn:
        """Refuse: there is no engine."""
        raise LinkLost(_TEXT, sent=False)

    async def close(self) -> None:
        """Close nothing."""
