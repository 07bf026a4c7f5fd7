"""`LLM.generate` with more log-probabilities of prompts than the engine holds at once."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ppengine.offline import llm as offline_llm
from ppengine.offline import waves
from ppengine.offline.llm import LLM, RequestOutput
from ppengine.offline.waves import Waves, most_values
from ppengine.protocol.sampling import SamplingParams

ROOM = 100


class Engine:
    """Runs one request a step, and refuses what it has no room for."""

    def __init__(self) -> None:
        self.open: dict[str, int] = {}
        self.begun: list[int] = []
        self.aborted: list[str] = []
        self.most = 0
        self.checks = True
        """Whether a check refuses what `add_many` would; the room may shrink behind it."""

    def add_many(
        self, prompts: Sequence[Any], params: Sequence[SamplingParams], priority: Sequence[int] | None = None
    ) -> list[str]:
        values = self._values(prompts)
        assert sum(self.open.values()) + sum(values) <= ROOM, "refused"
        names = [str(each["prompt_token_ids"][0]) for each in prompts]
        self.open.update(zip(names, values, strict=True))
        self.begun += map(int, names)
        self.most = max(self.most, len(self.open))
        return names

    def check_many(self, prompts: Sequence[Any], params: Sequence[SamplingParams], priority: Any) -> None:
        if self.checks:
            self._values(prompts)

    def _values(self, prompts: Sequence[Any]) -> list[int]:
        values = [len(each["prompt_token_ids"]) * 2 for each in prompts]
        if any(value > ROOM for value in values):
            raise ValueError("too long")
        return values

    def step(self, finished_only: bool) -> list[RequestOutput]:
        name = next(reversed(self.open))
        del self.open[name]
        return [RequestOutput("of a call before", None, [], [], True), RequestOutput(name, None, [int(name)], [], True)]

    def abort_request(self, names: Iterable[str]) -> None:
        self.aborted += names


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(waves, "HELD_MOST", ROOM)
    llm: Any = LLM.__new__(LLM)
    llm._turn = threading.RLock()
    llm.llm_engine = Engine()
    return llm


def prompts(*lengths: int) -> Any:
    return [{"prompt_token_ids": [number] * length} for number, length in enumerate(lengths)]


SCORED = SamplingParams(prompt_logprobs=1)


def test_prompts_begin_once_there_is_room(llm: Any) -> None:
    outputs = llm.generate(prompts(20, 20, 20, 10, 50, 1), SCORED, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [[number] for number in range(6)]
    assert llm.llm_engine.begun == list(range(6)) and llm.llm_engine.most == 3


def test_the_most_urgent_begin_first(llm: Any) -> None:
    outputs = llm.generate(prompts(20, 20, 20, 20), SCORED, use_tqdm=False, priority=[3, 1, 1, 0])
    assert [output.prompt_token_ids for output in outputs] == [[number] for number in range(4)]
    assert llm.llm_engine.begun == [3, 1, 2, 0]
    with pytest.raises(ValueError, match="2 prompts and 1 priorities"):
        llm.generate(prompts(1, 1), SCORED, use_tqdm=False, priority=[1])


class Bar:
    """Counts the ends that a progress bar shows."""

    def __init__(self, total: int) -> None:
        self.total, self.ends, self.closed = total, 0, False

    def update(self, ends: int) -> None:
        self.ends += ends

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Bar]:
    opened: list[Bar] = []

    def progress(total: int) -> Bar:
        opened.append(Bar(total))
        return opened[-1]

    monkeypatch.setattr(offline_llm, "_progress", progress)
    return opened


def test_a_prompt_without_room_is_refused_before_any_begins_or_a_bar_opens(llm: Any, bars: list[Bar]) -> None:
    with pytest.raises(ValueError, match="too long"):
        llm.generate(prompts(20, 20, 60), SCORED)
    assert llm.llm_engine.begun == [] and not bars
    with pytest.raises(ValueError, match="too long"):
        llm.generate(prompts(20, 51), SamplingParams())
    assert llm.llm_engine.begun == [] and not bars, "one wave needs no check of its own"
    llm.generate(prompts(20, 20, 20), SCORED)
    assert [(bar.total, bar.ends, bar.closed) for bar in bars] == [(3, 3, True)]


def test_a_prompt_that_is_refused_behind_the_check_ends_the_others(llm: Any, bars: list[Bar]) -> None:
    llm.llm_engine.checks = False
    with pytest.raises(ValueError, match="too long"):
        llm.generate(prompts(20, 20, 60), SCORED)
    assert llm.llm_engine.aborted == [], "both had ended before it began"
    assert [(bar.ends, bar.closed) for bar in bars] == [(2, True)]


@given(values=st.lists(st.integers(0, 70), min_size=1), ends=st.data())
def test_all_begin_in_order_and_never_exceed_the_room(values: list[int], ends: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waves, "HELD_MOST", 60)
        wave = Waves(values, None)
        begun: list[int] = []
        running: list[int] = []
        while len(begun) < len(values):
            new = wave.next()
            begun += new
            running += new
            held = [value for place in running if (value := values[place])]
            assert sum(held) <= 60 or len(held) == 1
            assert running
            done = running.pop(ends.draw(st.integers(0, len(running) - 1)))
            wave.end(done)
        assert begun == list(range(len(values)))


def test_a_text_has_at_most_a_token_a_byte() -> None:
    assert most_values("äb", SamplingParams(prompt_logprobs=0)) == 3 + waves.SPECIAL_TOKENS
    assert most_values("äb", SamplingParams()) == 0
    assert most_values({"prompt_token_ids": [1, 2]}, SCORED) == 4
    assert most_values({"prompt_token_ids": np.array([1, 2, 3])}, SCORED) == 6
    no_prompt: Any = 7
    assert most_values(no_prompt, SCORED) == most_values({"text": "a"}, SCORED) == 0
