"""Commands whose effect takes time: their author, progress and one outcome."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ppengine.protocol.control import Accepted, Command, Conflict, Deferred, ErrorCode, Outcome, Refused, Reply
from ppengine.protocol.snapshot import Event, OperationInfo
from ppengine.protocol.verbs import label_of

KEEP_SECONDS = 10.0
"""Seconds for which an ended operation stays in the reports."""

DEFER_SECONDS = 0.2
"""Least seconds between two answers about one operation; a shrink may make progress a thousand times."""

State = Literal["accepted", "deferred", "applied", "failed", "superseded"]


@dataclass(slots=True)
class Operation:
    """One accepted command. `client` is the routing id on `front` that gets the outcome."""

    id: str
    command: Command
    client: bytes
    verb: str
    target: str | None
    """Object of the verb for display: a request, a stage, a mode."""
    request: str | None = None
    state: State = "accepted"
    progress: str = ""
    ended: float | None = None
    deferred: float | None = None
    """Time of the newest progress message to its client, in seconds of the clock."""
    notified: str = ""
    """Text of that message."""


class Operations:
    """Opens, defers and ends operations, and notifies client and event log."""

    def __init__(
        self, reply: Callable[[bytes, Reply], None], happened: Callable[[Event], None], clock: Callable[[], float]
    ) -> None:
        self._reply = reply
        self._happened = happened
        self._clock = clock
        self._count = 0
        self._live: dict[str, Operation] = {}
        self._opened: list[Operation] = []
        """Operations since the last call of `take_opened`."""
        self._ended: list[tuple[float, OperationInfo]] = []
        """Reports of those that have ended, without their commands, which may be long; the time of each end."""

    def open(self, command: Command, client: bytes, target: str | None, *, request: str | None = None) -> Operation:
        """Accept a command: it gets an id and, later, one outcome."""
        self._count += 1
        operation = Operation(f"op-{self._count}", command, client, label_of(command.verb), target, request)
        self._live[operation.id] = operation
        self._opened.append(operation)
        self._reply(client, Accepted(id=command.id, op=operation.id, request=request))
        return operation

    def reopen(self, name: str, command: Command, client: bytes) -> Operation:
        """Return the operation of a command that a core before this one has accepted."""
        operation = Operation(name, command, client, label_of(command.verb), None)
        self._live[name] = operation
        return operation

    def take_opened(self) -> list[Operation]:
        """Return the operations that were opened since the last call and have no end."""
        opened, self._opened = self._opened, []
        return [operation for operation in opened if operation.ended is None]

    @property
    def count(self) -> int:
        """Number of operations so far."""
        return self._count

    def restart(self, count: int) -> None:
        """Number operations from `count` on: those before are of a core before this one."""
        self._count = count

    def defer(self, operation: Operation, text: str) -> None:
        """Note why an accepted command waits: each time for reports, now and then for its client."""
        if operation.ended is not None:
            return
        operation.state, operation.progress = "deferred", text
        now = self._clock()
        if operation.notified == text or (operation.deferred is not None and now - operation.deferred < DEFER_SECONDS):
            return
        operation.deferred, operation.notified = now, text
        self._reply(operation.client, Deferred(id=operation.command.id, op=operation.id, text=text))

    def end(
        self,
        operation: Operation,
        state: Literal["applied", "failed", "superseded"],
        text: str,
        *,
        step: int | None = None,
        revision: int | None = None,
        figures: dict[str, float] | None = None,
        request: str | None = None,
        plan: list[str] | None = None,
        conflicts: list[Conflict] | None = None,
    ) -> None:
        """Give an operation its outcome."""
        if not self._close(operation, state, text):
            return
        command = operation.command
        self._reply(
            operation.client,
            Outcome(
                id=command.id, op=operation.id, state=state, text=text, step=step, revision=revision,
                figures=figures or {}, request=request, plan=plan or [],
                conflicts=conflicts or [],
            ),
        )  # fmt: skip
        detail = f"{operation.verb} {operation.target or ''}".strip()
        reason = f" ({command.reason})" if command.reason else ""
        self._happened(
            Event(
                seq=0, wall=time.time(), kind=f"op.{state}", text=f"{detail}: {text}{reason}", by=command.by,
                stage=getattr(command.verb, "stage", None), request=request or operation.request, step=step,
                op=operation.id,
            )
        )  # fmt: skip

    def refuse(self, operation: Operation, code: ErrorCode, text: str) -> None:
        """End an operation that was accepted and turns out to be impossible: it had no effect."""
        if self._close(operation, "failed", text):
            self._reply(operation.client, Refused(id=operation.command.id, code=code, text=text))

    def _close(self, operation: Operation, state: State, text: str) -> bool:
        """Note the end of an operation; return whether it had none."""
        if self._live.pop(operation.id, None) is None:
            return False
        operation.state, operation.progress, operation.ended = state, text, self._clock()
        self._ended.append((operation.ended, _info(operation)))
        return True

    def infos(self) -> list[OperationInfo]:
        """Return the live operations and those that ended within `KEEP_SECONDS`."""
        horizon = self._clock() - KEEP_SECONDS
        self._ended = [one for one in self._ended if one[0] > horizon]
        return [*map(_info, self._live.values()), *(info for _, info in self._ended)]

    @property
    def live(self) -> list[Operation]:
        """Operations without an outcome."""
        return list(self._live.values())


def _info(operation: Operation) -> OperationInfo:
    return OperationInfo(
        id=operation.id, verb=f"{operation.verb} {operation.target or ''}".strip(), by=operation.command.by,
        state=operation.state, progress=operation.progress,
    )  # fmt: skip
