"""Outputs over several grammar processes."""

from __future__ import annotations

from typing import Any

import pytest
from ppengine.core.grammar_asks import Ask
from ppengine.core.mask_processes import make_processes
from ppengine.protocol.structured_outputs import Grammar


class Process:
    """Notes what it is asked."""

    def __init__(self, task: str, threads: int) -> None:
        self.task, self.threads = task, threads
        self.asked: list[int] = []
        self.forgotten: list[list[int]] = []
        self.calls: list[str] = []

    def ask(self, asks: list[Ask]) -> None:
        self.asked += [ask.matcher for ask in asks]

    def forget(self, matchers: list[int]) -> None:
        self.forgotten.append(matchers)

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


def test_an_output_stays_with_its_process() -> None:
    _, masks = make_processes(Process, 32)  # type: ignore[arg-type]
    for matchers in ((1, 2, 3, 4, 5, 8), (1,)):
        masks.ask([Ask(matcher, Grammar("regex", "x"), [], [], lambda _: None) for matcher in matchers])
    processes: list[Any] = masks.processes
    assert [one.asked for one in processes] == [[4, 8], [1, 5, 1], [2], [3]]
    masks.expect(6, Grammar("regex", "y"))
    assert [one.calls for one in processes] == [[], [], ["expect"], []]
    processes[2].calls.clear()
    masks.forget([1, 5, 8])
    assert [one.forgotten for one in processes] == [[[8]], [[1, 5]], [], []]
    for call in (masks.prepare, masks.advance, masks.close, lambda: masks.take(b"masks1-1", object())):
        call()
    assert all(one.calls == ["prepare", "advance", "close", "take"] for one in processes)
