"""Commands whose effect takes time: who asked, how far it is, and the one outcome that ends it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from ppengine.protocol.control import Accepted, Command, Deferred, Outcome, Refused
from ppengine.protocol.snapshot import Event, OperationInfo
from ppengine.protocol.verbs import name_of

KEEP_SECONDS = 10.0
"""How long an ended operation stays in the reports."""

DEFER_SECONDS = 0.2
"""Least time between two answers about one operation: a shrink that moves a thousand blocks has as many to tell."""

Reply = Accepted | Deferred | Outcome | Refused
State = Literal["accepted", "deferred", "applied", "failed", "superseded"]


@dataclass(slots=True)
class Operation:
    """One accepted command. `client` is the routing id on `front` that gets the outcome; empty: nobody."""

    id: str
    command: Command
    client: bytes
    verb: str
    target: str | None
    """What the verb is about, as it is shown: a request, a stage, a mode."""
    request: str | None = None
    state: State = "accepted"
    progress: str = ""
    begun: float = field(default_factory=time.monotonic)
    ended: float | None = None
    deferred: float | None = None
    """When its client was told of progress last."""
    told: str = ""
    """What its client was told then."""


class Operations:
    """Opens, defers and ends operations, and tells client and event log about each turn."""

    def __init__(self, reply: Callable[[bytes, Reply], None], happened: Callable[[Event], None]) -> None:
        self._reply = reply
        self._happened = happened
        self._count = 0
        self._live: dict[str, Operation] = {}
        self._ended: list[Operation] = []

    def open(self, command: Command, client: bytes, target: str | None, *, request: str | None = None) -> Operation:
        """Accept a command: it now has an id, and will have one outcome."""
        self._count += 1
        operation = Operation(f"op-{self._count}", command, client, name_of(command.verb), target, request)
        self._live[operation.id] = operation
        self._reply(client, Accepted(id=command.id, op=operation.id, request=request))
        return operation

    def defer(self, operation: Operation, text: str) -> None:
        """Say why an accepted command has not had its effect yet: in reports always, to its client now and then."""
        if operation.ended is not None:
            return
        operation.state, operation.progress = "deferred", text
        now = time.monotonic()
        if operation.told == text or (operation.deferred is not None and now - operation.deferred < DEFER_SECONDS):
            return
        operation.deferred, operation.told = now, text
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
    ) -> None:
        """Give an operation its outcome."""
        if self._live.pop(operation.id, None) is None:
            return
        operation.state, operation.progress, operation.ended = state, text, time.monotonic()
        self._ended.append(operation)
        command = operation.command
        self._reply(
            operation.client,
            Outcome(
                id=command.id, op=operation.id, state=state, text=text, step=step, revision=revision,
                figures=figures or {}, request=request, plan=plan or [],
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

    def infos(self) -> list[OperationInfo]:
        """Return the live operations and those that ended a moment ago."""
        horizon = time.monotonic() - KEEP_SECONDS
        self._ended = [operation for operation in self._ended if (operation.ended or 0.0) > horizon]
        return [
            OperationInfo(
                id=operation.id,
                verb=f"{operation.verb} {operation.target or ''}".strip(),
                by=operation.command.by,
                state=operation.state,
                progress=operation.progress,
            )
            for operation in [*self._live.values(), *self._ended]
        ]

    @property
    def live(self) -> list[Operation]:
        """Operations without an outcome."""
        return list(self._live.values())
