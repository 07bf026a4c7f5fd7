"""The grammar processes that compute masks: each output has its own one of them.

A process takes tokens into one matcher after the other. With 256 outputs a step that takes longer than their masks,
which all of its threads compute. So there are several where cores are many.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from ppengine.common.system_memory import keep_freed_memory
from ppengine.core.grammar_asks import Ask, Taken
from ppengine.core.grammar_process import GrammarProcess
from ppengine.protocol.reports import Unanswered
from ppengine.protocol.structured_outputs import Grammar

PROCESSES_MOST = 4
CORES = 8
"""Cores for each process."""
THREADS_MOST = 16
"""Threads that compute masks, of all processes together."""
NEAR = 16
"""Outputs that a process may have more than another one, to spare that one a compile."""
Make = Callable[[str, int], GrammarProcess]
"""Makes a process for a task, with a number of threads."""


@dataclass(eq=False)
class MaskProcesses:
    """Gives each output to a process: to one that has its grammar, unless others have far fewer outputs."""

    processes: list[GrammarProcess]
    _outputs: list[int] = field(init=False)
    """Number of outputs of each process."""
    _places: dict[int, int] = field(init=False, default_factory=dict)
    """Place of the process of each matcher."""

    def __post_init__(self) -> None:
        self._outputs = [0] * len(self.processes)

    def prepare(self) -> None:
        """Let them start before the first question."""
        keep_freed_memory()  # Their answers have up to 4 MiB, each step.
        for process in self.processes:
            process.prepare()

    def open(self, matcher: int, grammar: Grammar) -> bool:
        """Choose the process of an output, and have its grammar compiled there; return whether it probably is."""
        self._places[matcher] = place = self._place(grammar)
        process = self.processes[place]
        process.expect(grammar)
        return process.has(grammar)

    def ask(self, asks: list[Ask]) -> None:
        """Queue questions; `give` sends them."""
        parts: list[list[Ask]] = [[] for _ in self.processes]
        for ask in asks:
            parts[self._places[ask.matcher]].append(ask)
        for process, part in zip(self.processes, parts, strict=True):
            process.ask(part)

    def forget(self, matchers: list[int]) -> None:
        """Drop the matchers of outputs that have ended."""
        gone: list[list[int]] = [[] for _ in self.processes]
        for matcher in matchers:
            gone[self._places.pop(matcher)].append(matcher)
        for place, (process, part) in enumerate(zip(self.processes, gone, strict=True)):
            if part:
                self._outputs[place] -= len(part)
                process.forget(part)

    def _place(self, grammar: Grammar) -> int:
        """Return the place of the process for one more output, and count it there."""
        outputs = self._outputs
        place = outputs.index(min(outputs))
        has = [other for other, process in enumerate(self.processes) if process.has(grammar)]
        if has and outputs[nearest := min(has, key=outputs.__getitem__)] <= outputs[place] + NEAR:
            place = nearest
        outputs[place] += 1
        return place

    def take(self, name: bytes, message: object) -> list[Taken]:
        """Take a message of one of them; return the masks of outputs."""
        return [taken for process in self.processes for taken in process.take(name, message)]

    def take_malformed(self, name: bytes, fault: str) -> None:
        """End the one of them that has sent a message which cannot be decoded."""
        for process in self.processes:
            process.take_malformed(name, fault)

    @property
    def unanswered(self) -> list[Unanswered]:
        """Those for which an output has waited for some time."""
        return [late for process in self.processes if (late := process.unanswered) is not None]

    def advance(self) -> None:
        """Send what waits, and watch them."""
        for process in self.processes:
            process.advance()

    def give(self) -> None:
        """Send what waits."""
        for process in self.processes:
            process.give()

    def close(self) -> None:
        """End them."""
        for process in self.processes:
            process.close()


def make_processes(make: Make, cores: int | None = None) -> tuple[GrammarProcess, MaskProcesses]:
    """Return the process that checks grammars, and those for masks. `cores`: of the host, by default this one."""
    cores = cores or len(os.sched_getaffinity(0))
    threads, count = max(1, min(THREADS_MOST, cores // 2)), max(1, min(PROCESSES_MOST, cores // CORES))
    tasks = ["masks"] if count == 1 else [f"masks {number}" for number in range(1, count + 1)]
    return make("checks", threads), MaskProcesses([make(task, max(1, threads // count)) for task in tasks])
