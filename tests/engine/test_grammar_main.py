"""The main thread of a grammar process: questions and the threads that compile for them."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from ppengine.checkpoint.model_spec import read_spec
from ppengine.grammar.__main__ import Process
from ppengine.grammar.matchers import Matchers
from ppengine.protocol.frames import Codec
from ppengine.protocol.grammar_messages import Answers, Question, Questions
from ppengine.protocol.structured_outputs import Grammar

MODEL = Path(__file__).parents[2] / "profiles" / "models" / "tiny"
GOOD, BAD = Grammar("regex", "[a-d]{3}"), Grammar("regex", "(")


@pytest.mark.parametrize("grammar", [GOOD, BAD])
def test_a_grammar_is_compiled_once_for_all_questions_that_wait_for_it(
    monkeypatch: pytest.MonkeyPatch, grammar: Grammar
) -> None:
    spec = read_spec(MODEL)
    matchers = Matchers(MODEL, spec.vocab_size, spec.eos_token_ids)
    compiled, begin, compile_one = list[Grammar](), threading.Event(), matchers.compile

    def compile_later(wanted: Grammar) -> Any:
        begin.wait(60)
        compiled.append(wanted)
        return compile_one(wanted)

    monkeypatch.setattr(matchers, "compile", compile_later)
    sent: list[Answers] = []
    decode = Codec(Answers).decode
    socket: Any = SimpleNamespace(send=lambda data: sent.append(decode(data)))
    process = Process(matchers, socket, 4)
    process._take(Questions([Question(number, number - 1, grammar, [], [], 0) for number in (1, 2, 3)]))
    process._take(Questions([Question(4, 3, grammar, [], [], 0)]))
    begin.set()
    end = time.monotonic() + 60
    while process._compiled.empty():
        assert time.monotonic() < end, "it is not compiled"
        time.sleep(0.001)
    process._take_compiled()
    assert sorted(number for message in sent for number in message.numbers) == [1, 2, 3, 4]
    failed = {number for message in sent for number in message.errors}
    assert failed == ({1, 2, 3, 4} if grammar is BAD else set())
    assert compiled == [grammar]


def test_old_grammars_are_dropped_while_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ppengine.grammar.matchers.KEPT_MOST", 3)
    monkeypatch.setattr("ppengine.grammar.matchers.OLD_MOST", 12)
    spec = read_spec(MODEL)
    matchers = Matchers(MODEL, spec.vocab_size, spec.eos_token_ids)
    sent: list[Any] = []
    process = Process(matchers, SimpleNamespace(send=sent.append), 1)  # type: ignore[arg-type]
    grammars = [Grammar("regex", f"[a-d]{{{number}}}") for number in range(1, 19)]
    poller = zmq.Poller()
    poller.register(process._wake_read, zmq.POLLIN)
    process._take(Questions([Question(number, 0, grammar, [], []) for number, grammar in enumerate(grammars)]))
    while process._waiting:
        process._serve(poller)
    there = [grammar for grammar in grammars if not matchers.lacks(grammar)]
    assert there == grammars[-15:], "those that are used, and a few that wait to be dropped"
    while matchers.has_old:
        process._serve(poller)
    assert [grammar for grammar in grammars if not matchers.lacks(grammar)] == grammars[-3:]
