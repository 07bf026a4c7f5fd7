"""`python -m ppengine.grammar --engine FILE --name NAME`: answers the core's questions until its lifeline closes."""

from __future__ import annotations

import argparse
import logging
import resource
import sys
import threading
import time
from pathlib import Path

import zmq

from ppengine.checkpoint.model_spec import read_spec
from ppengine.common.begin_process import begin
from ppengine.common.system_memory import keep_freed_memory
from ppengine.grammar.compilers import COMPILE_S, Compilers
from ppengine.grammar.matchers import GrammarError, Matchers
from ppengine.protocol.frames import Codec, encode
from ppengine.protocol.grammar_messages import (
    COMPILERS,
    Answers,
    Forget,
    GrammarsLeave,
    GrammarsReady,
    Question,
    Questions,
    ToGrammars,
)
from ppengine.protocol.structured_outputs import Grammar

log = logging.getLogger("ppengine.grammar")

MEMORY_BYTES = 8 * 2**30
"""Address space of the process. A matcher takes some 100 kB, a large one up to 100 MB."""
ROWS_MOST = 256
"""Masks in one message: 4 MiB with 128k tokens."""
LIFE_S = 1.0
"""Seconds between two signs of life while grammars are compiled, and two looks at the compiles."""


def main() -> int:
    """Answer what the core asks. Exit code 1: the tokenizer cannot be used, with one line."""
    parser = argparse.ArgumentParser(prog="python -m ppengine.grammar")
    parser.add_argument("--name", required=True, help="routing id on the core's socket")
    parser.add_argument("--threads", type=int, default=1, help="that compute masks")
    arguments, config = begin(parser)
    keep_freed_memory()  # A message of masks has up to 4 MiB, each step.
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, arguments.name.encode())
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.connect(config.endpoint("grammar"))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    folder = Path(config.model_path)
    spec = read_spec(folder)
    try:
        matchers = Matchers(folder, spec.vocab_size, spec.eos_token_ids, arguments.threads)
    except (OSError, ValueError) as error:
        print(f"error: the tokenizer of {folder} cannot be used for grammars: {error}", file=sys.stderr)
        return 1
    Process(matchers, socket, max(COMPILERS, arguments.threads)).run()
    return 0


class Process:
    """The main thread answers questions; those whose grammar is new wait for one of the threads that compile."""

    def __init__(self, matchers: Matchers, socket: zmq.Socket[bytes], compilers: int) -> None:
        self._matchers, self._socket = matchers, socket
        self._codec = Codec(ToGrammars)
        self._compilers = Compilers(matchers.compile, compilers)
        self._waiting: dict[Grammar, list[Question]] = {}
        """Questions by the grammar that is compiled for them."""
        self._watch_at = 0.0
        """Time of the next look at the compiles."""
        self._leaves = False
        """Whether a thread is lost in a compile, and the core ends this process."""

    def run(self) -> None:
        """Serve until the core or the lifeline ends the process."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._compilers.wake, zmq.POLLIN)
        self._socket.send(encode(GrammarsReady()))
        log.info("started, with %d MiB of memory", MEMORY_BYTES // 2**20)
        while not self._leaves:
            self._serve(poller)
        threading.Event().wait()

    def _serve(self, poller: zmq.Poller) -> None:
        """Take what has come; drop old grammars while there is nothing to do."""
        drops = self._matchers.has_old and not self._waiting
        wait_ms = 0 if drops or self._compilers.ready else int(1e3 * LIFE_S) if self._waiting else None
        events = poller.poll(wait_ms)
        for source, _ in events:
            if source == self._compilers.wake:
                self._compilers.woken()
            else:
                self._take(self._codec.decode(self._socket.recv()))
        if self._compilers.ready:
            self._take_compiled()
        elif drops and not events:
            self._matchers.drop_old()
        if self._waiting and (now := time.monotonic()) >= self._watch_at:
            self._watch_at = now + LIFE_S
            self._watch()

    def _take(self, message: object) -> None:
        if isinstance(message, Forget):
            self._matchers.forget(message.matchers)
            return
        assert isinstance(message, Questions)
        known: list[Question] = []
        for question in message.questions:
            if question.grammar is None or not self._matchers.lacks(question.grammar):
                known.append(question)
            elif (waiting := self._waiting.get(question.grammar)) is not None:
                waiting.append(question)
            else:
                self._waiting[question.grammar] = [question]
                self._compilers.put(question.grammar)
        self._answer(known)

    def _take_compiled(self) -> None:
        """Answer for some grammars that are compiled. Others wait behind what has come meanwhile: masks of outputs."""
        good: list[Question] = []
        grammars = 0
        while grammars < self._matchers.firsts_most and self._compilers.ready:
            grammar, result = self._compilers.take()
            questions = self._waiting.pop(grammar)
            if isinstance(result, GrammarError):
                self._refuse(questions, str(result) or "it is not valid")
            else:
                self._matchers.keep(grammar, result)
                good += questions
                grammars += 1
        self._answer(good)

    def _watch(self) -> None:
        """Show the core that this thread works; leave if a compile takes longer than it may, and say which."""
        for grammar in self._compilers.endless():
            self._leaves = True
            self._refuse(self._waiting.pop(grammar), f"its compile takes more than {COMPILE_S:g} s of CPU time")
        self._send(GrammarsLeave() if self._leaves else Answers([], []))

    def _refuse(self, questions: list[Question], reason: str) -> None:
        numbers = [question.number for question in questions]
        self._send(Answers(numbers, [-1] * len(numbers), errors=dict.fromkeys(numbers, reason)))

    def _answer(self, questions: list[Question]) -> None:
        for first in range(0, len(questions), ROWS_MOST):
            self._send(self._matchers.answers(questions[first : first + ROWS_MOST]))
        self._matchers.drop_refused()

    def _send(self, message: Answers | GrammarsLeave) -> None:
        self._socket.send(encode(message))


if __name__ == "__main__":
    sys.exit(main())
