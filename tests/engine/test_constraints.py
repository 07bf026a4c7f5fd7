"""Constrained outputs in the core: masks before tokens, refusals before requests, and processes that end."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from core_world import MemoryJournal
from grammar_world import TOKENIZER, GrammarWorld, constrained
from ppengine.core import constraints, grammar_process, mask_processes
from ppengine.core.grammar_asks import Ask
from ppengine.core.scheduler import wait_reasons
from ppengine.protocol.control import Outcome, Refused
from ppengine.protocol.offline import AbortMany
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.structured_outputs import Grammar
from ppengine.protocol.verbs import Preempt, Submit

SCHEMA = {
    "type": "object", "required": ["kind", "age"], "additionalProperties": False,
    "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "maximum": 99, "minimum": 10}},
}  # fmt: skip
FORMS = [
    constrained(regex="[a-d]{3,9}x"), constrained(choice=["yes", "no way"]), constrained(json=SCHEMA),
    constrained(grammar='start: "a" ("b" | "cd") ~ 4'), constrained(grammar='root ::= "q" [0-9] [0-9]'),
]  # fmt: skip
PATIENT_S = 1e9
"""Time for a mask where none may be given up, however slow the machine is."""


def wait_for_masks(patch: pytest.MonkeyPatch) -> None:
    """Let no step give up a mask."""
    for name in ("LATE_S", "FREE_LATE_S"):
        patch.setattr(constraints, name, PATIENT_S)


COLON = TOKENIZER.encode(":")[0]
NAMES = [f"r{index}" for index in range(len(FORMS))]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarWorld]:
    """A world for tests that leave the process as it is."""
    world = GrammarWorld(tmp_path_factory.mktemp("g"))
    yield world
    world.close()


@pytest.fixture(scope="module")
def texts(shared: GrammarWorld) -> list[str]:
    """The outputs of `FORMS` without any disturbance."""
    with pytest.MonkeyPatch.context() as patch:
        wait_for_masks(patch)
        shared.add(*FORMS, SamplingParams(max_tokens=12, ignore_eos=True), names=[*NAMES, "free"])
        found = shared.ended(*NAMES, "free")
    assert [shared.reason(name) for name in NAMES] == ["stop"] * len(NAMES)
    return found[:-1]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[GrammarWorld]:
    """A world for tests that disturb the process."""
    made = GrammarWorld(tmp_path)
    yield made
    made.close()


def begun(world: GrammarWorld) -> None:
    """Begin `FORMS`; return when the longest has a few tokens. Others may have ended: it is compiled last."""
    world.add(*FORMS)
    world.until(lambda: world.added() is not None, "an answer")
    world.until(lambda: len(world.tokens("r2")) >= 2, "tokens")
    assert world.reason("r2") is None


def test_texts_have_their_forms_and_rows_are_scheduled_ahead_of_their_masks(
    shared: GrammarWorld, texts: list[str]
) -> None:
    assert re.fullmatch("[a-d]{3,9}x", texts[0]) and texts[1] in ("yes", "no way")
    found = json.loads(texts[2])
    assert found.keys() == {"kind", "age"} and found["kind"] in ("cat", "dog") and 10 <= found["age"] <= 99
    assert re.fullmatch("a(b|cd){4}", texts[3]) and re.fullmatch("q[0-9][0-9]", texts[4])
    assert shared.most_sampling["free"] == 2
    again = [f"again {name}".replace(" ", "-") for name in NAMES]
    shared.add(*FORMS, nonce=95, names=again)
    assert len(shared.ended(*again)) == len(FORMS)
    assert [shared.most_sampling[name] for name in again] == [2] * len(FORMS) and shared.late_masks
    shared.check()


def test_no_step_waits_for_a_compile(world: GrammarWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of an output whose process has not compiled its grammar comes when its first mask is there."""
    for name in ("LATE_S", "FREE_LATE_S"):
        monkeypatch.setattr(constraints, name, 0.0)
    (process,) = world.engine.constraints.masks.processes
    monkeypatch.setattr(process, "give", lambda: None)  # It compiles for as long as this lasts.
    monkeypatch.setattr(process, "advance", lambda: None)
    process.prepare()
    world.add(FORMS[0], SamplingParams(max_tokens=12, ignore_eos=True), names=["r0", "free"])
    world.until(lambda: world.reason("free"), "the free output ends")
    assert len(world.tokens("r0")) == 1 and not world.late_masks and world.most_sampling["r0"] == 1
    request = world.scheduler.queues.requests["r0"]
    assert not request.ahead and not world.engine.constraints._slow
    monkeypatch.undo()
    world.until(lambda: len(world.tokens("r0")) > 2, "tokens behind the first mask")
    assert request.ahead
    world.ended("r0")


def test_a_grammar_is_compiled_for_masks_while_the_prompt_is_computed(
    world: GrammarWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    first: dict[Grammar, int] = {}
    (process,) = world.engine.constraints.masks.processes
    ask = process.ask

    def noted(asks: list[Ask]) -> None:
        for one in asks:
            first.setdefault(one.grammar, len(one.tokens))
        ask(asks)

    monkeypatch.setattr(process, "ask", noted)
    world.add(*FORMS)
    world.ended(*NAMES)
    assert list(first.values()) == [0] * len(FORMS), "the process had each grammar before a token"


def test_grammars_that_begin_alike_share_a_mask_in_a_step(shared: GrammarWorld) -> None:
    short, long = (constrained(regex=f"[a-d]{{{least},9}}x") for least in (7, 8))
    shared.add(long, nonce=90, names=["before"])
    shared.ended("before")  # Masks of one message are one object in any case.
    shared.add(short, long, constrained(regex="[p-t]{7,9}"), nonce=91, names=["short", "long", "other"])
    shared.until(lambda: any(step.masks for step in shared.steps), "a step with masks", retires=False)
    (step,) = [step for step in shared.steps if step.masks]
    slots = {name: shared.scheduler.queues.requests[name].slot for name in ("short", "long", "other")}
    assert sorted(mask.slots for mask in step.masks) == sorted([[slots["short"], slots["long"]], [slots["other"]]])
    assert len({mask.tokens for mask in step.masks}) == 2
    shared.ended("short", "long", "other")


def test_forced_tokens_come_in_fewer_steps_and_are_those_that_masks_alone_give(
    shared: GrammarWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request with log-probabilities needs the logits of each token, so it gets one step a token."""
    wait_for_masks(monkeypatch)
    compact = constrained(json=SCHEMA, disable_any_whitespace=True)
    limits = [{}] * len(FORMS) + [{}, {"max_tokens": 6}, {"stop_token_ids": [COLON]}]
    forms = [*FORMS, compact, compact, compact]
    for kind, fields in (("jump", {}), ("step", {"logprobs": 0})):
        samplings = [
            msgspec.structs.replace(form, **limit, **fields) for form, limit in zip(forms, limits, strict=True)
        ]
        shared.sampled = 0
        shared.add(*samplings, nonce=70 + len(fields), names=[f"{kind}{index}" for index in range(len(forms))])
        shared.ended(*(f"{kind}{index}" for index in range(len(forms))))
        if kind == "jump":
            few = shared.sampled
    for index in range(len(forms)):
        assert shared.tokens(f"jump{index}") == shared.tokens(f"step{index}")
        assert shared.reason(f"jump{index}") == shared.reason(f"step{index}")
    assert shared.reason("jump6") == "length" and shared.tokens("jump6") == shared.tokens("jump5")[:6]
    ended = shared.tokens("jump7")
    assert shared.reason("jump7") == "stop" and COLON not in ended[:-1], "a stop token that is forced ends it"
    assert ended == shared.tokens("jump5")[: len(ended)]
    tokens = sum(len(shared.tokens(f"jump{index}")) for index in range(len(forms)))
    assert few < shared.sampled and 0 <= shared.sampled - tokens <= len(forms), "one row at most behind an end"
    shared.check()


@pytest.fixture
def spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GrammarWorld]:
    """A world with three processes for masks, in which none is given up."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(3 * mask_processes.CORES)))
    wait_for_masks(monkeypatch)
    made = GrammarWorld(tmp_path)
    assert len(made.engine.constraints.masks.processes) == 3
    yield made
    made.close()


def test_a_step_gets_the_masks_of_several_processes_in_one_turn(
    spread: GrammarWorld, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraints, "GATHER_S", PATIENT_S)
    long = [constrained(regex=f"[a-d]{{{least}}}") for least in range(30, 36)]
    for nonce in (1, 2):
        spread.add(*long, nonce=nonce, names=[f"{nonce}.{index}" for index in range(len(long))])
        spread.ended(*(f"{nonce}.{index}" for index in range(len(long))))
    assert spread.gathered > 20
    assert spread.early > len(spread.late_masks) / 2, "most masks are sent as soon as the last of a step has come"
    spread.add(*FORMS, nonce=3)
    assert spread.ended(*NAMES) == texts


def test_masks_do_not_wait_long_for_those_of_another_process(spread: GrammarWorld) -> None:
    spread.add(*(constrained(regex=f"[a-d]{{{least}}}") for least in range(30, 36)))
    spread.until(lambda: spread.gathered, "masks that wait for those of another process")
    waiting = spread.engine.constraints
    oldest, due = next(iter(waiting._asked.values())), waiting.next_deadline
    assert due is not None and due <= oldest + constraints.GATHER_S < oldest + constraints.LATE_S


def test_a_process_that_is_killed_changes_no_token(world: GrammarWorld, texts: list[str]) -> None:
    begun(world)
    os.kill(world.process.pid, signal.SIGKILL)
    assert world.ended(*NAMES) == texts
    assert any("SIGKILL; another one" in event.text for event in world.events if event.kind == "grammar.ended")


def test_a_process_that_does_not_answer_is_replaced(world: GrammarWorld, texts: list[str]) -> None:
    begun(world)
    stopped = world.process.pid
    os.kill(stopped, signal.SIGSTOP)
    request = world.scheduler.queues.requests["r2"]
    world.until(lambda: request.mask is None and not request.in_flight, "it waits")
    why = wait_reasons.why(world.scheduler, request)
    assert why is not None and why.code == "mask"
    world.now += grammar_process.ANSWER_S + 1
    world.until(lambda: world.process is None or world.process.pid != stopped, "another process")
    assert world.ended(*NAMES) == texts


def test_free_requests_go_on_while_the_process_does_not_answer(
    world: GrammarWorld, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_masks(monkeypatch)
    begun(world)
    stopped = world.process.pid
    os.kill(stopped, signal.SIGSTOP)
    world.until(lambda: world.steps and world.waits, "the oldest step waits for masks")
    monkeypatch.undo()
    world.add(SamplingParams(max_tokens=30, ignore_eos=True), nonce=2, names=["free"])
    world.until(lambda: world.reason("free"), "the free one ends")
    assert world.process.pid == stopped and world.reason("r2") is None
    assert not world.scheduler.queues.requests["r2"].ahead
    world.now += grammar_process.ANSWER_S + 1
    assert world.ended(*NAMES) == texts


def test_free_requests_do_not_wait_as_long_as_constrained_ones_alone(
    world: GrammarWorld, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraints, "LATE_S", PATIENT_S)
    begun(world)
    os.kill(world.process.pid, signal.SIGSTOP)
    world.until(lambda: world.steps and world.waits, "the oldest step waits for masks")
    began = world.now
    world.until(lambda: world.now > began + 2 * constraints.FREE_LATE_S, "time passes")
    request = world.scheduler.queues.requests["r2"]
    assert request.ahead
    world.add(SamplingParams(max_tokens=30, ignore_eos=True), nonce=2, names=["free"])
    world.until(lambda: world.reason("free"), "the free one ends")
    assert not request.ahead
    os.kill(world.process.pid, signal.SIGCONT)
    assert world.ended(*NAMES) == texts


def test_a_late_mask_holds_back_outputs_of_its_grammar_for_a_while(
    world: GrammarWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(world)
    os.kill(world.process.pid, signal.SIGSTOP)
    requests = world.scheduler.queues.requests
    world.until(lambda: not requests["r2"].ahead, "its mask is given up")
    os.kill(world.process.pid, signal.SIGCONT)
    wait_for_masks(monkeypatch)
    for name, ahead in (("soon", False), ("later", True)):
        world.add(FORMS[2], nonce=2 + ahead, names=[name])
        world.until(lambda name=name: name in requests and requests[name].output_ids, "a token")
        assert requests[name].ahead == ahead
        world.ended(name)
        world.now += constraints.SLOW_S


def test_preempted_requests_go_on_with_the_same_tokens(shared: GrammarWorld, texts: list[str]) -> None:
    names = [f"p{index}" for index in range(len(FORMS))]
    shared.add(*FORMS, nonce=2, names=names)
    shared.until(lambda: shared.added(2) is not None and len(shared.tokens("p0")) >= 2, "tokens")
    for name in names:
        shared.say(Preempt(request=name, mode="recompute"))
    assert shared.ended(*names) == texts
    shared.check()


def test_a_core_that_follows_goes_on_with_the_same_tokens(tmp_path: Path, texts: list[str]) -> None:
    first = GrammarWorld(tmp_path)
    begun(first)
    first.engine.commit()
    first.close()
    assert isinstance(first.journal, MemoryJournal)
    known = {name: list(first.tokens(name)) for name in NAMES}
    second = GrammarWorld(tmp_path, before=first)
    try:
        second.drained(0, 1)
        second.ready()
        second.run()
        assert second.ended(*NAMES) == texts
        assert all(second.tokens(name)[: len(known[name])] == known[name] for name in NAMES)
    finally:
        second.close()


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        (constrained(regex="(a"), "structured_outputs: .*unclosed group"),
        (constrained(regex="(?=a)b"), "look-around"),
        (constrained(regex="((a{1000}){1000}){1000}"), "too many expressions"),
        (constrained(json={"type": "objct"}), "Invalid type: objct"),
        (constrained(json={"if": {}}), 'Unimplemented keys: \\["if"\\]'),
        (constrained(json={"minimum": 2, "maximum": 1, "type": "integer"}), "structured_outputs: "),
        (constrained(json={"$ref": "http://127.0.0.1/x"}), "Default retriever does not fetch"),
        (constrained(grammar="start: ("), "structured_outputs: "),
        (constrained(grammar="root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000), "recursion"),
        (constrained(grammar="start: " + "(" * 20_000 + '"a"' + ")" * 20_000), "nested"),
        (constrained(json={"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {"type": "integer"}}} for j in range(4)]}
                                     for i in range(10)]}), "too large"),
    ],
)  # fmt: skip
def test_a_bad_grammar_is_refused_before_it_is_a_request(
    shared: GrammarWorld, sampling: SamplingParams, says: str
) -> None:
    nonce = 100 + len(shared.answers)
    shared.add(SamplingParams(max_tokens=2), sampling, nonce=nonce, names=["good", "bad"])
    shared.until(lambda: shared.added(nonce) is not None, "an answer")
    answer = shared.added(nonce)
    assert re.search(says, answer.error) and not answer.later and "\n" not in answer.error and not answer.requests
    assert shared.engine.outputs.get("good") is None and not shared.engine.requests.live()


def test_a_grammar_that_does_not_end_takes_no_masks_from_others(world: GrammarWorld, texts: list[str]) -> None:
    endless = constrained(json={"allOf": [{"type": "string", "pattern": f".*{index}.*"} for index in range(30)]})
    begun(world)
    masks = world.process.pid
    world.add(endless, nonce=2, names=["endless"])
    assert world.ended(*NAMES) == texts
    while world.added(2) is None:
        world.until(lambda: world.engine.constraints.checks._given, "it is compiled")
        world.now += grammar_process.ANSWER_S + 1
        world.turn()
    assert "it has ended 2 processes" in world.added(2).error and world.process.pid == masks
    world.add(endless, nonce=3, names=["endless"])
    assert "it has ended 2 processes" in world.added(3).error, "it is known"


def test_a_console_submits_and_is_refused(shared: GrammarWorld) -> None:
    for sampling, kind in ((constrained(regex="ab?"), Outcome), (constrained(regex="a{"), Refused)):
        shared.now += 1
        shared.say(Submit(prompt_token_ids=[5], sampling=sampling))
        name = f"c{shared._count}"
        shared.until(lambda name=name: isinstance(shared.answers_to(name)[-1], Outcome | Refused), "an end")
        assert isinstance(shared.last(name), kind)
    shared.until(lambda: not shared.engine.requests.live(), "the request ends")


def test_a_client_that_leaves_during_the_compile_has_no_request(shared: GrammarWorld) -> None:
    shared.add(constrained(regex="leaves[0-9]"), nonce=50, names=["gone"])
    shared.engine.offline.abort(AbortMany(session="s", requests=["gone"]))
    shared.add(constrained(regex="stays[0-9]"), nonce=51, names=["here"])
    shared.until(lambda: shared.added(51) is not None, "an answer")
    shared.ended("here")
    assert shared.added(50) is None and shared.engine.outputs.get("gone") is None


def test_the_mask_of_an_output_that_has_ended_goes_nowhere(world: GrammarWorld) -> None:
    """It is not scheduled ahead, and ends while the process has its question."""
    world.add(constrained(json=SCHEMA, presence_penalty=0.5), FORMS[0], names=["gone", "here"])
    world.until(lambda: world.added() is not None, "an answer")
    world.until(lambda: len(world.tokens("gone")) == 1, "its first token")
    (process,) = world.engine.constraints.masks.processes
    world.until(lambda: process.child.ready, "its start")  # Its successor would answer.
    os.kill(world.process.pid, signal.SIGSTOP)
    world.until(lambda: not world._socket.poll(50), "answers from before the stop")
    world.until(lambda: any(ask.tokens and ask.request.id == "gone" for ask in process._given.values()), "its question")
    world.engine.offline.abort(AbortMany(session="s", requests=["gone"]))
    world.until(lambda: process._gone, "the end of its matcher")
    os.kill(world.process.pid, signal.SIGCONT)
    assert re.fullmatch("[a-d]{3,9}x", *world.ended("here"))
    assert world.reason("gone") == "abort" and not process._gone
    world.check()


def test_minimum_and_ignored_end_of_sequence_lengthen_the_text_while_the_grammar_can(shared: GrammarWorld) -> None:
    shared.add(
        constrained(regex="a{1,30}", min_tokens=8), constrained(regex="a{1,30}", ignore_eos=True),
        constrained(choice=["yes"], min_tokens=20), constrained(choice=["yes"], ignore_eos=True),
        nonce=60, names=["m0", "m1", "m2", "m3"],
    )  # fmt: skip
    texts = shared.ended("m0", "m1", "m2", "m3")
    assert len(shared.tokens("m0")) > 8 or texts[0] == "a" * 30
    assert texts[1:] == ["a" * 30, "yes", "yes"]
    assert [shared.reason(f"m{index}") for index in range(4)] == ["stop"] * 4
