"""The grammar processes that compute masks: each output has its own one of them.

A process takes tokens into one matcher after the other. With 256 outputs a step that takes longer than their masks,
which all of its threads compute. So there are several where cores are many.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

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
Make = Callable[[str, int], GrammarProcess]
"""Makes a process for a task, with a number of threads."""


@dataclass(eq=False)
class MaskProcesses:
    """Sends the questions of an output to one process."""

    processes: list[GrammarProcess]

    def prepare(self) -> None:
        """Let them start before the first question."""
        keep_freed_memory()  # Their answers have up to 4 MiB, each step.
        for process in self.processes:
            process.prepare()

    def ask(self, asks: list[Ask]) -> None:
        """Queue questions; `give` sends them."""
        count = len(self.processes)
        parts: list[list[Ask]] = [[] for _ in range(count)]
        for ask in asks:
            parts[ask.matcher % count].append(ask)
        for process, part in zip(self.processes, parts, strict=True):
            process.ask(part)

    def expect(self, matcher: int, grammar: Grammar) -> None:
        """Let the process of an output compile its grammar, if it is new there, before the first question."""
        self.processes[matcher % len(self.processes)].expect(grammar)

    def has(self, matcher: int, grammar: Grammar) -> bool:
        """Return whether the process of an output has its grammar, as far as is known here."""
        return self.processes[matcher % len(self.processes)].has(grammar)

    def forget(self, matchers: list[int]) -> None:
        """Drop the matchers of outputs that have ended."""
        count = len(self.processes)
        for place, process in enumerate(self.processes):
            if gone := [matcher for matcher in matchers if matcher % count == place]:
                process.forget(gone)

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
