"""Memory of requests that have ended: their tokens are compact, and read as before."""

from __future__ import annotations

import sys

import msgspec
from core_world import CoreWorld
from kept_objects import lists_of
from ppengine.protocol.control import Fetch, Fetched, Inspect, Inspected
from ppengine.protocol.inspection import RequestDetail
from ppengine.protocol.offline import AddMany, Collect, Collected
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.verbs import Submit
from test_core_successor import follow

PROMPT = [(7 * place) % 90 + 3 for place in range(300)]
ANSWER = [5] * 100
"""The token that the stages of a `CoreWorld` sample."""
SAMPLING = SamplingParams(max_tokens=len(ANSWER), temperature=0.0, ignore_eos=True)


def world() -> CoreWorld:
    return CoreWorld(max_model_len=500, utilization=0.9)


def lists(core: CoreWorld, tokens: list[int]) -> int:
    """Return how many lists of these tokens the core keeps."""
    core.engine.commit()
    return lists_of(tokens, core.engine, core, core.answers, core.steps)


def detail(core: CoreWorld) -> RequestDetail:
    answer = core.engine.details.answer(Inspect(nonce=1, what="request", request="a"))
    assert isinstance(answer, Inspected)
    return msgspec.msgpack.decode(answer.data, type=RequestDetail)


def fetched(core: CoreWorld) -> Fetched:
    core.engine.outputs.fetch(b"c", Fetch(nonce=1, request="a", wait_ms=0))
    answer = core.answers[-1][1]
    assert isinstance(answer, Fetched)
    return answer


def collected(core: CoreWorld) -> Collected:
    core.engine.outputs.collect(b"c", Collect(nonce=2, session="s", since=0, finished_only=True, wait_ms=0))
    answer = core.answers[-1][1]
    assert isinstance(answer, Collected)
    return answer


def test_an_ended_request_leaves_no_list_of_tokens_and_is_read_as_before() -> None:
    core = world()
    core.say(Submit(prompt_token_ids=list(PROMPT), request="a", sampling=SAMPLING))
    core.run(steps=50)
    assert lists(core, PROMPT) and lists(core, ANSWER[:10]), "the scheduler has them while it lives"
    assert detail(core).prompt_token_ids == PROMPT
    core.run()
    [submission] = core.engine.operations.infos()
    assert (submission.verb, submission.by, submission.state) == ("submit a", "eve", "applied"), "it just ended"
    assert submission.progress == f"{len(PROMPT)} prompt tokens queued"
    for after in (core, follow(core, max_model_len=500)):
        assert not lists(after, PROMPT) and not lists(after, ANSWER[:10])
        output = after.engine.outputs.get("a")
        assert output is not None
        sizes = sys.getsizeof(output.prompt_ids) + sys.getsizeof(output.samples[0].tokens)
        assert sizes < 6 * len(PROMPT + ANSWER), "four bytes a token, and some room"
        assert (fetched(after).token_ids, fetched(after).prompt_tokens) == (ANSWER, len(PROMPT))
        assert (detail(after).prompt_token_ids, detail(after).output_token_ids) == (PROMPT, ANSWER)


def test_prompts_of_a_session_leave_no_list_of_tokens_and_are_collected_as_before() -> None:
    core = world()
    prompt = Submit(prompt_token_ids=list(PROMPT), request="a", sampling=SAMPLING)
    core.engine.offline.add_many(b"o", AddMany(nonce=1, session="s", submissions=[prompt]))
    del prompt
    core.run()
    assert not lists(core, PROMPT) and not lists(core, ANSWER[:10])
    [output] = collected(core).outputs
    assert (output.prompt_token_ids, output.samples[0].token_ids) == (PROMPT, ANSWER)
