"""One interface to a live engine and to a recording, for the console and the CLI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypedDict, Unpack

from ppengine.protocol.control import Accepted, Deferred, ErrorCode, Fetched, InspectWhat, Outcome, Refused
from ppengine.protocol.inspection import (
    AboutDetail,
    AuditDetail,
    BlocksDetail,
    FaultDetail,
    FaultsDetail,
    FindingsDetail,
    FinishedDetail,
    LedgerDetail,
    LogsDetail,
    RequestDetail,
    RingsDetail,
    StacksDetail,
)
from ppengine.protocol.recording import Update
from ppengine.protocol.verbs import Verb

from ppconsole.link.kept_requests import KeptRequest

Detail = (
    RequestDetail | StacksDetail | LogsDetail | BlocksDetail | RingsDetail | FaultDetail | FindingsDetail | AuditDetail
    | AboutDetail | LedgerDetail | FaultsDetail | FinishedDetail | KeptRequest
)  # fmt: skip


class CommandOptions(TypedDict, total=False):
    """Options of a command besides its verb; `Command` has the defaults, and says what they mean."""

    ttl_ms: int
    if_rev: int | None
    dry_run: bool
    reason: str
    override: bool


class InspectOptions(TypedDict, total=False):
    """Options of an inspection besides `what`; `Inspect` has the defaults."""

    request: str | None
    stage: int | None
    lines: int
    cells: int
    core: bool


DETAILS: dict[InspectWhat, type[Detail]] = {
    "request": RequestDetail, "stacks": StacksDetail, "logs": LogsDetail, "blocks": BlocksDetail, "rings": RingsDetail,
    "fault": FaultDetail, "findings": FindingsDetail, "audit": AuditDetail, "about": AboutDetail,
    "ledger": LedgerDetail, "faults": FaultsDetail, "finished": FinishedDetail,
}  # fmt: skip
"""Types of the answers to `Inspect`."""
Progress = Callable[[Accepted | Deferred], None]


class LinkLost(Exception):
    """The answer will never be known. `sent` False: it never left, so nothing happened; else the outcome is unknown."""

    def __init__(self, text: str, *, sent: bool) -> None:
        super().__init__(text)
        self.sent = sent


class AccessDenied(LinkLost):
    """The engine does not allow the key of this console. The text has the command that allows it."""

    def __init__(self, text: str) -> None:
        super().__init__(text, sent=False)


class QueryFailed(Exception):
    """A fetch or an inspection that the engine answered with an error."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code

    @property
    def passing(self) -> bool:
        """Whether the same question may have an answer later: the process that knows it is stopped, away or busy."""
        return self.code in ("EXPIRED", "NO_CORE", "RATE_LIMITED")


class Source(Protocol):
    """A stream of updates, and, where `live`, a way to act.

    Use it inside one asyncio loop. Updates arrive in order by `on_update`, which must not block.
    """

    @property
    def live(self) -> bool:
        """Whether this is an engine at all, so that verbs are possible (not: whether the link is up now)."""
        ...

    async def start(self, on_update: Callable[[Update], None]) -> None:
        """Begin to deliver updates; returns at once."""
        ...

    async def command(
        self,
        verb: Verb,
        *,
        epoch: str | None = None,
        on_progress: Progress | None = None,
        timeout: float | None = None,
        **options: Unpack[CommandOptions],
    ) -> Outcome | Refused:
        """Ask for an effect and wait for its one end. Raises LinkLost when that end will never be known.

        `epoch`: the one that the operator saw. In another one nothing is sent and the answer is STALE_EPOCH.
        `timeout`: seconds to wait for the end.
        """
        ...

    async def fetch(
        self, request: str, *, offset: int = 0, text_offset: int = 0, sample: int = 0, wait_ms: int = 1000
    ) -> Fetched:
        """Return output from token `offset` and character `text_offset` on. Raises LinkLost, QueryFailed."""
        ...

    async def inspect(self, what: InspectWhat, **options: Unpack[InspectOptions]) -> Detail:
        """Return the detail that `what` names. Raises LinkLost, QueryFailed."""
        ...

    async def close(self) -> None:
        """Stop delivering and free everything; the engine is not touched."""
        ...
