"""Pure parts of the store desk: jobs, known chunks, costs, names."""

import itertools

import msgspec
import pytest
from ppengine.common.tier_config import BackendConfig
from ppengine.core.tiers.backends import TRY_S, Backends
from ppengine.core.tiers.chunks import chunk_blocks, chunks_of
from ppengine.core.tiers.fetch_costs import TRIAL_S, Costs
from ppengine.core.tiers.jobs import Jobs
from ppengine.core.tiers.known_chunks import ABSENT_S, KnownChunks
from ppengine.core.tiers.namespace import Shape, namespace_of
from ppengine.protocol.place import Place
from ppengine.protocol.store_messages import Done, FoundChunk, Marker

A, B = Place(0, 0), Place(1, 0)


class Desk:
    """Jobs with a clock, and everything that happened to them."""

    def __init__(self):
        self.now, self.cancelled, self.ends, self.settled = 10.0, [], [], []
        self.jobs = Jobs(lambda place, job: self.cancelled.append((place, job)), lambda: self.now)

    def open(self, *places, seconds=1.0, slots=0):
        return self.jobs.open(places, seconds, self.ends.append, self.settled.append, slots=slots)

    def answer(self, place, job):
        return self.jobs.take(place, Done(*place, job.number, ""))


def test_a_job_ends_with_the_last_answer():
    desk = Desk()
    job = desk.open(A, B)
    assert desk.answer(A, job)
    assert not desk.ends
    assert not desk.answer(A, job), "an answer that comes twice"
    assert desk.answer(B, job)
    assert (desk.ends, desk.settled, job.why, set(job.answers)) == ([job], [job], "", {A, B})
    assert not desk.answer(B, job)
    assert not len(desk.jobs)


def test_a_late_job_is_in_quarantine_until_the_last_answer():
    desk = Desk()
    job = desk.open(A, B, slots=7)
    desk.answer(A, job)
    desk.now += 1.0
    desk.jobs.advance()
    assert (desk.ends, desk.settled, desk.jobs.quarantined) == ([job], [], 7)
    assert desk.cancelled == [(B, job.number)]
    assert job.why == "no answer within 1000 ms"
    assert desk.answer(B, job)
    assert (desk.ends, desk.settled, desk.jobs.quarantined) == ([job], [job], 0)


def test_a_dead_store_owes_nothing():
    desk = Desk()
    both, other = desk.open(A, B), desk.open(A)
    desk.jobs.lose(B, "killed")
    assert (desk.ends, desk.settled, both.why) == ([both], [], "killed")
    assert desk.jobs.owing(A) == (2, 10.0)
    desk.jobs.lose(A, "killed")
    assert (desk.ends, desk.settled) == ([both, other], [both, other])


def test_deadlines_come_in_their_order_and_a_cancelled_job_ends_once():
    desk = Desk()
    late, early = desk.open(A, seconds=3.0), desk.open(A, seconds=1.0)
    assert desk.jobs.next_deadline == 11.0
    desk.jobs.cancel(early, "aborted")
    desk.jobs.cancel(early, "aborted")
    desk.now += 5.0
    desk.jobs.advance()
    assert desk.ends == [early, late]
    assert desk.jobs.next_deadline is None


def found(backend="nvme0"):
    return FoundChunk(backend, Marker([1], [b"s"], 16))


def test_known_chunks_answer_for_a_while():
    now = [0.0]
    known = KnownChunks(lambda: now[0])
    usable = ["nvme0"]
    assert known.lookup([b"a"], usable) == ([], False)
    known.found([b"a", b"b", b"c"], [found(), found()])
    assert known.lookup([b"a", b"b", b"c", b"d"], usable) == ([found()] * 2, True)
    assert known.lookup([b"a", b"b"], usable) == ([found()] * 2, True)
    assert known.lookup([b"a", b"b"], []) == ([], True), "nothing may be read"
    now[0] += ABSENT_S
    assert known.lookup([b"a", b"b", b"c"], usable) == ([found()] * 2, False)
    known.missed(b"a", "nvme0")
    assert known.lookup([b"a"], usable) == ([], True)
    known.drop_backend("nvme0")
    assert known.lookup([b"b"], usable) == ([], False)


def test_a_chunk_may_be_in_several_backends():
    known = KnownChunks(lambda: 0.0)
    known.put(b"a", found())
    known.put(b"a", found("mem"))
    assert known.lookup([b"a"], ["nvme0", "mem"]) == ([found()], True)
    assert known.lookup([b"a"], ["mem", "nvme0"]) == ([found("mem")], True), "the better one comes first"
    assert known.lookup([b"a"], ["mem"]) == ([found("mem")], True), "the first one is paused"
    assert known.lookup([b"a"], ["s3"]) == ([], False), "a backend that was not asked about may have it"
    known.missed(b"a", "nvme0")
    assert known.lookup([b"a"], ["nvme0", "mem"]) == ([found("mem")], True)
    assert not known.has(b"a", "nvme0") and known.has(b"a", "mem")
    known.missed(b"a", "mem")
    assert known.lookup([b"a"], ["nvme0", "mem"]) == ([], True)


def test_known_chunks_are_bounded():
    known = KnownChunks(lambda: 0.0, 3)
    for key in b"abcd":
        known.put(bytes([key]), found())
        known.lookup([b"a"], ["nvme0"])
    assert [known.has(bytes([key]), "nvme0") for key in b"abcd"] == [True, False, True, True]


def test_a_fetch_is_begun_if_it_is_faster():
    now = [0.0]
    costs = Costs(lambda: now[0])
    assert not costs.decide({"x": 100}, 100).fetch, "nothing is known"
    costs.computed(1000, 1.0)
    assert not costs.decide({"x": 1}, 1000).fetch and not costs.measured("x"), "no fetch was measured"
    for size in (100, 200, 400, 100, 200):
        costs.begun("x", size)
        costs.ended("x", size, 0.01 + size * 1e-3)
    fast = costs.decide({"x": 1000}, 2000)
    assert fast.fetch and not fast.trial
    assert fast.fetch_s == pytest.approx(1.01, rel=0.01) and fast.compute_s == pytest.approx(2.0)
    assert not costs.decide({"x": 1000}, 1000).fetch
    assert not costs.decide({"x": 1000}, 1000).trial, "it was measured just now"
    now[0] += TRIAL_S
    slow = costs.decide({"x": 1000}, 1000)
    assert slow.trial and not slow.fetch, "a slow backend is tried now and then, and no request waits for it"
    costs.begun("x", 1000)
    assert not costs.decide({"x": 1000}, 1000).trial, "one trial alone"
    assert costs.fetch_s({"x": 1000}) == pytest.approx(2.01, rel=0.01), "bytes under way are in front"
    costs.ended("x", 1000, None)
    assert costs.ahead("x") == 0


def test_a_backend_that_was_stuck_is_used_again_after_a_few_trials():
    now = [0.0]
    costs = Costs(lambda: now[0])
    costs.computed(1000, 0.1)
    for _ in range(8):
        costs.ended("x", 1000, 0.01)
    assert costs.decide({"x": 1000}, 1000).fetch
    for _ in range(8):
        costs.ended("x", 1000, 4.0)  # Fetches that were late, all at once.
    trials = 0
    while not costs.decide({"x": 1000}, 1000).fetch:
        now[0] += TRIAL_S
        assert costs.decide({"x": 1000}, 1000).trial
        costs.begun("x", 1000)
        costs.ended("x", 1000, 0.01)
        trials += 1
        assert trials <= 4, "a minute at most"
    assert trials > 1, "one good trial is no proof"


def test_the_cheapest_backend_comes_first():
    costs = Costs(lambda: 0.0)
    for backend, seconds in (("slow", 1.0), ("fast", 0.1)):
        costs.begun(backend, 100)
        costs.ended(backend, 100, seconds)
    assert costs.cheapest_first(["slow", "fast", "new"], 200) == ["fast", "slow", "new"]
    costs.begun("fast", 10_000)
    assert costs.cheapest_first(["slow", "fast"], 200) == ["slow", "fast"], "bytes under way are in front"


def test_a_rate_from_one_size_is_in_proportion():
    costs = Costs(lambda: 0.0)
    costs.ended("x", 100, 0.1)
    assert costs.fetch_s({"x": 300}) == pytest.approx(0.3)
    costs.ended("x", 50, 0.2)
    assert costs.fetch_s({"x": 300}) > 0.3, "a line that falls says nothing"


def test_chunks_are_whole_and_named_by_their_last_block():
    digests = [bytes([number]) for number in range(70)]
    chunks = chunks_of(digests, chunk_blocks(8))
    assert [chunk.key for chunk in chunks] == [bytes([31]), bytes([63])]
    assert [digest for chunk in chunks for digest in chunk.digests] == digests[:64]
    assert (chunk_blocks(16), chunk_blocks(256), chunk_blocks(512)) == (16, 1, 1)


def test_each_part_of_an_engine_is_in_the_namespace():
    shape = Shape(b"w", "opt", "float32", 16, 16, [(0, 2), (2, 4)], 1, ["a", "a"], [10, 10])
    others = [
        ("weights", b"v"), ("model_type", "llama"), ("dtype", "float16"), ("block_size", 8), ("chunk_blocks", 32),
        ("layers", [(0, 1), (1, 4)]), ("ranks", 2), ("layouts", ["a", "b"]), ("slot_bytes", [10, 12]), ("format", 2),
    ]  # fmt: skip
    assert {name for name, _ in others} == {field.name for field in msgspec.structs.fields(Shape)}
    names = [namespace_of(shape), *(namespace_of(msgspec.structs.replace(shape, **{k: v})) for k, v in others)]
    assert all(one != other for one, other in itertools.combinations(names, 2))
    assert namespace_of(shape) == namespace_of(msgspec.structs.replace(shape))


def test_a_broken_backend_is_tried_now_and_then():
    now = [100.0]
    backends = Backends({"a": BackendConfig(kind="memory"), "b": BackendConfig(kind="memory")}, lambda: now[0])
    backend = backends.get("a")
    assert backend is not None
    backend.read_broken = True
    backends.note_read("a")
    assert backends.readable() == ["b"]
    now[0] += TRY_S
    assert backends.readable() == ["a", "b"]
    backends.change(backend, paused=False, draining=True)
    assert backends.readable() == ["a", "b"]
    assert [one.name for one in backends.writable()] == ["b"]
    backend.read_broken, backend.write_broken = False, True
    backends.change(backend, paused=False, draining=False)
    backends.note_write("a")
    assert backends.readable() == ["a", "b"], "a full disk is read on"
    assert [one.name for one in backends.writable()] == ["b"]
    now[0] += TRY_S
    assert [one.name for one in backends.writable()] == ["a", "b"]
    assert [spec.quota_bytes for spec in backends.specs(0.25)] == [4 * 2**30] * 2
