"""A step that was launched: the completions and calls that must come before it is retired."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ppengine.protocol.steps import Retired


class Completion(Protocol):
    """A piece of a device's work; a step on a CPU has none."""

    def done(self) -> bool:
        """Return whether it is done; does not wait."""

    def synchronize(self) -> None:
        """Wait for it in the calling thread."""


class Pending:
    """The acknowledgement of one step, complete once all its completions are done and its ends are carried out."""

    def __init__(self, retired: Retired) -> None:
        self.retired = retired
        self._waits: list[Completion] = []
        self._ends: list[Callable[[], None]] = []

    def until(self, completion: Completion) -> None:
        """Do not retire the step before `completion`."""
        self._waits.append(completion)

    def finally_do(self, end: Callable[[], None]) -> None:
        """Call `end` when all is done, before the step is retired."""
        self._ends.append(end)

    @property
    def done(self) -> bool:
        """Whether `finish` would not wait for the device."""
        return all(completion.done() for completion in self._waits)

    def finish(self) -> Retired:
        """Wait for the device, carry out the ends in order, and return the acknowledgement."""
        for completion in self._waits:
            completion.synchronize()
        for end in self._ends:
            end()
        return self.retired
