"""The offline API on its own: what an interrupted call leaves behind does not end up in the next one."""

from __future__ import annotations

import numpy
import pytest
from ppengine.config import ConfigError
from ppengine.offline.llm import LLM, LLMEngine, RequestOutput, make_profile
from ppengine.protocol.offline import Added


class Left:
    """An engine that still holds the end of a request that an interrupted call had aborted."""

    def add_many(self, prompts, params, ids=()):
        self.answers = [["r-old"], ["r-1"]]
        return ["r-1"]

    def step(self, *, finished_only=False):
        return [RequestOutput(name, None, [1], [], True) for name in self.answers.pop(0)]


def test_the_end_of_an_interrupted_call_is_not_taken_for_an_output():
    llm = LLM.__new__(LLM)
    llm.llm_engine = Left()
    assert [output.request_id for output in llm.generate("x", use_tqdm=False)] == ["r-1"]


class Listener:
    """An engine that takes everything and remembers it."""

    def nonce(self):
        return 1

    def ask(self, message, kind):
        self.message = message
        return Added(nonce=1, requests=[f"r-{index}" for index in range(len(message.prompts))])


def engine() -> LLMEngine:
    made = LLMEngine.__new__(LLMEngine)
    made._engine, made._session, made._open = Listener(), "s", {}
    return made


def test_token_ids_of_an_array_are_taken():
    made = engine()
    made.add_many([{"prompt_token_ids": numpy.array([1, 2])}, "text"], [])
    assert made._engine.message.prompts == [[1, 2], "text"]
    assert all(type(token) is int for token in made._engine.message.prompts[0])


@pytest.mark.parametrize("prompt", [{"prompt": "x"}, [1, 2], {"prompt_token_ids": [1], "multi_modal_data": {}}])
def test_a_prompt_of_another_kind_is_named(prompt):
    with pytest.raises(ValueError, match="a prompt is a text or"):
        engine().add_many([prompt], [])


def test_what_is_not_built_is_refused_by_the_name_of_the_argument():
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2; only 1 is built"):
        make_profile("m", tensor_parallel_size=2)
