"""Effects of commands: forwarded to the core, done by the gateway, or by the fault desk."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Protocol

from ppengine.gateway.command_answers import Answers, EndNote
from ppengine.gateway.command_checks import refused
from ppengine.gateway.continue_stage import continue_stage
from ppengine.gateway.control_lease import ControlLease
from ppengine.gateway.kept_commands import Kept
from ppengine.gateway.text_desk import TextDesk, TextsAccess
from ppengine.protocol.control import Accepted, Command, Outcome, Refused, Reply
from ppengine.protocol.verbs import Continue


class EngineAccess(EndNote, TextsAccess, Protocol):
    """The parts of the gateway that the desk needs."""

    def core_away(self) -> str:
        """Return how the core ended that is being restarted; empty if none is."""

    def core_missing(self) -> str:
        """Return why the core cannot take a command; empty: it can."""

    def forward(self, command: Command) -> bool:
        """Send to the core; return whether it was taken."""

    def fault(self, command: Command) -> list[Accepted | Outcome | Refused]:
        """Begin a `Fault` or `ClearFaults`; return the answers so far."""

    def stage_processes(self, stage: int) -> dict[str, tuple[int, int]]:
        """Return (pid, start time) of the ranks of a stage, by their names."""

    def supervisor_pid(self) -> int | None:
        """Return the pid of the supervisor, which is this process's parent; None if that is not so."""


class Effects:
    """Begins commands that were checked and recorded."""

    def __init__(self, answers: Answers, engine: EngineAccess, lease: ControlLease, *, texts_absent: bool) -> None:
        """`texts_absent`: the engine has no tokenizer."""
        self._answers, self._engine, self._lease = answers, engine, lease
        self.texts = TextDesk(engine, answers, self.forward, absent=texts_absent)

    def begin(self, kept: Kept) -> None:
        """Begin a command where its row says."""
        command, row = kept.command, kept.row
        assert command is not None, "only a console's command is begun"
        if row.runs == "faults":
            for reply in self._engine.fault(command):
                self._answers.give(kept, reply)
            return
        if row.runs == "gateway":
            for answer in self._own(command, kept.op):
                self._answers.give(kept, answer)
            return
        self._answers.stopping = self._answers.stopping or kept.ends_engine
        self.forward(kept)

    def _own(self, command: Command, op: str) -> Iterator[Reply]:
        """Carry out a verb of the gateway itself."""
        if isinstance(command.verb, Continue):
            stage = command.verb.stage
            return continue_stage(command, op, stage, self._engine.stage_processes(stage))
        return self._lease.handle(command, op)

    def forward(self, kept: Kept) -> None:
        """Send a command to the core by token ids alone; while that is restarted, it waits."""
        command, away = kept.command, self._engine.core_away()
        assert command is not None, "only a console's command is sent"
        missing = away or self._engine.core_missing()
        if missing and kept.row.ends_engine:
            self._stop_without_core(kept, missing)
        elif missing and not away:
            self._answers.give(kept, refused(command, "NO_CORE", missing))
        elif self.texts.needs(kept):
            self.texts.begin(kept)
        elif away or not self._engine.forward(kept.encoded or command):
            kept.waits_since = time.monotonic()

    def _stop_without_core(self, kept: Kept, missing: str) -> None:
        command, op, pid = kept.command, kept.op, self._engine.supervisor_pid()
        assert command is not None, "only a console's command is begun"
        if pid is None:
            self._answers.give(kept, refused(command, "NO_CORE", f"{missing}; the supervisor is not known here"))
            return
        plan = [f"send SIGTERM to the supervisor, pid {pid} ({missing})"]
        if command.dry_run:
            self._answers.give(kept, Outcome(id=command.id, op=op, state="planned", text=plan[0], plan=plan))
            return
        self._answers.give(kept, Accepted(id=command.id, op=op, plan=plan))
        os.kill(pid, signal.SIGTERM)
        text = f"sent SIGTERM to the supervisor to stop the engine ({missing})"
        self._answers.give(kept, Outcome(id=command.id, op=op, state="applied", text=text))
