"""The scheduler as a state machine of hypothesis; the checks are those of `World`."""

from collections import Counter
from math import prod

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from ppengine.core.scheduler import Refused, wait_reasons
from scheduler_world import STATES, World

SETTINGS = settings(
    max_examples=80, stateful_step_count=250, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
OPERATIONS = 10_000
"""Minimum number of operations that change something."""
KINDS = {
    "schedule": 8, "execute": 60, "retire": 6, "add": 8, "act": 20, "resize": 2, "disturb": 3,
}  # fmt: skip
"""Operations and their relative frequency."""
ACTS = [
    ("finish",), ("abort",), *[("preempt", None, False)] * 2, ("preempt", "recompute", True), ("preempt", "swap", True),
    ("swap_out", True), *[("swap_out", False)] * 2, *[("swap_in",)] * 2, *[("release",)] * 4,
    *[("prioritize", priority) for priority in (-1, 0, 0, 2)],
]  # fmt: skip
INDEX = range(21)
ARGUMENTS = {
    "execute": (INDEX,),
    "add": ([0, 4, 8, 11], range(1, 13), range(50), range(1, 4), [1, 4, 12], [False, True]),
    "act": (INDEX, ACTS),
    "resize": (range(-1, 26),),
    "disturb": (["lose", "pause", "cordon", *["go on"] * 5], INDEX),
}


def numbers(choices):
    """Draw the number of a combination: a draw for each argument took more time than the scheduler."""
    return st.integers(0, prod(map(len, choices)) - 1)


DRAWN_KIND = st.sampled_from([kind for kind, share in KINDS.items() for _ in range(share)])
DRAWN_NUMBER = {kind: numbers(choices) for kind, choices in ARGUMENTS.items()}


@st.composite
def operations(draw):
    """Draw the name of a method of the machine, and its arguments."""
    kind, arguments = draw(DRAWN_KIND), []
    number = draw(DRAWN_NUMBER[kind]) if kind in DRAWN_NUMBER else 0
    for choices in ARGUMENTS.get(kind, ()):
        number, place = divmod(number, len(choices))
        arguments.append(choices[place])
    return kind, *arguments


OPERATION = operations()


class SchedulerMachine(RuleBasedStateMachine):
    """Anything a core may do, in any order, while stages execute at their own pace.

    It has one rule: hypothesis leaves out rules at random, and a pipeline that does not move shows nothing.
    """

    world: World
    done: Counter[str]
    """Operations of all runs that changed something."""
    worlds: list[World]

    @initialize(
        stages=st.integers(1, 4),
        ahead=st.booleans(),
        preemption=st.sampled_from(["recompute", "swap"]),
        num_blocks=st.sampled_from([14, 20, 32]),
        num_host_blocks=st.sampled_from([0, 8, 20]),
        budget=st.sampled_from([1, 6, 32]),
        seqs=st.sampled_from([1, 4, 8]),
        caching=st.booleans(),
    )
    def boot(self, stages, ahead, preemption, num_blocks, num_host_blocks, budget, seqs, caching):
        self.world = World(
            stages=stages, schedule_ahead=ahead, preemption=preemption, num_blocks=num_blocks,
            num_host_blocks=num_host_blocks, max_num_batched_tokens=budget, max_num_seqs=seqs, prefix_caching=caching,
        )  # fmt: skip
        self.worlds.append(self.world)

    @rule(operation=OPERATION)
    def do(self, operation):
        kind, *arguments = operation
        self.done[kind] += bool(getattr(self, kind)(*arguments))

    # --- operations; each returns whether it changed something ------------------------------------------------

    def schedule(self):
        """Make a step. If there is none, every request that does not run has a reason."""
        if self.world.schedule() is not None:
            return True
        for request in self.alive():
            why = wait_reasons.why(self.world.scheduler, request)
            assert why is None or (why.code and why.text)
            assert why is not None or request.state == "running"
        return False

    def execute(self, index):
        """Let a stage execute a step. If none can, retire or schedule one."""
        model = self.world.model
        ready = [stage for stage in range(len(model.stages)) if model.can_run(stage)]
        if not ready:
            return self.retire() or self.schedule()
        model.run(ready[index % len(ready)])
        return True

    def retire(self):
        return self.world.retire() is not None

    def add(self, shared, own, first, n, tokens, ignore_eos):
        if len(self.world.scheduler.queues.requests) > 9:
            return False
        prompt = [7] * shared + [(first + index) % 50 for index in range(own)]
        self.world.add(prompt, n=n, max_tokens=tokens, seed=first % 3, ignore_eos=ignore_eos)
        return True

    def act(self, index, act):
        alive = self.alive()
        if not alive:
            return False
        request, (verb, *arguments) = alive[index % len(alive)], act
        if verb == "finish":
            self.world.scheduler.retirement.finish(request.id, "stop text")
            self.world.verify()
            return True
        revision = request.revision
        effect = self.world.act(verb, request.id, *arguments)
        done = not isinstance(effect, Refused)
        changes = done and not (verb == "prioritize" and effect.text.startswith("nothing changes"))
        assert request.revision == revision + changes
        return changes

    def resize(self, more):
        scheduler = self.world.scheduler
        plan = scheduler.resize.plan(scheduler.resize.floor + more)
        assert self.world.begin_resize(scheduler.resize.floor + more) == plan
        return plan.refused is None

    def disturb(self, what, index):
        """Lose a stage, pause or cordon; or end a pause and a cordon."""
        scheduler = self.world.scheduler
        before = scheduler.paused, scheduler.batcher.cordon
        if what == "lose":
            self.world.lose(index % len(self.world.model.stages))
        elif what == "pause":
            scheduler.paused = True
        elif what == "cordon":
            scheduler.batcher.cordon = "stage 0 is cordoned by eve"
        else:
            scheduler.paused, scheduler.batcher.cordon = False, ""
        return what == "lose" or before != (scheduler.paused, scheduler.batcher.cordon)

    # --- beside -----------------------------------------------------------------------------------------------

    def alive(self):
        return [request for request in self.world.scheduler.queues.requests.values() if not request.finished]

    def teardown(self):
        """End holds and pauses and run to the end: no request starves, all blocks are free."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.scheduler.paused = False
        world.run_cordoned()
        world.run()
        while held := [request for request in self.alive() if request.state == "held"]:
            for request in held:
                world.act("release", request.id)
            world.run()
        world.verify_end()


@pytest.mark.timeout(600)  # Operations are its bound: they take 15 s of a core.
def test_ten_thousand_operations():
    done, worlds = SchedulerMachine.done, SchedulerMachine.worlds = Counter(), []
    run_state_machine_as_test(SchedulerMachine, settings=SETTINGS)
    assert done.total() >= OPERATIONS, done
    assert set(done) == set(KINDS)
    for state in STATES:
        assert sum(world.left[state] for world in worlds) >= 10, f"{state} is reached and left again"
    assert sum(world.two_unretired for world in worlds) > 100, "decode steps of a request that follow each other"
    assert sum(world.max_in_flight >= 2 for world in worlds) > 10, "two steps in flight"
