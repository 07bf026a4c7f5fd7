"""A scheduler, stages that execute its steps at random speed, and the core's part."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import scheduler_invariants
from desk_model import DeskModel
from ppengine.common.profile_sections import SchedulerConfig
from ppengine.core.scheduler import DoesNotFit, Refused, Scheduler, wait_reasons
from ppengine.core.scheduler.cache_copies import HostLimits
from ppengine.core.scheduler.request import Request
from ppengine.core.scheduler.retirement import Retirement
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.structured_outputs import StructuredOutputsParams
from ppengine.protocol.token_mask import TokenMask
from ppengine.protocol.verbs import MESSAGES
from stage_model import StageModel, contents, continuation

EOS = 3
STATES = ("waiting", "running", "swapped", "held", "loading")
DESK = ("find", "fetch", "answer", "give_up")
"""Operations of the store desk."""
CONSTRAINED = StructuredOutputsParams(regex="x")
"""A grammar; the world forces tokens that its stages would sample."""


class Clock:
    """A clock that moves one second at each reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class World:
    """Everything around one scheduler. `verify` runs after every operation."""

    def __init__(
        self, *, stages=2, num_blocks=24, num_host_blocks=12, block_size=4, max_model_len=48, max_num_seqs=8,
        max_num_batched_tokens=24, checked=True, host_cache=None, **config,
    ):  # fmt: skip
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, **config
        )
        self.scheduler = Scheduler(
            self.config, stages=stages, block_size=block_size, max_model_len=max_model_len, num_blocks=num_blocks,
            num_host_blocks=num_host_blocks, eos_token_ids=frozenset([EOS]), clock=Clock(),
            host_cache=host_cache,
        )  # fmt: skip
        self.model = StageModel(stages, num_blocks, block_size)
        self.host_cache: HostLimits | None = host_cache
        self.desk = DeskModel(self)
        self.all: dict[str, Request] = {}
        self.checked = checked
        self.results = []
        self.pending = []
        self.left: Counter = Counter()
        """Number of state changes that `verify` saw, by the state before."""
        self._states: dict[str, str] = {}
        self.finished: list[Request] = []
        self.resize: tuple[int, int | None] | None = None
        """Target, and the number of its map step once that was sent."""
        self.reports = []
        self.began: set[str] = set()
        """Ids of the requests that were once seen with device blocks."""
        self.max_in_flight = 0
        self.two_unretired = 0
        self.late_rows = self.given_up = 0
        self.forced = 0
        """Tokens that grammars have forced."""

    # --- requests -------------------------------------------------------------------------------------------

    def add(self, prompt, *, n=1, seed=0, name=None, priority=0, salt="", **sampling):
        """Add one prompt with `n` samples; return the requests."""
        sampling.setdefault("max_tokens", 8)
        params = SamplingParams(n=n, **sampling)
        name = name or f"r{len(self.all)}"
        fields = {"prompt_ids": list(prompt), "sampling": params, "seed": seed, "priority": priority}
        fields["cache_salt"] = salt
        leader = Request(id=name, **fields)
        group = [leader] + [Request(id=f"{name}.{i}", sample=i, leader=leader, **fields) for i in range(1, n)]
        self.scheduler.admit(group)
        self.all.update({request.id: request for request in group})
        self.verify()
        return group

    def expected(self, request):
        """Return the whole output that `request` must have."""
        sampling = request.sampling
        ignored = sampling.ignore_eos and not request.constrained
        stops = frozenset(sampling.stop_token_ids) | (frozenset() if ignored else {EOS})
        return continuation(
            request.prompt_ids, request.max_tokens, seed=request.seed, sample=request.sample, stops=stops,
            min_tokens=sampling.min_tokens,
        )  # fmt: skip

    def new(self):
        """Return the requests that never held a block, and whose sample 0 never did."""
        return [r for r in self.scheduler.queues.requests.values() if not {r.id, r.group} & self.began]

    def mask(self, request, most):
        """Give a constrained request the mask that it lacks, behind `most` forced tokens or up to its end."""
        del self.scheduler.queues.unmasked[request]
        begin, result = len(request.output_ids), Retirement(0)
        forced = self.expected(request)[begin : begin + most] if request.output_ids else []
        if request.fence is not None and request.fence.final:
            forced = []
        request.ahead = request.ahead or request.arrival % 2 == 0
        mask = TokenMask(b"%d" % (begin + len(forced)))
        self.scheduler.masks.take_all([(request, mask, forced)], result)
        self.forced += len(result.tokens)
        self.finished += result.finished
        self.verify()

    def give_up(self, request):
        """Let the step of a late row go on without its mask."""
        self.given_up += bool(request.late_step)
        self.scheduler.masks.give_up(request)
        self.verify()

    def pass_masks(self):
        """Send masks that came behind their steps, as the core does in each turn."""
        for message in self.scheduler.masks.complete():
            assert message.number not in self.model.late
            self.model.late[message.number] = message

    # --- steps ----------------------------------------------------------------------------------------------

    def schedule(self):
        """Let the scheduler make one step, if it can, and send it."""
        waiting, new = list(self.scheduler.queues.waiting), self.new()
        idle = not self.scheduler.steps.unretired and not self.scheduler.queues.running
        step = self.scheduler.schedule()
        if self.scheduler.batcher.cordon:
            assert all(request not in self.scheduler.queues.running for request in new), "one began under the cordon"
            waiting = [request for request in waiting if request not in new]
        admitted = [request.order() for request in waiting if request.state in ("running", "loading")]
        left = [request.order() for request in self.scheduler.queues.waiting if request in waiting]
        assert not admitted or not left or max(admitted) < min(left), "a later request was started first"
        if step is not None:
            self.late_rows += len(step.late)
            self.model.send(step)
            self._check_copies(step, idle)
            flying = sum(1 for record in self.scheduler.steps.unretired if self.model.steps[record.number - 1].rows)
            assert flying <= self.scheduler.depth
            tokens = sum(row.count for row in step.rows)
            assert tokens <= self.config.max_num_batched_tokens
            assert len({row.slot for row in step.rows}) == len(step.rows)
            assert len(self.scheduler.queues.running) <= self.config.max_num_seqs
            self.max_in_flight = max(self.max_in_flight, flying)
        self.verify()
        return step

    def _check_copies(self, step, idle):
        """Check the numbers of copies for the host cache; copies out alone make steps of an idle engine only."""
        record = self.scheduler.steps.unretired[-1]
        if self.host_cache is None:
            assert not record.entering and not record.filling
            return
        filled = sum(row.count for row in step.rows) // self.model.stages[0].block_size
        assert len(record.entering) <= self.host_cache.out_blocks + filled
        alone = all(request.state == "loading" for request in self.scheduler.queues.running)
        assert len(record.filling) <= max(self.host_cache.in_blocks, self.host_cache.in_alone * alone)
        size = self.model.stages[0].block_size
        for slot, digest in record.entering:
            owner = next(request for request in self.all.values() if digest in request.digests)
            end = (owner.digests.index(digest) + 1) * size
            self.model.whole[step.number, slot] = contents(owner.tokens(0, end))[-size:]
        alone = len(step.moves) == len(record.entering) and not step.rows and not step.release
        assert idle or not alone, "a step was made just for copies to the host"

    def retire(self):
        """Retire the next step that all stages have executed; None if there is none."""
        number = self.model.retirable()
        if number is None:
            return None
        result = self.scheduler.retire(number, self.model.sampled[number])
        self.model.retired = number
        self.finished += result.finished
        assert all(request.finished for request in result.finished)
        self.poll_resize(number)
        self.verify()
        return result

    def round(self):
        """Schedule and execute all steps, retire one; return whether anything happened."""
        sent = False
        for request in list(self.scheduler.queues.unmasked):
            self.mask(request, 2)
            sent = True
        self.pass_masks()
        while self.schedule() is not None:
            sent = True
        self.model.drain()
        self.poll_resize(None)
        self.model.drain()
        return self.retire() is not None or sent

    def run(self, limit=5000):
        """Repeat rounds until nothing happens."""
        for _ in range(limit):
            if not self.round():
                return
        raise AssertionError(f"still busy after {limit} rounds: {list(self.scheduler.queues.requests.values())}")

    def run_cordoned(self):
        """Run under a cordon until only new or held requests are left; lift the cordon."""
        scheduler = self.scheduler
        scheduler.batcher.cordon = scheduler.batcher.cordon or "stage 0 is cordoned by eve"
        self.run()
        new = self.new()
        assert all(request in new or request.state == "held" for request in scheduler.queues.requests.values())
        for request in new:
            code = wait_reasons.why(scheduler, request).code
            assert code == ("held" if request.state == "held" else "behind" if self.parked(request) else "cordoned")
        scheduler.batcher.cordon = ""

    def parked(self, request):
        """Return whether a request waits for the prompt of its sample 0."""
        return request.leader is not None and request in request.leader.followers

    # --- a lost stage, as the core recovers from it -----------------------------------------------------------

    def lose(self, stage):
        """Lose a stage: restart, map the blocks again and begin an unfinished resize again."""
        scheduler = self.scheduler
        held = [request for request in scheduler.queues.requests.values() if request.state == "held"]
        self.finished += scheduler.restart("stage lost")
        self.model.lose(stage)
        self.desk.lose()
        if self.checked:
            assert scheduler.blocks.device.cached == 0, "a block is found that no stage has"
        assert (scheduler.blocks.device.used, scheduler.blocks.host.used) == (0, 0)
        assert {request.state for request in scheduler.queues.requests.values()} <= {"waiting", "held"}
        assert all(request.state == "held" for request in held)
        self.settle()
        assert not self.pending, "an action was left that can never end"
        self.model.send(scheduler.resize.map_step(scheduler.blocks.device.size))
        if self.resize is not None:
            target, self.resize = self.resize[0], None
            self.begin_resize(target)
        self.verify()

    # --- resize, as a core does it --------------------------------------------------------------------------

    def begin_resize(self, target):
        """Begin a resize; return its plan."""
        plan = self.scheduler.resize.begin(target)
        if plan.refused is None:
            self.resize = (target, None)
            self.poll_resize(None)
        self.verify()
        return plan

    def poll_resize(self, retired):
        """Send the map step when the resize is ready; finish when it has retired."""
        if self.resize is None:
            return
        target, number = self.resize
        if number is None and self.scheduler.resize.ready():
            step = self.scheduler.resize.map_step(target)
            self.model.send(step)
            self.resize = (target, step.number)
        elif number is not None and retired == number:
            self.reports.append(self.scheduler.resize.finish(target))
            self.resize = None

    # --- checks ---------------------------------------------------------------------------------------------

    def verify(self):
        """Check the invariants of every moment."""
        scheduler = self.scheduler
        for request in scheduler.queues.requests.values():
            before, self._states[request.id] = self._states.get(request.id), request.state
            if before not in (None, request.state):
                self.left[before] += 1
            # One may lose its blocks in the same call that gave them.
            self.began.update([request.id] if request.blocks or request.admitted_time is not None else [])
            assert request.pending <= (2 if self.config.schedule_ahead else 1)
            if request.pending == 2:
                self.two_unretired += 1
        if self.checked:
            scheduler_invariants.check(scheduler, self.desk.reserved)
        counts = scheduler.queues.counts()
        alive = [request for request in scheduler.queues.requests.values() if not request.finished]
        numbers = msgspec.structs.astuple(counts)
        assert sum(numbers) == len(alive)
        assert min(numbers) >= 0
        self.settle()

    def settle(self):
        """Collect the results of actions that have ended."""
        for result in self.scheduler.fences.settled():
            assert result.state in ("applied", "superseded", "failed")
            assert result in self.pending
            self.pending.remove(result)
            self.results.append(result)

    def act(self, verb, *arguments):
        """Do an action; return its result, or the refusal."""
        try:
            effect = getattr(self.scheduler.actions, verb)(*arguments, by="eve")
        except Refused as refusal:
            assert refusal.text
            return refusal
        if effect.state == "pending":
            self.pending.append(effect)
        self.verify()
        return effect

    def verify_end(self):
        """Check that all blocks are free and that every output is as expected."""
        scheduler = self.scheduler
        assert not scheduler.queues.requests
        assert scheduler.blocks.device.used == 0
        assert scheduler.blocks.host.used == 0
        if (copies := scheduler.blocks.copies) is not None:
            assert (copies.loads, copies.cache.moving, copies.cache._pins) == ({}, 0, {})
        assert scheduler.blocks.device.free + scheduler.blocks.device.cached + 1 == scheduler.blocks.device.size
        assert not self.pending, self.pending
        for request in self.all.values():
            expected = self.expected(request)
            if request.finish_reason in ("stop", "length"):
                assert request.output_ids == expected, request
                assert request.finish_reason == ("stop" if expected[-1] in request.stops else "length")
            else:
                assert request.output_ids == expected[: len(request.output_ids)], request


class Driver:
    """Random operations on a world, from one seed."""

    def __init__(self, seed, *, constrained=False, salts=("",), **world):
        self.constrained = constrained
        """Whether half of the requests are."""
        self.random = random.Random(seed)
        self.salts, self.salting = salts, random.Random(seed)
        """Salts of prompts, drawn apart: all else is drawn as without them."""
        self.world = World(**world)
        self.start_blocks = self.world.scheduler.blocks.device.size
        self.counts: Counter = Counter()

    def pick(self):
        alive = [request for request in self.world.scheduler.queues.requests.values() if not request.finished]
        return self.random.choice(alive) if alive else None

    def step(self):
        """Do one random operation."""
        draw, world = self.random.random(), self.world
        world.pass_masks()
        late = [request for request in world.all.values() if request.late_step]
        if late and self.random.random() < 0.02:
            world.give_up(self.random.choice(late))
        elif (lacking := world.scheduler.queues.unmasked) and self.random.random() < 0.5:
            world.mask(self.random.choice(list(lacking)), self.random.choice([0, 0, 1, 5, 30]))
        elif draw < 0.30:
            if world.scheduler.paused and self.random.random() < 0.1:
                world.scheduler.paused = False
            if world.scheduler.batcher.cordon and self.random.random() < 0.05:
                world.scheduler.batcher.cordon = ""
            self.counts["schedule"] += world.schedule() is not None
        elif draw < 0.62:
            stages = [stage for stage in range(len(world.model.stages)) if world.model.can_run(stage)]
            if stages:
                world.model.run(self.random.choice(stages))
            else:
                world.retire()
        elif draw < 0.78:
            self.counts["retire"] += world.retire() is not None
        elif draw < 0.88:
            self.add()
        elif draw < 0.93 and world.host_cache is not None:
            what = self.random.choice(DESK)
            self.counts[what] += getattr(world.desk, what)(self.random.randrange(20))
            world.verify()
        elif draw < 0.985:
            self.act()
        else:
            self.disturb()

    def add(self):
        if len(self.world.scheduler.queues.requests) > 14:
            return
        draw = self.random
        shared = [7] * draw.choice([0, 4, 8, 9, 12, 16])
        prompt = shared + [draw.randrange(50) for _ in range(draw.choice([0, 1, 2, 3, 5, 11, 20]))] or [1]
        if self.world.host_cache is not None and draw.random() < 0.7:
            first = draw.choice([1, 21])  # One of two, so that it was there before.
            prompt = [first + place for place in range(draw.randrange(1, 34))]
        stop_ids = [draw.randrange(50)] if draw.random() < 0.2 else []
        tokens = draw.choice([1, 2, 6, 12, 30])
        constrained = self.constrained and draw.random() < 0.5
        # Two that begin alike and come together: the second one begins with blocks that are not written yet.
        for _ in range(draw.choice([1, 1, 2])):
            self._add(prompt, stop_ids, tokens, constrained)

    def _add(self, prompt, stop_ids, tokens, constrained):
        draw = self.random
        try:
            self.world.add(
                prompt, n=draw.choice([1, 1, 1, 2, 3]), seed=draw.randrange(3), max_tokens=tokens,
                min_tokens=0 if constrained else draw.choice([0, 0, min(3, tokens)]), stop_token_ids=stop_ids,
                structured_outputs=CONSTRAINED if constrained else None,
                ignore_eos=draw.random() < 0.3, priority=draw.choice([0, 0, 0, -1, 3]),
                salt=self.salting.choice(self.salts),
            )  # fmt: skip
            self.counts["add"] += 1
        except DoesNotFit as refusal:
            assert refusal.need > refusal.have
            self.counts["does not fit"] += 1

    def act(self):
        request = self.pick()
        if request is None:
            return
        draw, world = self.random, self.world
        fitting = {
            "waiting": ["preempt", "abort"],
            "running": ["preempt", "swap_out", "swap_out"],
            "swapped": ["swap_in", "preempt"],
            "held": ["release", "swap_in"],
        }.get(request.state, [])
        verb = draw.choice([*fitting, *fitting, "abort", "preempt", "swap_out", "swap_in", "release", "finish"])
        if verb == "finish":
            if draw.random() < 0.5:
                world.scheduler.retirement.finish(request.id, "stopped by text")
                world.verify()
                self.counts["finish"] += 1
            return
        arguments = {
            "preempt": [draw.choice([None, "recompute", "swap"]), draw.random() < 0.3],
            "swap_out": [draw.random() < 0.5],
        }.get(verb, [])
        planned = self.plan(verb, request, arguments)
        effect = world.act(verb, request.id, *arguments)
        assert isinstance(effect, Refused) == isinstance(planned, Refused)
        self.counts[f"{verb} {'refused' if isinstance(effect, Refused) else effect.state}"] += 1

    def plan(self, verb, request, arguments):
        """Return the dry run of an action, or its refusal; check that it changes nothing."""
        before = repr(request)
        message = MESSAGES[verb.replace("_", "-")]
        keywords = dict(zip(("mode", "hold") if verb == "preempt" else ("hold",), arguments, strict=False))
        try:
            answer = self.world.scheduler.actions.plan(message(request=request.id, **keywords), request.id, 1024)
        except Refused as refusal:
            answer = refusal
        assert repr(request) == before
        return answer

    def disturb(self):
        draw, world = self.random, self.world
        if draw.random() < 0.1:
            world.lose(draw.randrange(len(world.model.stages)))
            self.counts["lose a stage"] += 1
            return
        if draw.random() < 0.2:
            world.scheduler.batcher.cordon = "" if world.scheduler.batcher.cordon else "stage 0 is cordoned by eve"
            self.counts["cordon"] += 1
            return
        if world.scheduler.paused or draw.random() < 0.2:
            world.scheduler.paused = not world.scheduler.paused
            self.counts["pause"] += 1
            return
        floor = world.scheduler.resize.floor
        target = draw.randint(floor - 1, max(self.start_blocks, floor) + 6)
        superseding = world.resize is not None
        before = world.scheduler.blocks.device.size
        plan = world.scheduler.resize.plan(target)
        done = world.begin_resize(target)
        assert done == plan
        assert (plan.refused is not None) == (target < floor)
        if plan.refused is None:
            kind = "grow" if target >= before else "shrink"
            self.counts[f"{kind} superseding" if superseding else kind] += 1
            self.counts["shrink moves"] += plan.move
            self.counts["shrink swaps"] += plan.swap_requests
            self.counts["shrink recomputes"] += plan.recompute_requests

    def finish(self):
        """End holds, fetches and pauses and run to the end: no request may starve."""
        world = self.world
        world.scheduler.paused = False
        world.desk.settle()
        world.run_cordoned()
        for _ in range(200):
            world.run()
            held = [request for request in world.scheduler.queues.requests.values() if request.state == "held"]
            if not held:
                break
            for request in held:
                world.act("release", request.id)
        world.run()
        world.verify_end()
