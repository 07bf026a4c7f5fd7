"""The last hour of a live engine as a source, with the log lines of that time."""

from __future__ import annotations

from pathlib import Path

from ppengine.protocol.discovery import runtime_dir
from ppengine.protocol.kept_files import engine_folder, state_dir

from ppconsole.link.history import History, segments
from ppconsole.link.replay import ReplaySource


def no_history(engine: str, hour: LastHour) -> str:
    """Return why there is nothing to play of an engine, with the folder that was read."""
    if hour.copied:
        return f"no history of {engine} is kept on its host; its profile may have console.history_minutes: 0"
    return (
        f"no history of {engine} is in {state_dir()}; its profile may have console.history_minutes: 0, "
        "or it was started with another XDG_STATE_HOME"
    )


class LastHour(ReplaySource):
    """Begins at its end, and waits there."""

    kind = "last hour"

    def __init__(self, engine_id: str, copies: Path | None = None) -> None:
        """Read the kept recordings of an engine. `copies`: the folder of those of an engine on another host."""
        self.engine_id, self.copied = engine_id, copies is not None
        past = History.of_segments(segments([(copies or engine_folder(engine_id)) / "history"]))
        super().__init__(past, begin=past.end, paused=True)

    @property
    def log_folder(self) -> Path | None:
        """The run folder; once the engine has ended, its kept files. None: they are on another host."""
        if self.copied:
            return None
        run_dir = runtime_dir() / self.engine_id
        return run_dir if run_dir.is_dir() else engine_folder(self.engine_id)
