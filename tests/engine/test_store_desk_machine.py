"""Random lives of the store desk: stores answer late, short, twice or never, die and come back.

Every request leaves `finding` and `fetching`, no slot is lost or used twice, and each job ends once.
"""

import functools
from collections import Counter

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from ppengine.common.tier_config import BackendConfig
from ppengine.core.tiers.backends import Backend
from ppengine.protocol.place import Place
from ppengine.protocol.store_messages import Clear, Fetch, Find, Mark, Put, Weights
from ppengine.protocol.store_messages import Test as Probe
from ppengine.protocol.store_verbs import StoreClear, StoreDrain, StorePause, StoreRemove, StoreResume, StoreTest
from ppengine.protocol.verbs import Abort, Release, SwapOut
from tier_world import CHUNK, Disk, TierWorld

VERBS = (StorePause, StoreResume, StoreDrain, StoreTest, StoreClear)
HEADS = range(3, 15)
"""Tokens of prompts: three chunks of each are in a backend at the beginning."""
PICK = st.integers(0, 10_000)
FAULTS = ("", "", "", "", "error", "short", "corrupt", "twice")
KINDS = {
    "submit": 16, "find": 8, "answer": 24, "compute": 6, "wait": 8, "verb": 2, "answer_all": 1, "kill": 2,
    "lose_stage": 3, "manage": 2, "replace": 1,
}  # fmt: skip
"""Operations and their relative frequency."""


@functools.cache
def filled():
    """Return a disk with three chunks of each head."""
    world = TierWorld()
    for head in HEADS:
        world.fill([head] * (3 * CHUNK + 1))
    assert len(world.disk.markers) == 3 * len(HEADS)
    return world.disk


class StoreDeskMachine(RuleBasedStateMachine):
    """A core, its stages and its stores."""

    @initialize(
        write=st.sampled_from(["always", "reused", "evicted"]), slots=st.sampled_from([96, 200, 640]),
        measured=st.booleans(),
    )  # fmt: skip
    def begin(self, write, slots, measured):
        backends = {name: BackendConfig(kind="files", url=f"/{name}", write=write) for name in ("nvme0", "s3")}
        disk = Disk()
        disk.shards, disk.markers = dict(filled().shards), dict(filled().markers)
        self.world = world = TierWorld(disk=disk, swap_blocks=slots, backends=backends, fetches=3, measured=measured)
        self.count, self.faults = 0, Counter()
        self.ends, self.settled = Counter(), Counter()
        jobs = world.engine.tiers.jobs
        opened = jobs.open

        def counted(places, seconds, end, settle=lambda job: None, **fields):
            def ended(job):
                self.ends[job.number] += 1
                end(job)

            def settled(job):
                self.settled[job.number] += 1
                assert self.ends[job.number] == 1, "a job is settled before its end"
                settle(job)

            return opened(places, seconds, ended, settled, **fields)

        jobs.open = counted

    @rule(kind=st.sampled_from([kind for kind, share in KINDS.items() for _ in range(share)]), first=PICK, second=PICK)
    def act(self, kind, first, second):
        """Do one thing; the numbers choose what."""
        getattr(self, kind)(first, second)

    # --- requests -------------------------------------------------------------------------------------------

    def submit(self, first, second):
        """Submit a prompt of whole chunks and a tail."""
        self.count += 1
        chunks, tail = divmod(second, 3)
        prompt = [HEADS[first % len(HEADS)]] * ((1 + chunks % 4) * CHUNK) + [tail + 1] * (tail + 1)
        self.world.submit(prompt, name=f"r{self.count}", max_tokens=2)

    def verb(self, first, second):
        """Abort, hold or release a request."""
        if self.count:
            self.world.say((Abort, SwapOut, Release)[second % 3](request=f"r{first % self.count + 1}"))

    def compute(self, first, second):
        """Take turns."""
        self.world.run((1, 3, 1000)[first % 3])

    def wait(self, first, second):
        """Let time pass, with stores that live."""
        self.world.now += (0.03, 0.03, 0.15, 0.5, 2.5)[first % 5]
        for store in self.world.stores.values():
            store.figures()
        self.world.engine.advance()

    # --- stores ---------------------------------------------------------------------------------------------

    def answer(self, first, second):
        """Answer a job, perhaps with an error."""
        jobs = self.world.jobs((object, Find, Fetch, Put)[first % 4]) or self.world.jobs()
        if not jobs:
            return
        store, number = jobs[first // 4 % len(jobs)]
        job, fault = store.jobs[number], FAULTS[second % len(FAULTS)]
        self.faults[fault, type(job)] += 1
        good = {"": None, "twice": None, "short": 1, "corrupt": 1}.get(fault, 0)
        store.answer(number, good=good, error="" if good is None else "broken", corrupt=fault == "corrupt")
        slots = [slot for chunk in job.slots for slot in chunk] if isinstance(job, Fetch) else []
        if fault == "twice" and self.world.cache._reserved.issuperset(slots):
            store.jobs[number] = job
            store.answer(number)
        self.world.engine.advance()

    def find(self, first, second):
        """Answer all questions about chunks."""
        self.world.answer_all(Find)

    def answer_all(self, first, second):
        """Answer all jobs."""
        self.world.answer_all()

    def kill(self, first, second):
        """End a store, or start it again."""
        place = Place(first % 2, 0)
        if place in self.world.stores:
            self.world.kill(place, reported=bool(second % 2))
        else:
            self._start(place)

    def _start(self, place):
        self.world.start(place)
        if place == (0, 0):
            self.world.stores[place].say(Weights(b"w"))

    def lose_stage(self, first, second):
        """End a stage."""
        self.world.lose_stage(first % 2)

    def manage(self, first, second):
        """Carry out a verb on a backend."""
        self.world.say(VERBS[first % len(VERBS)](backend=("nvme0", "s3")[second % 2]))

    def replace(self, first, second):
        """Remove a backend, or add it again."""
        backends = self.world.engine.tiers.backends
        if backends.get("s3") is not None:
            self.world.say(StoreRemove(backend="s3"))
        else:
            backends.add(Backend("s3", BackendConfig(kind="files", url="/s3", write="always")))
            self.world.engine.tiers.changed()

    # --- what always holds ----------------------------------------------------------------------------------

    @invariant()
    def slots_are_right(self):
        if hasattr(self, "world"):
            self.world.check_tiers()
            assert max(self.ends.values(), default=0) <= 1
            assert max(self.settled.values(), default=0) <= 1

    def teardown(self):
        """Let all stores come and answer: nothing is left behind."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for number in range(1, self.count + 1):
            world.say(Release(request=f"r{number}"))
        for place in world.engine.stages.places:
            if place not in world.stores:
                self._start(place)
        for _ in range(4):
            world.now += 35.0
            for store in world.stores.values():
                store.figures()
            world.answer_all()
        assert not world.scheduler.queues.aside
        assert not world.scheduler.queues.requests, "a request has not ended"
        assert not world.cache.moving and not world.cache._pins
        assert not [job for _, job in world.jobs(Fetch | Put | Find | Mark | Clear | Probe)]
        assert not len(world.engine.tiers.jobs)
        assert self.ends.keys() == self.settled.keys() and set(self.settled.values()) <= {1}
        world.check_tiers()
        world.check()


TestStoreDesk = StoreDeskMachine.TestCase
TestStoreDesk.settings = settings(
    max_examples=40,
    stateful_step_count=100,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    phases=[Phase.generate],
)
