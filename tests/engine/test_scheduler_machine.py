"""The scheduler as a state machine that hypothesis drives and shrinks; the checks are those of `World`."""

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from ppengine.scheduler import Refused
from scheduler_world import World

TOKENS = st.integers(0, 49)


class SchedulerMachine(RuleBasedStateMachine):
    """Anything a core may do, in any order, while stages execute at their own pace."""

    world: World

    @initialize(
        stages=st.integers(1, 4),
        ahead=st.booleans(),
        preemption=st.sampled_from(["recompute", "swap"]),
        num_blocks=st.sampled_from([14, 20, 32]),
        num_host_blocks=st.sampled_from([0, 4, 20]),
        budget=st.sampled_from([1, 6, 32]),
        seqs=st.sampled_from([1, 4]),
        caching=st.booleans(),
    )
    def boot(self, stages, ahead, preemption, num_blocks, num_host_blocks, budget, seqs, caching):
        self.world = World(
            stages=stages, schedule_ahead=ahead, preemption=preemption, num_blocks=num_blocks,
            num_host_blocks=num_host_blocks, max_num_batched_tokens=budget, max_num_seqs=seqs, prefix_caching=caching,
        )  # fmt: skip

    def alive(self):
        return [request for request in self.world.scheduler.requests.values() if not request.finished]

    def some(self, index):
        alive = self.alive()
        return alive[index % len(alive)].id

    @precondition(lambda self: len(self.world.scheduler.requests) < 10)
    @rule(
        shared=st.sampled_from([0, 4, 8, 11]), own=st.lists(TOKENS, min_size=1, max_size=12), n=st.integers(1, 3),
        tokens=st.sampled_from([1, 4, 20]), seed=st.integers(0, 2), ignore_eos=st.booleans(),
    )  # fmt: skip
    def add(self, shared, own, n, tokens, seed, ignore_eos):
        self.world.add([7] * shared + own, n=n, max_tokens=tokens, seed=seed, ignore_eos=ignore_eos)

    @rule()
    def schedule(self):
        self.world.schedule()

    @rule(stage=st.integers(0, 3))
    def execute(self, stage):
        stage %= len(self.world.model.stages)
        if self.world.model.can_run(stage):
            self.world.model.run(stage)

    @rule()
    def retire(self):
        self.world.retire()

    @rule()
    def a_round(self):
        self.world.round()

    @precondition(lambda self: self.alive())
    @rule(
        index=st.integers(0, 20),
        act=st.sampled_from(
            [
                ("abort",), ("preempt", None, False), ("preempt", "recompute", True), ("preempt", "swap", True),
                ("swap_out", True), ("swap_out", False), ("swap_in",), ("release",),
            ]
        ),
    )  # fmt: skip
    def act(self, index, act):
        verb, *arguments = act
        name = self.some(index)
        revision = self.world.all[name].revision
        effect = self.world.act(verb, name, *arguments)
        assert self.world.all[name].revision == revision + (not isinstance(effect, Refused))

    @precondition(lambda self: self.alive())
    @rule(index=st.integers(0, 20))
    def finish(self, index):
        self.world.scheduler.finish(self.some(index), "stop text")
        self.world.verify()

    @rule(more=st.integers(-1, 25))
    def resize(self, more):
        scheduler = self.world.scheduler
        plan = scheduler.plan_resize(scheduler.floor + more)
        assert self.world.begin_resize(scheduler.floor + more) == plan

    @rule(stage=st.integers(0, 3))
    def lose(self, stage):
        self.world.lose(stage % len(self.world.model.stages))

    @rule()
    def pause(self):
        self.world.scheduler.paused = not self.world.scheduler.paused

    @rule()
    def cordon(self):
        self.world.scheduler.cordon = "" if self.world.scheduler.cordon else "stage 0 is cordoned by eve"

    @rule()
    def ask_why(self):
        for request in self.alive():
            why = self.world.scheduler.why(request)
            assert why is None or (why.code and why.text)
            assert why is not None or request.state == "running"

    def teardown(self):
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


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
