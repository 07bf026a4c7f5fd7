"""Live checks in the core: one step for all stages, one end a switch, findings told once, the reference fed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from core_world import CoreWorld
from ppengine.protocol.check_messages import LedgerPicture, ShadowAnswer, ShadowReady, ShadowTask, StageFindings
from ppengine.protocol.control import Accepted, Outcome, Refused
from ppengine.protocol.reports import Finding, StageLedger
from ppengine.protocol.steps import Check
from ppengine.protocol.verbs import Pause, SetCheck


@pytest.fixture
def world() -> CoreWorld:
    return CoreWorld(stages=3)


def switch(world, check, mode="on", **fields):
    """Ask for a switch, retire what was sent, and return its last answer."""
    share = fields.pop("share", None)
    world.say(SetCheck(check=check, mode=mode, share=share), **fields)
    name = f"c{world._count}"
    world.run()
    return world.last(name)


def tell(world, stage, check, *found):
    """Let a stage say what a check has found: (summary, step) pairs."""
    cause = "non_finite" if check is Check.FINITE else "stream_order"
    world.engine.stage_messages.take(
        StageFindings(
            generation=world.scheduler.steps.generation,
            stage=stage,
            rank=0,
            check=check,
            findings=[Finding(stage=stage, cause=cause, summary=text, since_s=1.0) for text, _ in found],
            steps=[step for _, step in found],
        )
    )


def on_a_gpu(world, stage):
    """Let a stage be on a GPU."""
    record = world.engine.stages.leader(stage)
    record.ready = msgspec.structs.replace(record.ready, device_kind="cuda")


def finding_texts(world):
    return [finding.summary for finding in world.engine.reporter.build().findings]


def test_a_switch_is_one_step_and_ends_when_every_stage_has_retired_it(world):
    world.say(SetCheck(check="ledger"))
    step = world.steps[-1]
    assert (step.checks, step.rows) == (Check.LEDGER, [])
    assert [type(answer) for answer in world.answers_to("c1")] == [Accepted]
    world.retire()
    end = world.last("c1")
    assert isinstance(end, Outcome)
    assert (end.state, end.step) == ("applied", step.number)
    assert end.text == f"in all stages from step {step.number} on"


@pytest.mark.parametrize(
    ("check", "words", "end"),
    [
        ("ledger", "a graph is one launch", ""),
        ("strict", "each attention and MLP", "; stages on GPUs run without graphs meanwhile"),
        ("finite", "graphs", "; stages on GPUs run without graphs meanwhile"),
    ],
)
def test_what_a_check_does_on_a_gpu_is_said(world, check, words, end):
    on_a_gpu(world, 1)
    plan = switch(world, check, dry_run=True)
    assert isinstance(plan, Outcome) and words in plan.text
    assert switch(world, check).text == f"in all stages from step {world.scheduler.steps.number} on{end}"
    off = switch(world, check, "off")
    assert isinstance(off, Outcome) and "graphs" not in off.text


def test_checksum_is_on_from_the_start_and_is_switched_on_gpus(world):
    on_a_gpu(world, 1)
    assert world.engine.reporter.build().engine.checks.checksum
    assert switch(world, "checksum", dry_run=True).text == "checksum is on already"
    world.say(SetCheck(check="checksum", mode="off"))
    assert world.steps[-1].checks == Check.NO_CHECKSUM
    world.run()
    assert not world.engine.reporter.build().engine.checks.checksum
    assert "; devices of stages on GPUs make it" in switch(world, "checksum", dry_run=True).text
    assert switch(world, "checksum").text == f"in all stages from step {world.scheduler.steps.number} on"
    assert world.engine.reporter.build().engine.checks.checksum


def test_dummies_of_gpus_have_no_reference():
    world = CoreWorld(stages=3, load_format="dummy")
    on_a_gpu(world, 1)
    refused = switch(world, "shadow")
    assert isinstance(refused, Refused) and refused.code == "UNSUPPORTED"
    assert refused.text == "the weights are dummies, and stages 1 on GPUs have drawn others than a CPU would"


@pytest.mark.parametrize("gpus", [False, True])
def test_the_reference_is_told_of_gpus(world, children, gpus):
    if gpus:
        on_a_gpu(world, 1)
    assert ("float32" in switch(world, "shadow", dry_run=True).text) == gpus
    shadow_on(world, 0.25)
    assert ("--gpus" in children[0].args) == gpus


def test_switches_add_up_and_are_shown(world):
    for check, flags in (("ledger", 1), ("finite", 5), ("strict", 7)):
        world.say(SetCheck(check=check))
        assert world.steps[-1].checks == flags
    world.run()
    switch(world, "ledger", "off")
    info = world.engine.reporter.build().engine.checks
    assert (info.ledger, info.strict, info.finite, info.shadow) == (False, True, True, 0.0)
    assert info.step == world.scheduler.steps.number


def test_a_switch_while_paused_and_with_requests_in_flight(world):
    world.submit(max_tokens=20)
    world.say(Pause(mode="keep"))
    assert switch(world, "finite").state == "applied"


def test_a_dry_run_changes_nothing(world):
    for check in ("ledger", "strict", "finite", "shadow"):
        end = switch(world, check, dry_run=True)
        assert (end.state, len(end.plan)) == ("planned", 1)
    assert world.engine.reporter.build().engine.checks.ledger is False
    assert not world.steps
    assert "1.00% of the steps" in end.text
    assert switch(world, "ledger", "off", dry_run=True).text == "ledger is off already"


@pytest.mark.parametrize(
    ("verb", "says"),
    [
        (SetCheck(check="finite", share=0.5), "check finite on has no share; only `shadow on` does"),
        (SetCheck(check="shadow", share=0.0), "the share is 0; it must be above 0 and at most 1"),
        (SetCheck(check="shadow", share=float("nan")), "the share is nan; it must be above 0"),
    ],
)
def test_what_cannot_be_is_refused(world, verb, says):
    (answer,) = world.say(verb)
    assert isinstance(answer, Refused)
    assert answer.code == "INVALID"
    assert answer.text.startswith(says)


def test_findings_are_reported_with_their_age_and_told_once(world):
    tell(world, 1, Check.LEDGER, ("first", 0))
    tell(world, 1, Check.LEDGER, ("first", 0), ("second", 0))
    tell(world, 1, Check.LEDGER, ("first", 0), ("second", 0))
    assert finding_texts(world) == ["first", "second"]
    assert world.engine.reporter.build().findings[0].since_s >= 1.0
    assert [event.text for event in world.events if event.kind == "check.stream_order"] == ["first", "second"]
    assert world.engine.reporter.build().engine.checks.findings == 2
    tell(world, 1, Check.LEDGER)
    assert finding_texts(world) == []


def test_of_values_that_are_not_finite_the_first_stage_is_told(world):
    """Stage 2 got in step 9 what stage 1 had made in step 9; what stage 0 does in step 12 is another matter."""
    tell(world, 2, Check.FINITE, ("stage 2 has it from stage 1", 9))
    tell(world, 1, Check.FINITE, ("stage 1 makes it", 9))
    assert finding_texts(world) == ["stage 1 makes it"]
    tell(world, 0, Check.FINITE, ("stage 0 makes it later", 12))
    assert sorted(finding_texts(world)) == ["stage 0 makes it later", "stage 1 makes it"]


def test_what_an_older_generation_found_does_not_count(world):
    message = StageFindings(generation=99, stage=0, rank=0, check=1, findings=[], steps=[])
    finding = Finding(stage=0, cause="stream_order", summary="old", since_s=0.0)
    world.engine.stage_messages.take(msgspec.structs.replace(message, findings=[finding], steps=[0]))
    assert finding_texts(world) == []


def test_stages_that_begin_anew_are_told_what_is_on(world):
    switch(world, "finite")
    tell(world, 1, Check.FINITE, ("stage 1 makes it", 9))
    world.say(SetCheck(check="ledger"))
    world.steps.clear()  # Lost with a stage, and its step with it.
    world.engine.checks.restate(world.scheduler)
    assert world.steps[-1].checks == Check.FINITE | Check.LEDGER
    assert finding_texts(world) == []


def test_the_ledger_says_how_old_it_is(world):
    switch(world, "ledger")
    empty = StageLedger(stage=1, rank=0, streams=[], handoffs=[], buffers=[])
    world.engine.stage_messages.take(LedgerPicture(generation=world.generation, ledger=empty))
    world.now += 3.5
    (told_of,) = world.engine.checks.ledger(None).stages
    assert (told_of.stage, told_of.age_s) == (1, 3.5)
    assert world.engine.checks.ledger(0).stages == []


# --- the reference ------------------------------------------------------------------------------------------


class Child:
    """A reference process that only the test ends."""

    def __init__(self):
        self.code = None

    def poll(self):
        return self.code

    def kill(self):
        self.code = -9

    def wait(self, timeout):
        return self.code

    def close(self):
        pass

    def info(self, role):
        class Info:
            detail = "no such checkpoint"

        return Info


@pytest.fixture
def children(monkeypatch):
    made = []

    def spawn(module, args, *, log):
        assert module == "ppengine.shadow"
        made.append(Child())
        made[-1].args = args
        return made[-1]

    monkeypatch.setattr("ppengine.core.shadow_check.spawn", spawn)
    return made


def tasks(world):
    return [msgspec.msgpack.decode(body, type=ShadowTask) for body in world.shadow_tasks]


def shadow_on(world, share):
    """Switch the shadow check on with a reference that is ready; return the command's id."""
    world.say(SetCheck(check="shadow", share=share))
    name = f"c{world._count}"
    assert [type(answer).__name__ for answer in world.answers_to(name)] == ["Accepted", "Deferred"]
    world.engine.stage_messages.take(ShadowReady(weights_bytes=1))
    assert world.last(name).state == "applied"
    return name


def test_the_reference_gets_a_share_of_the_steps_and_greedy_requests_alone(world, children):
    shadow_on(world, 0.25)
    world.submit(max_tokens=40, name="greedy")
    world.submit(max_tokens=40, name="random", temperature=1.0)
    world.submit(max_tokens=40, name="adjusted", presence_penalty=1.0)
    world.engine.advance()
    steps = 0
    while world.steps:
        world.retire()
        steps += 1
        if tasks(world) and world.engine.checks.shadow._busy:
            world.engine.stage_messages.take(ShadowAnswer(nonce=tasks(world)[-1].nonce, compared=3))
    asked = tasks(world)
    assert {task.request for task in asked} == {"greedy"}
    assert 8 <= len(asked) <= 11, "a quarter of the 40 steps that sample for it"
    for task in asked:
        assert task.prompt_ids == [1, 2, 3]
        assert task.first == 0
    assert [len(task.output_ids) for task in asked] == sorted({len(task.output_ids) for task in asked})
    info = world.engine.reporter.build().engine.checks
    assert (info.shadow, info.shadow_state, info.shadow_compared) == (0.25, "ready", 3 * len(asked))
    assert info.shadow_skipped == 0


def test_steps_that_come_while_it_is_busy_are_left_out_and_counted(world, children):
    shadow_on(world, 1.0)
    world.submit(max_tokens=10)
    world.run()
    assert len(tasks(world)) == 1
    assert world.engine.checks.shadow.skipped == 9


def test_a_difference_is_a_finding_until_it_is_switched_off(world, children):
    shadow_on(world, 1.0)
    world.submit(max_tokens=3)
    world.run()
    finding = Finding(stage=None, cause="mismatch", summary="request r: token 5 at position 4", since_s=0.0)
    for _ in range(2):
        world.engine.stage_messages.take(ShadowAnswer(nonce=1, compared=1, difference=finding))
    assert finding_texts(world) == ["request r: token 5 at position 4"]
    assert [event.text for event in world.events if event.kind == "check.mismatch"] == [finding.summary]
    assert switch(world, "shadow", "off").state == "applied"
    assert finding_texts(world) == []
    assert children[0].code == -9
    assert world.engine.reporter.build().engine.checks.shadow == 0.0


def test_a_task_that_went_before_the_reference_was_there_does_not_block_it(world, children):
    """The word of a reference that was switched off comes after the start of the next one."""
    world.say(SetCheck(check="shadow", share=1.0))
    assert switch(world, "shadow", "off").state == "applied"
    shadow_on(world, 1.0)
    world.submit(max_tokens=9)
    world.engine.advance()
    world.retire()
    assert len(tasks(world)) == 1, "no process gets it"
    world.engine.stage_messages.take(ShadowReady(weights_bytes=1))
    world.retire()
    assert len(tasks(world)) == 2


def test_a_reference_that_cannot_load_fails_the_switch(world, children):
    world.say(SetCheck(check="shadow"))
    children[0].code = 1
    world.run()
    end = world.last("c1")
    assert (end.state, end.text) == ("failed", "the reference has ended: no such checkpoint")
    assert world.engine.reporter.build().engine.checks.shadow_state == "ended: no such checkpoint"
    shadow_on(world, 0.5)


def test_a_reference_that_cannot_be_started_fails_the_switch(world):
    """There is no room for its log, or no process: the core goes on, and so does one that follows another."""
    assert not Path(world.engine.config.run_dir).exists()
    world.say(SetCheck(check="shadow"))
    end = world.last("c1")
    assert end.state == "failed" and end.text.startswith("the reference cannot be started: [Errno 2]")
    world.engine.checks.shadow.resume(0.5)
    info = world.engine.reporter.build().engine.checks
    assert info.shadow == 0.0 and info.shadow_state.startswith("cannot be started: [Errno 2]")
    world.submit(max_tokens=3)
    world.run()


def test_the_share_changes_while_it_runs(world, children):
    shadow_on(world, 0.5)
    assert switch(world, "shadow", share=1.0).state == "applied"
    assert len(children) == 1
    assert world.engine.checks.shadow.share == 1.0
