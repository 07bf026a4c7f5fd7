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
from ppengine.grammar import __main__, compilers
from ppengine.grammar.__main__ import Process
from ppengine.grammar.matchers import Matchers
from ppengine.protocol.frames import Codec
from ppengine.protocol.grammar_messages import LARGE, FromGrammars, GrammarsLeave, Question, Questions
from ppengine.protocol.structured_outputs import Grammar

MODEL = Path(__file__).parents[2] / "profiles" / "models" / "tiny"
GOOD, BAD = Grammar("regex", "[a-d]{3}"), Grammar("regex", "(")


def new_matchers() -> Matchers:
    spec = read_spec(MODEL)
    return Matchers(MODEL, spec.vocab_size, spec.eos_token_ids)


def process_of(matchers: Matchers, sent: list[Any], compilers: int = 4) -> Process:
    """Return a process that puts its messages into `sent`."""
    decode = Codec(FromGrammars).decode
    socket: Any = SimpleNamespace(send=lambda data: sent.append(decode(data)))
    return Process(matchers, socket, compilers)


def compiled(process: Process, count: int) -> None:
    """Wait until that many grammars are compiled and not taken."""
    end = time.monotonic() + 60
    while process._compilers._compiled.qsize() < count:
        assert time.monotonic() < end, "they are not compiled"
        time.sleep(0.001)


@pytest.mark.parametrize("grammar", [GOOD, BAD])
def test_a_grammar_is_compiled_once_for_all_questions_that_wait_for_it(
    monkeypatch: pytest.MonkeyPatch, grammar: Grammar
) -> None:
    matchers = new_matchers()
    compiled, begin, compile_one = list[Grammar](), threading.Event(), matchers.compile

    def compile_later(wanted: Grammar) -> Any:
        begin.wait(60)
        compiled.append(wanted)
        return compile_one(wanted)

    monkeypatch.setattr(matchers, "compile", compile_later)
    sent = list[Any]()
    process = process_of(matchers, sent)
    process._take(Questions([Question(number, number - 1, grammar, [], [], 0) for number in (1, 2, 3)]))
    process._take(Questions([Question(4, 3, grammar, [], [], 0)]))
    begin.set()
    end = time.monotonic() + 60
    while not process._compilers.ready:
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
    matchers = new_matchers()
    process = process_of(matchers, [], 1)
    grammars = [Grammar("regex", f"[a-d]{{{number}}}") for number in range(1, 19)]
    poller = zmq.Poller()
    poller.register(process._compilers.wake, zmq.POLLIN)
    process._take(Questions([Question(number, 0, grammar, [], []) for number, grammar in enumerate(grammars)]))
    while process._waiting:
        process._serve(poller)
    there = [grammar for grammar in grammars if not matchers.lacks(grammar)]
    assert there == grammars[-15:], "those that are used, and a few that wait to be dropped"
    while matchers.has_old:
        process._serve(poller)
    assert [grammar for grammar in grammars if not matchers.lacks(grammar)] == grammars[-3:]


def test_a_compile_that_does_not_end_is_refused_and_the_process_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(__main__, "LIFE_S", 0.0)
    matchers, sent = new_matchers(), list[Any]()
    begun, compile_one = threading.Event(), matchers.compile

    def compile_or_hang(grammar: Grammar) -> Any:
        if grammar.text == "endless":
            begun.set()
            threading.Event().wait()
        return compile_one(grammar)

    monkeypatch.setattr(matchers, "compile", compile_or_hang)
    process = process_of(matchers, sent)
    poller = zmq.Poller()
    process._take(Questions([Question(number, 0, Grammar("regex", "endless"), [], []) for number in (1, 2)]))
    assert begun.wait(60)
    process._take(Questions([Question(3, 0, GOOD, [], [])]))
    compiled(process, 1)
    process._serve(poller)
    assert [message.numbers for message in sent] == [[3], []] and not process._leaves, "a mask, and a sign of life"
    sent.clear()
    monkeypatch.setattr(compilers, "COMPILE_WALL_S", 0.0)
    process._serve(poller)
    refused, left = sent
    assert refused.errors == dict.fromkeys((1, 2), "its compile takes more than 5 s of CPU time")
    assert isinstance(left, GrammarsLeave) and process._leaves


def test_a_compile_that_takes_the_cpu_is_noticed_by_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, end = threading.Event(), threading.Event()

    def spin(grammar: Grammar) -> Any:
        begun.set()
        while not end.is_set():
            pass
        raise compilers.GrammarError("no more")

    monkeypatch.setattr(compilers, "COMPILE_S", 0.05)
    threads = compilers.Compilers(spin, 1)
    threads.put(GOOD)
    begun.wait(60)
    until = time.monotonic() + 60
    while not (endless := threads.endless()):
        assert time.monotonic() < until, "it takes no time"
    end.set()
    assert endless == [GOOD]


def test_an_exception_that_is_no_refusal_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread lives on, so that the core does not wait for an answer that never comes."""
    matchers = new_matchers()

    def fail(grammar: Grammar) -> Any:
        raise MemoryError(grammar.text)

    monkeypatch.setattr(matchers, "compile", fail)
    process = process_of(matchers, [], 1)
    process._take(Questions([Question(1, 0, GOOD, [], []), Question(2, 0, BAD, [], [])]))
    compiled(process, 2)
    for _ in range(2):
        with pytest.raises(MemoryError):
            process._take_compiled()


def test_first_masks_of_many_grammars_let_other_questions_through() -> None:
    matchers, sent = new_matchers(), list[Any]()
    process = process_of(matchers, sent)
    count, most = 11, matchers.firsts_most
    grammars = [Grammar("regex", f"[a-d]{{{number}}}") for number in range(1, count + 1)]
    process._take(Questions([Question(number, 0, grammar, [], []) for number, grammar in enumerate(grammars)]))
    compiled(process, count)
    poller = zmq.Poller()
    poller.register(process._compilers.wake, zmq.POLLIN)
    sizes = list[int]()
    while process._waiting:
        process._serve(poller)
        sizes += [len(message.numbers) for message in sent if message.numbers]
        sent.clear()
    assert sizes == [most, most, count - 2 * most]


def test_a_grammar_without_a_first_mask_is_not_kept() -> None:
    """It may have made as many states as there may be: 400 of them were more than the memory of the process."""
    bad = Grammar("regex", "((a{1000}){1000}){1000}")
    matchers, sent = new_matchers(), list[Any]()
    process = process_of(matchers, sent)
    process._take(Questions([Question(number, 0, grammar, [], []) for number, grammar in enumerate((bad, bad, GOOD))]))
    compiled(process, 2)
    process._take_compiled()
    assert {number for message in sent for number in message.errors} == {0, 1}
    assert matchers.lacks(bad) and not matchers.lacks(GOOD)
    assert matchers._characters == len(GOOD.text)


def test_large_grammars_are_dropped_for_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ppengine.grammar.matchers.TEXT_MOST", 100)
    matchers = new_matchers()
    grammars = [Grammar("regex", letter * 40) for letter in "abcd"]
    for grammar in grammars:
        matchers.keep(grammar, matchers.compile(grammar))
    assert [matchers.lacks(grammar) for grammar in grammars] == [True, True, False, False]
    small = Grammar("regex", "e" * 20)
    matchers.keep(small, matchers.compile(small))
    assert [matchers.lacks(grammar) for grammar in grammars] == [True, True, False, False]


def test_a_small_grammar_does_not_wait_for_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    matchers, end = new_matchers(), threading.Event()
    compile_one = matchers.compile

    def compile_or_wait(grammar: Grammar) -> Any:
        if grammar != GOOD:
            end.wait(60)
        return compile_one(grammar)

    monkeypatch.setattr(matchers, "compile", compile_or_wait)
    process = process_of(matchers, [], 1)
    large = [Grammar("choice", f"{number}" + "x" * LARGE) for number in range(9)]
    process._take(Questions([Question(n, 0, grammar, [], []) for n, grammar in enumerate([*large, GOOD])]))
    compiled(process, 1)
    process._take_compiled()
    end.set()
    assert not matchers.lacks(GOOD) and set(process._waiting) == set(large)
