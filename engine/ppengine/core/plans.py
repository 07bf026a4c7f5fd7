"""Plans: the answer of a verb's handler, before anything has an effect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ppengine.core.operations import Operation
from ppengine.protocol.control import Conflict, ErrorCode


class CommandError(Exception):
    """A command that has no effect, with its code and one line that says why."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


@dataclass(frozen=True, slots=True)
class Plan:
    """The effect that a command will have. `begin` starts it; a dry run ends before that."""

    lines: list[str]
    begin: Callable[[Operation], None]
    target: str | None = None
    """Target as operations show it: a request, a stage, a mode."""
    request: str | None = None
    revision: int | None = None
    """Revision that the plan is about, which `if_rev` guards."""
    figures: dict[str, float] = field(default_factory=dict)
    conflicts: list[Conflict] = field(default_factory=list)
    """Requests of a verb on several to which it does not apply."""
    owners: dict[str, int] = field(default_factory=dict)
    """Number of requests of other keys, by the name of the key."""
