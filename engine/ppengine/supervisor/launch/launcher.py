"""What the supervisor asks of an executor: the stages of one engine, wherever they run."""

from __future__ import annotations

from typing import Protocol

from ppengine.common.config import EngineConfig
from ppengine.protocol.reports import ProcessInfo


class ExecutorError(Exception):
    """The stages cannot be started at all. One line: what is missing, and what would be right."""


class Executor(Protocol):
    """Starts one process a stage and tells how each one fares. Used from the main thread alone."""

    def start(self, config: EngineConfig) -> None:
        """Start every stage without waiting for any. Raises ExecutorError."""

    def poll(self) -> list[ProcessInfo]:
        """Return all stages in order, as far as they are known; those that ended have an exit code. Never blocks."""

    def restart(self, stage: int, generation: int) -> None:
        """End what is left of a stage's process and start another for `generation`, without waiting for it.

        Where that fails, `poll` shows a stage that has ended, with the reason.
        """

    def stop(self, timeout: float) -> None:
        """Give the stages, which the core has told to leave, `timeout` seconds; kill the rest and let go of all."""
