"""The last hour of a live engine as a source, with the log lines of that time."""

from __future__ import annotations

from pathlib import Path

from ppengine.protocol.discovery import runtime_dir
from ppengine.protocol.kept_files import engine_folder

from ppconsole.link.history import History, segments
from ppconsole.link.replay import ReplaySource


class LastHour(ReplaySource):
    """Begins at its end, and waits there."""

    kind = "last hour"

    def __init__(self, engine_id: str) -> None:
        """Read the kept recordings of an engine."""
        self.engine_id = engine_id
        past = History.of_segments(segments([engine_folder(engine_id) / "history"]))
        super().__init__(past, begin=past.end, paused=True)

    @property
    def log_folder(self) -> Path:
        """The run folder; once the engine has ended, its kept files."""
        run_dir = runtime_dir() / self.engine_id
        return run_dir if run_dir.is_dir() else engine_folder(self.engine_id)
