"""The processes of an engine, for faults from outside."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

from ppengine.common.config import EngineConfig
from ppengine.drills.registry import FaultError, Undo, edge_of
from ppengine.protocol.place import Place

Pids = Callable[[str, int | None, int], int | None]
"""(role, stage, rank) to pid; None: no such process is known."""


@dataclass(frozen=True)
class Target:
    """The target of one fault. `stage` None: not a stage; `rank`: its tensor rank."""

    config: EngineConfig
    stage: int | None
    find: Pids
    rank: int = 0

    @property
    def pid(self) -> int:
        """Process of the stage. Raises FaultError if it is not known."""
        return self.role("stage", self.stage)

    @property
    def store(self) -> int:
        """Process of the store of the stage's place. Raises FaultError if it is not known."""
        assert self.stage is not None  # `Kind.check` ensures it
        return self.role(Place(self.stage, self.rank).store_role)

    @property
    def edge_pids(self) -> tuple[int, int]:
        """Processes at both ends of the stage's edge, which connects equal ranks."""
        assert self.stage is not None  # `Kind.check` ensures it
        ends = edge_of(self.stage, self.config.stages)
        return self.role("stage", ends[0]), self.role("stage", ends[1])

    def role(self, role: str, stage: int | None = None) -> int:
        """Return the process of a role. Raises FaultError if there is none on this host."""
        pid = self.find(role, stage, self.rank)
        if pid is None:
            name = role if stage is None else self.config.groups.text(Place(stage, self.rank))
            raise FaultError(f"no process of {name} runs on this host")
        return pid


def pause(pid: int) -> Undo:
    """Stop process `pid` by SIGSTOP; return the undoing."""
    os.kill(pid, signal.SIGSTOP)
    return lambda: os.kill(pid, signal.SIGCONT)
