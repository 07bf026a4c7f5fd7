"""Results of the scheduler: actions, refusals, fences, notes, plans and reports of a resize."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from typing_extensions import override

from ppengine.common.sizes import size_text
from ppengine.protocol.control import ErrorCode

ActionState = Literal["pending", "applied", "failed", "superseded"]
FenceKind = Literal["abort", "finish", "recompute", "swap"]
PreemptMode = Literal["recompute", "swap"]


class DoesNotFit(Exception):
    """A request that can never run here. `text` is one line with the numbers and the limit."""

    def __init__(self, text: str, need: int, have: int) -> None:
        super().__init__(text)
        self.text, self.need, self.have = text, need, have


class Refused(Exception):
    """An action that cannot be done. `text` is one line with the numbers and an alternative."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


class Room(NamedTuple):
    """Blocks on host and device, and places among the running requests: needed, or free."""

    host: int = 0
    device: int = 0
    places: int = 0


@dataclass(slots=True, eq=False)
class ActionResult:
    """State of an action on a request. `step` is the step that had retired when it ended."""

    verb: str
    request: str
    state: ActionState
    text: str
    step: int | None = None


@dataclass(slots=True, eq=False)
class Fence:
    """Stops scheduling of a request; `kind` is applied when its last step has retired."""

    kind: FenceKind
    by: str
    """Action and author (`swap-out by eve`), or the cause (`memory pressure`)."""
    hold: bool = False
    reason: str = ""
    result: ActionResult | None = None
    host: list[int] = field(default_factory=list)
    """Host blocks reserved for a swap whose copies are in no step yet."""
    copying: bool = False
    """Whether copies to the host are in a step, for this fence or one that it superseded."""
    resize: bool = False
    """Whether a resize set it."""

    @property
    def final(self) -> bool:
        """Whether the request ends with it."""
        return self.kind in ("abort", "finish")


@dataclass(slots=True)
class SwapCopies:
    """Copies of blocks in one direction, since boot."""

    requests: int = 0
    blocks: int = 0
    seconds: float = 0.0
    """From the step that copies to its end, added up."""

    def add(self, blocks: int, seconds: float) -> None:
        """Count the copies of one request, or those of one step to or from the host cache."""
        self.requests += 1
        self.blocks += blocks
        self.seconds += seconds


@dataclass(frozen=True, slots=True)
class Note:
    """A change without an action. `kind`: `preempted`, `loaded` or `recompute`."""

    kind: str
    request: str
    text: str


@dataclass(slots=True)
class ResizeReport:
    """Outcome of a change of the number of device blocks, in blocks and requests."""

    before: int
    after: int
    cached_dropped: int = 0
    move: int = 0
    swap_requests: int = 0
    swap_blocks: int = 0
    recompute_requests: int = 0
    recompute_blocks: int = 0

    def figures(self) -> dict[str, float]:
        """Return the outcome in numbers, for a confirm dialog and the outcome of the command."""
        return {
            "cached_dropped": self.cached_dropped,
            "move": self.move,
            "swap_requests": self.swap_requests,
            "swap": self.swap_blocks,
            "recompute_requests": self.recompute_requests,
            "recompute": self.recompute_blocks,
        }

    def text(self) -> str:
        """Return the changes to live blocks in words; empty if there are none."""
        parts = (
            (self.move, f"moved {self.move}"),
            (self.swap_requests, f"swapped {self.swap_requests} requests ({self.swap_blocks} blocks)"),
            (
                self.recompute_requests,
                f"recomputed {self.recompute_requests} requests ({self.recompute_blocks} blocks)",
            ),
        )
        return "".join(f", {text}" for count, text in parts if count)


@dataclass(slots=True)
class ResizePlan(ResizeReport):
    """Expected outcome of a change."""

    free_tail: int = 0
    refused: str | None = None
    victims: list[tuple[str, PreemptMode]] = field(default_factory=list)

    @override
    def figures(self) -> dict[str, float]:
        before = {"blocks_before": self.before, "blocks_after": self.after, "free_tail": self.free_tail}
        # `super()` would look for the class that the decorator has replaced by one with slots.
        return before | ResizeReport.figures(self)

    def lines(self, block_bytes: int) -> list[str]:
        """Return the plan in words, the fate of requests before the rest. `block_bytes`: of one block in all stages."""
        more = self.after - self.before
        share = f" ({100 * more / self.before:+.1f} %, {'+' if more > 0 else ''}{size_text(more * block_bytes)})"
        lines = [f"KV {self.before} -> {self.after} blocks{share if more else ''}"]
        if self.after < self.before:
            modes = (
                ("swap", self.swap_requests, self.swap_blocks, "go to the host"),
                ("recompute", self.recompute_requests, self.recompute_blocks, "are computed again"),
            )
            named = [
                f"mode {mode}: {count} {'request' if count == 1 else 'requests'}, "
                f"{blocks} {'block' if blocks == 1 else 'blocks'} ({size_text(blocks * block_bytes)}) {fate}"
                for mode, count, blocks, fate in modes
                if count
            ]
            lines += named or ["no mode: every request keeps its blocks"]
            lines.append(f"free in the tail {self.free_tail}, cached dropped {self.cached_dropped}, move {self.move}")
        return lines
