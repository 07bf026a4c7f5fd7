"""Interface of an executor: the stages of one engine, on any host."""

from __future__ import annotations

from typing import Protocol

from ppengine.common.config import EngineConfig
from ppengine.protocol.place import Place
from ppengine.protocol.reports import ProcessInfo


class ExecutorError(Exception):
    """The stages cannot be started at all; one line with the missing part and the remedy."""


class Executor(Protocol):
    """Starts one process a place (stage and rank) and reports each. Used from the main thread alone."""

    def start(self, config: EngineConfig) -> None:
        """Start every stage without waiting for any. Raises ExecutorError."""

    def resume(self, config: EngineConfig) -> None:
        """Prepare to start stages when the core orders them, in an engine whose supervisor was killed.

        `poll` returns them with generation 0 until then. Raises ExecutorError, OSError.
        """

    def poll(self) -> list[ProcessInfo]:
        """Return all stages in order, as far as they are known; those that ended have an exit code. Never blocks."""

    def restart(self, place: Place, generation: int) -> None:
        """End the rest of a place's process and start another for `generation`, without waiting for it.

        If that fails, `poll` returns a process that has ended, with the reason.
        """

    def stop(self, timeout: float) -> None:
        """Give the stages, which are leaving, `timeout` seconds; kill the rest and release all."""
