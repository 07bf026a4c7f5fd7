"""A source in memory for the tests of the console: records commands, answers from what a test sets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import snapshots
from ppconsole.link.source import QueryFailed
from ppengine.protocol.control import Accepted, Fetched, Outcome, Refused
from ppengine.protocol.inspection import AuditDetail, FindingsDetail, FinishedDetail
from ppengine.protocol.recording import LinkState
from ppengine.protocol.snapshot import Snapshot

PLAN = ("free 45 blocks of 812", "held until released")


class FakeSource:
    """Delivers `picture` when it starts. `answers` holds outcomes or exceptions by verb name, for dry runs `plans`."""

    def __init__(self, picture: Snapshot | None, *, live: bool = True) -> None:
        self.live = live
        self.picture = picture
        self.commands: list[tuple[Any, dict[str, Any]]] = []
        self.inspected: list[str] = []
        self.details: dict[str, Any] = {}
        """Answers of `inspect` by what is asked for, before those made from the picture."""
        self.answers: dict[str, Any] = {}
        self.plans: dict[str, Any] = {}
        self.output = "The stage then hands its hidden states on."
        self.closed = False
        self.release: asyncio.Event | None = None
        self.starts = 0
        self.fail_starts = 0
        self._update: Callable[[Any], None] = lambda update: None

    async def start(self, on_update: Callable[[Any], None]) -> None:
        self.starts += 1
        if self.starts <= self.fail_starts:
            raise RuntimeError("boom [red]x[/red]")
        self._update = on_update
        if self.picture is not None:
            self.send(LinkState(state="live", age_s=0.0), self.picture, *snapshots.events())

    def send(self, *updates: Any) -> None:
        """Deliver updates as the link would."""
        for update in updates:
            if isinstance(update, Snapshot):
                self.picture = update
            self._update(update)

    async def command(self, verb: Any, **options: Any) -> Outcome | Refused:
        now = self.picture.engine.epoch if self.picture is not None else ""
        if options.get("epoch") not in (None, now):
            return Refused(id="1", code="STALE_EPOCH", text=f"the engine was restarted: {now} runs")
        self.commands.append((verb, options))
        name = verb.__struct_config__.tag
        if options.get("dry_run"):
            planned = Outcome(
                id="1", op="o1", state="planned", text="would be done", plan=list(PLAN), figures={"free": 45.0}
            )
            answer = self.plans.get(name, planned)
        else:
            progress = options.get("on_progress")
            if progress is not None:
                progress(Accepted(id="1", op="o1", request="r-new" if name == "submit" else None))
            answer = self.answers.get(name, Outcome(id="1", op="o1", state="applied", text="done", step=18413))
        await asyncio.sleep(0)
        if self.release is not None and not options.get("dry_run"):
            await self.release.wait()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def fetch(
        self, request: str, *, offset: int = 0, text_offset: int = 0, sample: int = 0, wait_ms: int = 1000
    ) -> Fetched:
        """Three words at a time."""
        await asyncio.sleep(0.01)
        words = self.output.split(" ")
        piece = words[offset : offset + 3]
        text = "".join(" " * (offset + index > 0) + word for index, word in enumerate(piece))
        ended = offset + 3 >= len(words)
        return Fetched(
            nonce=0, request=request, sample=0, offset=offset, token_ids=list(range(len(piece))), text=text,
            text_offset=text_offset, finished=ended, finish_reason="stop" if ended else None,
        )  # fmt: skip

    async def inspect(self, what: str, *, request: str | None = None, cells: int = 1024, **_: Any) -> Any:
        self.inspected.append(what)
        picture = self.picture
        if what in self.details:
            detail = self.details[what]
            if isinstance(detail, Exception):
                raise detail
            return detail
        if what == "fault":
            raise QueryFailed("NOT_FOUND", "this engine has had no fault yet")
        if picture is None:
            raise QueryFailed("NO_CORE", "no core")
        if what == "request":
            found = [each for each in picture.requests if each.id == request]
            if not found:
                raise QueryFailed("NOT_FOUND", f"no request {request}")
            return snapshots.detail(found[0])
        made = {
            "stacks": snapshots.stacks, "logs": snapshots.logs,
            "blocks": lambda: snapshots.blocks(picture, cells=cells, request=request),
            "rings": lambda: snapshots.rings(len(picture.stages), None),
            "finished": lambda: FinishedDetail(requests=[]),
            "findings": lambda: FindingsDetail(findings=[]),
            "audit": lambda: AuditDetail(lines=['{"verb":"pause"}']),
            "ledger": snapshots.ledger, "about": snapshots.about,
        }  # fmt: skip
        return made[what]()

    async def close(self) -> None:
        self.closed = True

    def acted(self) -> list[Any]:
        """Verbs that were sent for real."""
        return [verb for verb, options in self.commands if not options.get("dry_run")]
