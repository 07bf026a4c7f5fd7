"""What orders block copies between streams, on streams that are as late as a device may be; slots and pinning."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from ppengine.common.system_memory import SystemMemory
from ppengine.drills.fake_streams import FakeEvent, FakeRuntime, FakeStream
from ppengine.protocol.steps import MoveKind
from ppengine.stage.backends.base import KvShape
from ppengine.stage.backends.cuda.block_mover import BlockMover
from ppengine.stage.backends.cuda.errors import DriverError
from ppengine.stage.backends.cuda.pinned_swap_space import PinnedSwapSpace, SwapSpaceRefusedError, runs
from ppengine.stage.ledger.ledger import Ledger

BLOCKS, SLOTS = 8, 6
Pairs = list[tuple[int, int]]


class LateEvent:
    def __init__(self, event: FakeEvent) -> None:
        self.event = event
        self.waited = False

    def done(self) -> bool:
        return self.waited

    def synchronize(self) -> None:
        self.event.synchronize()
        self.waited = True


class LateStream:
    """`Ordered` over a lagging fake stream, which works only when somebody waits."""

    def __init__(self, stream: FakeStream) -> None:
        self.name, self.fake = stream.name, stream

    def record(self, name: str) -> LateEvent:
        return LateEvent(self.fake.record(name))

    def wait(self, event: LateEvent) -> None:
        self.fake.wait(event.event)

    def drain(self, releases: list[object]) -> None:
        self.record("left").synchronize()


class Stage:
    """Device and host blocks as lists of numbers, kernels and copies as work on fake streams."""

    def __init__(self, *, out_waits: bool = True) -> None:
        self.runtime = FakeRuntime(Ledger())
        self.runtime.ledger.switch(on=True)
        self.device, self.host = [float(block) for block in range(BLOCKS)], [-1.0] * SLOTS
        ledger = self.runtime.ledger
        self._buffers = {
            (True, block): ledger.buffer(f"block {block}", "cuda:0") for block in range(BLOCKS)
        } | {(False, slot): ledger.buffer(f"slot {slot}", "cuda:0") for slot in range(SLOTS)}  # fmt: skip
        self.compute = LateStream(self.runtime.stream("compute", "step", lag=True))
        out = LateStream(self.runtime.stream("swap out", "copy", lag=True))
        into = LateStream(self.runtime.stream("swap in", "copy", lag=True))
        if not out_waits:
            out.wait = lambda event: None  # type: ignore[method-assign]
        self.mover = BlockMover(
            self.compute,
            {
                MoveKind.DEVICE: FakeLane(self, MoveKind.DEVICE, self.compute),
                MoveKind.OUT: FakeLane(self, MoveKind.OUT, out),
                MoveKind.IN: FakeLane(self, MoveKind.IN, into),
                MoveKind.LOAD: FakeLane(self, MoveKind.LOAD, into),
            },
        )
        self.events: list[LateEvent] = []

    def launch(self, stream: LateStream, what: str, work, reads, writes) -> None:  # type: ignore[no-untyped-def]
        pick = [_Named(self._buffers[key]) for key in reads], [_Named(self._buffers[key]) for key in writes]
        stream.fake.launch(what, work, *pick)

    def kernel(self, block: int, value: float) -> None:
        """Write a block on compute."""
        self.launch(self.compute, f"write {block}", lambda: self.device.__setitem__(block, value), [], [(True, block)])

    def move(self, kind: MoveKind, pairs: Pairs) -> None:
        event = self.mover.move(kind, pairs)
        if event is not None:
            self.events.append(event)

    def finish(self) -> list[str]:
        """Wait for everything; return what the ledger found."""
        for event in self.events:
            event.synchronize()
        self.compute.record("end").synchronize()
        found = [finding.summary for finding in self.runtime.ledger.findings()]
        self.runtime.close()
        return found


class _Named:
    def __init__(self, buffer: object) -> None:
        self.buffer = buffer


class FakeLane:
    def __init__(self, stage: Stage, kind: MoveKind, stream: LateStream) -> None:
        self._stage, self._kind, self.stream = stage, kind, stream

    def copy(self, pairs: Pairs) -> None:
        from_device, to_device = not self._kind.from_host, not self._kind.to_host
        source = self._stage.device if from_device else self._stage.host
        target = self._stage.device if to_device else self._stage.host
        for src, dst in pairs:

            def work(src: int = src, dst: int = dst) -> None:
                target[dst] = source[src]

            self._stage.launch(self.stream, "copy", work, [(from_device, src)], [(to_device, dst)])


def in_order(kinds: list[tuple[MoveKind, Pairs] | tuple[int, float]]) -> tuple[list[float], list[float]]:
    """Return device and host after the same list, one thing at a time."""
    device, host = [float(block) for block in range(BLOCKS)], [-1.0] * SLOTS
    for what, value in kinds:
        if not isinstance(what, MoveKind):
            device[what] = value
            continue
        source = host if what.from_host else device
        target = host if what.to_host else device
        for src, dst in value:
            target[dst] = source[src]
    return device, host


@pytest.fixture
def stage() -> Iterator[Stage]:
    yield Stage()


def test_what_a_kernel_wrote_goes_out(stage: Stage) -> None:
    stage.kernel(3, 33.0)
    stage.move(MoveKind.OUT, [(3, 0)])
    assert stage.finish() == [] and stage.host[0] == 33.0


def test_a_swap_out_without_its_wait_is_wrong_and_found() -> None:
    stage = Stage(out_waits=False)
    stage.kernel(3, 33.0)
    stage.move(MoveKind.OUT, [(3, 0)])
    assert stage.finish() != [] and stage.host[0] == 3.0


def test_the_fence_of_a_swap_out_is_what_makes_its_blocks_free(stage: Stage) -> None:
    stage.move(MoveKind.OUT, [(3, 0)])
    stage.events[0].synchronize()
    stage.kernel(3, 99.0)  # for another request
    assert stage.finish() == [] and stage.host[0] == 3.0
    hasty = Stage()
    hasty.move(MoveKind.OUT, [(3, 0)])
    hasty.kernel(3, 99.0)
    hasty.compute.record("now").synchronize()
    assert hasty.finish() != [] and hasty.host[0] in (3.0, 99.0)


def test_compute_waits_for_what_comes_in(stage: Stage) -> None:
    stage.move(MoveKind.OUT, [(3, 0)])
    stage.move(MoveKind.IN, [(0, 5)])
    seen: list[float] = []
    stage.launch(stage.compute, "read 5", lambda: seen.append(stage.device[5]), [(True, 5)], [])
    assert stage.finish() == [] and seen == [3.0]


def test_compute_goes_on_beside_a_load(stage: Stage) -> None:
    stage.kernel(5, 55.0)
    stage.move(MoveKind.LOAD, [(0, 5)])
    stage.kernel(6, 66.0)
    stage.compute.record("now").synchronize()
    assert stage.device[5] == 55.0 and stage.device[6] == 66.0, "compute has waited for the load"
    stage.events[0].synchronize()
    seen: list[float] = []
    stage.launch(stage.compute, "read 5", lambda: seen.append(stage.device[5]), [(True, 5)], [])
    assert stage.finish() == [] and seen == [-1.0]


def test_what_a_generation_leaves_under_way_lands_in_no_block_or_slot_of_the_next(stage: Stage) -> None:
    stage.move(MoveKind.OUT, [(3, 0)])
    stage.move(MoveKind.LOAD, [(1, 5)])
    stage.compute.drain([])
    stage.mover.drain()
    stage.kernel(3, 33.0)
    stage.kernel(5, 55.0)
    stage.host[0] = 7.0  # by the store
    stage.compute.drain([])
    assert stage.finish() == [] and (stage.device[3], stage.device[5], stage.host[0]) == (33.0, 55.0, 7.0)


def test_a_row_that_does_not_wait_for_its_load_is_found(stage: Stage) -> None:
    stage.move(MoveKind.LOAD, [(0, 5)])
    stage.launch(stage.compute, "read 5", lambda: None, [(True, 5)], [])
    assert stage.finish() != []


@pytest.mark.parametrize("seed", range(40))
def test_any_list_gives_what_one_after_the_other_gives(seed: int) -> None:
    generator = random.Random(seed)
    plan: list = []
    open_: set[int] = set()
    for _ in range(12):
        kind = generator.choice([*MoveKind, None])
        if kind is None:
            # What is being copied out or loaded is no kernel's to write: the caller's fence.
            free = [block for block in range(BLOCKS) if block not in open_]
            if free:
                plan.append((generator.choice(free), generator.random()))
            continue
        sources, targets = (SLOTS if kind.from_host else BLOCKS), (SLOTS if kind.to_host else BLOCKS)
        count = generator.randrange(1, 4)
        pairs = list(zip(generator.sample(range(sources), count), generator.sample(range(targets), count), strict=True))
        if kind is MoveKind.OUT:
            open_.update(src for src, _ in pairs)
        if kind is MoveKind.LOAD:
            open_.update(dst for _, dst in pairs)
        plan.append((kind, pairs))
    stage = Stage()
    for what, value in plan:
        if isinstance(what, MoveKind):
            stage.move(what, value)
        else:
            stage.kernel(what, value)
    assert stage.finish() == []
    assert (stage.device, stage.host) == in_order(plan)


def test_copies_that_share_nothing_do_not_wait_for_each_other(stage: Stage) -> None:
    stage.move(MoveKind.OUT, [(1, 0)])
    stage.move(MoveKind.IN, [(4, 6)])
    stage.events[1].synchronize()
    assert stage.device[6] == -1.0 and stage.host[0] == -1.0, "the swap in has dragged the swap out along"
    assert stage.finish() == [] and stage.host[0] == 1.0


def test_runs_of_slots_stay_within_a_piece() -> None:
    assert runs([0, 1, 2, 5, 6, 9], 100) == [(0, 3), (5, 2), (9, 1)]
    assert runs([2, 3, 4, 5, 8, 9], 4) == [(2, 2), (4, 2), (8, 2)]
    assert runs([7], 1) == [(7, 1)] and runs([0, 1, 2], 1) == [(0, 1), (1, 1), (2, 1)]
    assert runs([], 4) == []


class BookPinner:
    def __init__(self, most: int = 2**40) -> None:
        self.pinned: dict[int, int] = {}
        self.most = most

    def pin(self, address: int, size: int) -> None:
        if sum(self.pinned.values()) + size > self.most:
            raise DriverError(f"cuMemHostRegister of {size} bytes", "CUDA_ERROR_OUT_OF_MEMORY")
        self.pinned[address] = size

    def unpin(self, address: int) -> None:
        del self.pinned[address]


SHAPE = KvShape(layers=3, block_size=16, kv_heads=2, head_dim=32, dtype=torch.float32)
VIEW = (2, 16, 2, 32)


def test_the_pool_pins_whole_slots_without_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ppengine.stage.backends.cuda.pinned_swap_space._PIECE", 10 * SHAPE.block_bytes + 1)
    driver = BookPinner()
    pool = PinnedSwapSpace(SHAPE, 25, VIEW, driver)
    assert pool.slots_a_piece == 10
    assert driver.pinned == {
        pool.address(0): 10 * SHAPE.block_bytes,
        pool.address(10): 10 * SHAPE.block_bytes,
        pool.address(20): 5 * SHAPE.block_bytes,
    }
    for number, layer in enumerate(pool.layers):
        assert layer.shape == (25, *VIEW)
        layer.fill_(number)
        assert layer[4].data_ptr() == pool.address(4) + number * SHAPE.layer_block_bytes
    assert [float(layer.sum()) / layer.numel() for layer in pool.layers] == [0.0, 1.0, 2.0]
    pool.close()
    assert driver.pinned == {}


def test_a_pool_that_cannot_be_pinned_says_what_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    big = KvShape(layers=32, block_size=16, kv_heads=8, head_dim=128, dtype=torch.bfloat16)  # 2 MiB a block
    driver = BookPinner(most=3 * 2**30)
    with pytest.raises(SwapSpaceRefusedError) as caught:
        PinnedSwapSpace(big, 2048, (2, 16, 8, 128), driver)
    assert str(caught.value) == (
        "4.0 GiB of host memory for 2048 swapped blocks cannot be pinned: cuMemHostRegister of 1073741824 bytes: "
        "CUDA_ERROR_OUT_OF_MEMORY after 3.0 GiB; memory.swap_space_gib of at most 2.7 would fit"
    )
    assert driver.pinned == {}, "what was pinned before the refusal is given back"
    monkeypatch.setattr(
        "ppengine.stage.backends.cuda.pinned_swap_space.system_memory", lambda: SystemMemory(2**33, 2**31)
    )
    with pytest.raises(SwapSpaceRefusedError, match=r"the system has 2.0 GiB available; .* at most 1.8 would fit"):
        PinnedSwapSpace(big, 2048, (2, 16, 8, 128), driver)
    assert PinnedSwapSpace(big, 0, (2, 16, 8, 128), driver).layers[0].shape[0] == 0
