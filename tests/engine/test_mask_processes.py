"""Outputs over several grammar processes."""

from __future__ import annotations

from typing import Any

import pytest
from ppengine.core.grammar_asks import Ask
from ppengine.core.mask_processes import NEAR, MaskProcesses, make_processes
from ppengine.protocol.structured_outputs import Grammar


class Process:
    """Notes what it is asked."""

    def __init__(self, task: str, threads: int) -> None:
        self.task, self.threads = task, threads
        self.asked: list[int] = []
        self.forgotten: list[list[int]] = []
        self.calls: list[str] = []
        self.expected: list[str] = []
        self.compiled: set[str] = set()

    def ask(self, asks: list[Ask]) -> None:
        self.asked += [ask.matcher for ask in asks]

    def forget(self, matchers: list[int]) -> None:
        self.forgotten.append(matchers)

    def expect(self, grammar: Grammar) -> None:
        self.expected.append(grammar.text)

    def has(self, grammar: Grammar) -> bool:
        return grammar.text in self.compiled

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.calls.append(name) or []


@pytest.mark.parametrize(
    ("cores", "check", "masks"),
    [
        (1, ("checks", 1), [("masks", 1)]),
        (15, ("checks", 7), [("masks", 7)]),
        (16, ("checks", 8), [("masks 1", 4), ("masks 2", 4)]),
        (128, ("checks", 16), [(f"masks {number}", 4) for number in (1, 2, 3, 4)]),
    ],
)
def test_many_cores_have_several(cores: int, check: tuple[str, int], masks: list[tuple[str, int]]) -> None:
    checks, made = make_processes(Process, cores)  # type: ignore[arg-type]
    assert (checks.task, checks.threads) == check  # type: ignore[attr-defined]
    assert [(one.task, one.threads) for one in made.processes] == masks  # type: ignore[attr-defined]


def made() -> tuple[MaskProcesses, list[Process]]:
    _, masks = make_processes(Process, 32)  # type: ignore[arg-type]
    return masks, masks.processes  # type: ignore[return-value]


def asks(*matchers: int) -> list[Ask]:
    return [Ask(matcher, Grammar("regex", "x"), [], [], lambda _: None) for matcher in matchers]


def test_an_output_stays_with_its_process_until_it_ends() -> None:
    masks, processes = made()
    for matcher in range(1, 7):
        masks.open(matcher, Grammar("regex", "x"))
    masks.ask(asks(1, 2, 3, 4, 5))
    masks.ask(asks(1))
    assert [one.asked for one in processes] == [[1, 5, 1], [2], [3], [4]]
    masks.forget([1, 5, 4])
    assert [one.forgotten for one in processes] == [[[1, 5]], [], [], [[4]]]
    for matcher in (7, 8, 9):
        masks.open(matcher, Grammar("regex", "x"))
    masks.ask(asks(7, 8, 9))
    assert [one.asked[-1] for one in processes] == [9, 2, 3, 8], "the process with the fewest outputs"
    for call in (masks.prepare, masks.advance, masks.close, lambda: masks.take(b"masks1-1", object())):
        call()
    assert all(one.calls == ["prepare", "advance", "close", "take"] for one in processes)


def test_an_output_goes_where_its_grammar_is_compiled() -> None:
    masks, processes = made()
    processes[2].compiled |= {"c", "d"}
    for matcher, name in enumerate("cabcdc", 1):
        assert masks.open(matcher, Grammar("regex", name)) == (name in "cd")
    masks.ask(asks(*range(1, 7)))
    assert [one.asked for one in processes] == [[2], [3], [1, 4, 5, 6], []]
    assert [one.expected for one in processes] == [["a"], ["b"], ["c", "c", "d", "c"], []]


def test_outputs_of_one_grammar_are_spread_where_it_is_compiled_in_one_process() -> None:
    masks, processes = made()
    grammar = Grammar("regex", "x")
    processes[1].compiled.add("x")
    for matcher in range(1, 257):
        masks.open(matcher, grammar)
        masks.ask(asks(matcher))
    assert [len(one.asked) for one in processes] == [60, 76, 60, 60]
    assert processes[1].asked[:NEAR] == list(range(1, NEAR + 1))
