"""`python -m ppengine.grammar --engine FILE --name NAME`: answers the core's questions until its lifeline closes."""

from __future__ import annotations

import argparse
import logging
import os
import resource
import sys
import threading
from pathlib import Path
from queue import SimpleQueue

import zmq
from llguidance import LLMatcher

from ppengine.checkpoint.model_spec import read_spec
from ppengine.common.begin_process import begin
from ppengine.common.system_memory import keep_freed_memory
from ppengine.grammar.matchers import GrammarError, Matchers
from ppengine.protocol.frames import Codec, encode
from ppengine.protocol.grammar_messages import (
    COMPILERS,
    Answers,
    Forget,
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
        self._grammars: SimpleQueue[Grammar] = SimpleQueue()
        """Those that wait for a thread. An executor's future costs a tenth of a compile, with Python's lock held."""
        self._compiled: SimpleQueue[tuple[Grammar, LLMatcher | GrammarError]] = SimpleQueue()
        self._waiting: dict[Grammar, list[Question]] = {}
        """Questions by the grammar that is compiled for them."""
        # A socket belongs to one thread, so the others wake this one by a pipe.
        self._wake_read, self._wake = os.pipe()
        self._woken = False
        for _ in range(compilers):
            threading.Thread(target=self._compile, daemon=True).start()

    def run(self) -> None:
        """Serve until the lifeline closes."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        self._socket.send(encode(GrammarsReady()))
        log.info("started, with %d MiB of memory", MEMORY_BYTES // 2**20)
        while True:
            self._serve(poller)

    def _serve(self, poller: zmq.Poller) -> None:
        """Take what has come; drop old grammars while there is nothing to do."""
        drops = self._matchers.has_old and not self._waiting
        if not (events := poller.poll(0 if drops else None)):
            self._matchers.drop_old()
        for source, _ in events:
            if source == self._wake_read:
                os.read(self._wake_read, 4096)
                self._take_compiled()
            else:
                self._take(self._codec.decode(self._socket.recv()))

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
                self._grammars.put(question.grammar)
        self._answer(known)

    def _compile(self) -> None:
        """Compile one grammar after another, on a thread of its own."""
        while True:
            grammar = self._grammars.get()
            result: LLMatcher | GrammarError
            try:
                result = self._matchers.compile(grammar)
            except GrammarError as error:
                result = error
            self._compiled.put((grammar, result))
            # Behind a system call a thread may wait for Python's lock, 5 ms at most: one of them writes.
            if not self._woken:
                self._woken = True
                os.write(self._wake, b"x")

    def _take_compiled(self) -> None:
        self._woken = False  # Before the look: a thread that is done behind it writes once more.
        while not self._compiled.empty():
            good: list[Question] = []
            while len(good) < ROWS_MOST and not self._compiled.empty():
                grammar, result = self._compiled.get()
                questions = self._waiting.pop(grammar)
                if isinstance(result, GrammarError):
                    self._refuse(questions, str(result) or "it is not valid")
                else:
                    self._matchers.keep(grammar, result)
                    good += questions
            self._answer(good)

    def _refuse(self, questions: list[Question], reason: str) -> None:
        numbers = [question.number for question in questions]
        self._send(Answers(numbers, [-1] * len(numbers), errors=dict.fromkeys(numbers, reason)))

    def _answer(self, questions: list[Question]) -> None:
        for first in range(0, len(questions), ROWS_MOST):
            self._send(self._matchers.answers(questions[first : first + ROWS_MOST]))

    def _send(self, message: Answers) -> None:
        self._socket.send(encode(message))


if __name__ == "__main__":
    sys.exit(main())
