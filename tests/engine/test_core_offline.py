"""The offline API on its own: what an interrupted call leaves behind does not end up in the next one."""

from __future__ import annotations

from ppengine.offline.llm import LLM, RequestOutput


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
