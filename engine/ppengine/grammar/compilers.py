"""Threads that compile grammars, one after another each, and the compiles among them that take too long.

Large grammars have threads of their own: a small one takes a thousandth of their time, and does not wait for them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from llguidance import LLMatcher

from ppengine.grammar.matchers import GrammarError
from ppengine.protocol.grammar_messages import is_large
from ppengine.protocol.structured_outputs import Grammar

COMPILE_S = 5.0
"""Most seconds of CPU time for a compile: the largest schemas take one, and a crowded host takes none of it."""
COMPILE_WALL_S = 60.0
"""Most seconds for one on the clock: a thread that hangs takes no CPU time."""


@dataclass(frozen=True, slots=True)
class _Compile:
    """A compile under way."""

    grammar: Grammar
    clock: int
    """Clock of the CPU time of its thread."""
    cpu: float
    """Time of that clock when it began."""
    wall: float


class Compilers:
    """Takes grammars in, and gives matchers or reasons out. All methods belong to the main thread."""

    def __init__(self, compile_one: Callable[[Grammar], LLMatcher], count: int) -> None:
        """`compile_one` runs on `count` threads, and half as many for large grammars. It raises GrammarError."""
        self._compile_one = compile_one
        self._small, self._large = SimpleQueue[Grammar](), SimpleQueue[Grammar]()
        """Those that wait for a thread. An executor's future costs a tenth of a compile, with Python's lock held."""
        self._compiled: SimpleQueue[tuple[Grammar, LLMatcher | BaseException]] = SimpleQueue()
        self._under_way: dict[int, _Compile] = {}
        """By the identifier of the thread."""
        # A socket belongs to one thread, so the others wake this one by a pipe.
        self.wake, self._wake = os.pipe()
        """A descriptor that can be read when a compile has ended."""
        self._woken = False
        for queue in (*[self._small] * count, *[self._large] * max(1, count // 2)):
            threading.Thread(target=self._work, args=(queue,), daemon=True).start()

    def put(self, grammar: Grammar) -> None:
        """Have a grammar compiled."""
        (self._large if is_large(grammar) else self._small).put(grammar)

    def woken(self) -> None:
        """Empty `wake`. It comes before the look at `ready`: a thread that is done behind it wakes once more."""
        os.read(self.wake, 4096)
        self._woken = False

    @property
    def ready(self) -> bool:
        """Whether a compile has ended that was not taken."""
        return not self._compiled.empty()

    def take(self) -> tuple[Grammar, LLMatcher | GrammarError]:
        """Return the next one that is ready. Raises the exception of a compile that no grammar may raise."""
        grammar, result = self._compiled.get()
        if isinstance(result, (LLMatcher, GrammarError)):
            return grammar, result
        raise result

    def endless(self) -> list[Grammar]:
        """Return the grammars whose compiles take longer than they may; their threads cannot be stopped."""
        now = time.monotonic()
        return [
            one.grammar
            for one in list(self._under_way.values())
            if now - one.wall >= COMPILE_WALL_S or time.clock_gettime(one.clock) - one.cpu >= COMPILE_S
        ]

    def _work(self, grammars: SimpleQueue[Grammar]) -> None:
        """Compile one grammar of a queue after another, on a thread of its own."""
        thread = threading.get_ident()
        clock = time.pthread_getcpuclockid(thread)
        while True:
            grammar = grammars.get()
            self._under_way[thread] = _Compile(grammar, clock, time.clock_gettime(clock), time.monotonic())
            result: LLMatcher | BaseException
            try:
                result = self._compile_one(grammar)
            except BaseException as error:  # noqa: BLE001 - also a panic of Rust: the main thread ends the process
                result = error
            del self._under_way[thread]
            self._compiled.put((grammar, result))
            # Behind a system call a thread may wait for Python's lock, 5 ms at most: one of them writes.
            if not self._woken:
                self._woken = True
                os.write(self._wake, b"x")
