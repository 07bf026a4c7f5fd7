"""Times of the elastic cache and of swaps on one GPU, as tables: `python tests/gpu/bench_memory.py [NAME...]`.

NAME: handles, resize, swap. Budgets: a change of 10 GiB applied within 100 ms and no step longer by more than 5 ms,
swaps at 80 % of what one copy between device and pinned memory reaches. `bench_change.py` measures a change on a whole
engine.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable

import torch
from ppengine.protocol.steps import MoveKind
from ppengine.stage.backends.base import KvShape
from ppengine.stage.backends.cuda.block_mover import BlockMover
from ppengine.stage.backends.cuda.copy_lanes import make_lanes
from ppengine.stage.backends.cuda.driver_api import Driver
from ppengine.stage.backends.cuda.elastic_kv_cache import CudaKvCache, block_view
from ppengine.stage.backends.cuda.pinned_swap_space import PinnedSwapSpace
from ppengine.stage.backends.cuda.streams import Stream
from ppengine.stage.backends.cuda.virtual_memory import Segments

MIB, GIB = 2**20, 2**30
OPT = KvShape(32, 16, 32, 128, torch.float16)
LLAMA = KvShape(32, 16, 8, 128, torch.bfloat16)
SHAPES = {"OPT-6.7B": OPT, "Llama-8B": LLAMA}
now = time.perf_counter


class TimedDriver(Driver):
    """Adds up what each call takes."""

    def __init__(self, device: int) -> None:
        super().__init__(device)
        self.seconds: dict[str, float] = {}

    def __getattribute__(self, name: str):  # type: ignore[no-untyped-def]
        value = super().__getattribute__(name)
        if name not in ("create", "map", "set_access", "unmap", "release"):
            return value

        def timed(*args: object) -> object:
            began = now()
            try:
                return value(*args)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + now() - began

        return timed


def handles() -> None:
    """Print what 10 GiB cost by handle size."""
    driver = TimedDriver(0)
    names = ("create", "map", "set_access", "release", "unmap")
    print(f"10 GiB, ms     {'segments':>8} " + " ".join(f"{name:>10}" for name in names) + "       grow     shrink")
    for count in (8, 32):
        for size in (2, 8, 16, 32, 64, 128):
            number = 10 * 1024 // count // size
            rows = []
            for _ in range(3):
                segments = Segments(driver, count, number, size * MIB)
                driver.seconds = dict.fromkeys(names, 0.0)
                began = now()
                segments.grow(number)
                grown = now()
                segments.shrink(0)
                rows.append([*driver.seconds.values(), grown - began, now() - grown])
                segments.close()
            figures = [1e3 * statistics.median(column) for column in zip(*rows, strict=True)]
            print(f"handles {size:4} MiB {count:8} " + " ".join(f"{figure:10.2f}" for figure in figures))


class Steps:
    """A stream that replays a graph, which reads what of the cache is mapped from the start."""

    def __init__(self, cache: CudaKvCache, compute: Stream) -> None:
        self._stream = compute
        heads = [layer.view(torch.int64).flatten()[: 512 * MIB // len(cache.layers)] for layer in cache.layers]
        self._sum = torch.zeros((), dtype=torch.int64, device="cuda")
        with compute.use():
            for _ in range(3):
                self._work(heads)
        compute.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=compute.raw):
            self._work(heads)

    def _work(self, heads: list[torch.Tensor]) -> None:
        for head in heads:
            self._sum += head.sum()

    def run(self, during: Callable[[int], bool]) -> list[float]:
        """Run steps until `during(step)`, called within each, is true; return what each took, in ms."""
        took, over = [], False
        with self._stream.use():
            while not over:
                began = now()
                over = during(len(took))
                self._graph.replay()
                self._stream.synchronize()
                took.append(1e3 * (now() - began))
        return took


def resize() -> None:
    """Print the longest step while 10 GiB come and go: one step waits for it, or none, as in a stage."""
    for name, layers in (("OPT-6.7B", 8), ("OPT-6.7B", 32), ("Llama-8B", 32)):
        base = SHAPES[name]
        shape = KvShape(layers, base.block_size, base.kv_heads, base.head_dim, base.dtype)
        driver = Driver(0)
        compute = Stream("compute", driver.device)
        most = 40 * GIB // shape.block_bytes
        cache = CudaKvCache(shape, most, driver, compute)
        quantum = cache.quantum_blocks
        low = -(-5 * GIB // shape.block_bytes // quantum) * quantum
        high = low + -(-10 * GIB // shape.block_bytes // quantum) * quantum
        cache.map_blocks(low)
        steps = Steps(cache, compute)
        quiet = sorted(steps.run(lambda step: step == 400))
        print(
            f"{name} {layers} layers, handles {cache.handle_bytes // MIB} MiB, quantum {quantum} blocks = "
            f"{quantum * shape.block_bytes / GIB:.2f} GiB; quiet step p50 {quiet[200]:.2f} p99 {quiet[396]:.2f} ms"
        )
        for way in ("at once", "when prepared"):
            for what, count in (("grow", high), ("shrink", low)):
                longest, applied = [], []
                for _ in range(5):
                    took, span = _change(cache, steps, way, count)
                    longest.append(max(took))
                    applied.append(span)
                    if what == "grow":
                        cache.map_blocks(low if _ < 4 else high)
                    elif _ < 4:
                        cache.map_blocks(high)
                print(
                    f"  {way:14} {what:6} 10 GiB: longest step {max(longest):6.2f} ms (+{max(longest) - quiet[396]:.2f}"
                    f" over p99; median {statistics.median(longest):.2f}), applied after "
                    f"{statistics.median(applied):6.2f} ms"
                )
        cache.close()


def _change(cache: CudaKvCache, steps: Steps, way: str, count: int) -> tuple[list[float], float]:
    times: list[float] = []

    def during(step: int) -> bool:
        if step == 20:
            times.append(now())
            cache.prepare(count)
        if len(times) == 1 and (way == "at once" or cache.prepared(count)):
            error = cache.map_blocks(count)
            assert not error, error
            times.append(now())
        return step >= 80 and len(times) == 2

    took = steps.run(during)
    return took, 1e3 * (times[1] - times[0])


def swap() -> None:
    """Print bytes a second of swaps beside those of one plain copy of as many bytes, and of 1 GiB."""
    for name, shape in SHAPES.items():
        driver = Driver(0)
        compute = Stream("compute", driver.device)
        slots = 640
        cache = CudaKvCache(shape, 1024, driver, compute)
        cache.map_blocks(1024)
        began = now()
        host = PinnedSwapSpace(shape, slots, block_view(shape, driver.device), driver)
        print(f"{name}: {slots * shape.block_bytes / GIB:.1f} GiB pinned in {now() - began:.2f} s")
        mover = BlockMover(compute, make_lanes(cache, host, driver, compute))
        plain = {kind: _plain(driver, cache, host, kind, GIB) for kind in (MoveKind.OUT, MoveKind.IN)}
        print(f"  one copy of 1 GiB: out {plain[MoveKind.OUT] / 1e9:.1f} in {plain[MoveKind.IN] / 1e9:.1f} GB/s")
        for count in (1, 8, 64, 512):
            for order in ("slots together", "slots anywhere"):
                line = f"  {count:3} blocks, {count * shape.block_bytes / MIB:6.0f} MiB, {order}:"
                for kind in (MoveKind.OUT, MoveKind.IN):
                    rate, host_us = _swap_rate(mover, kind, count, slots, order == "slots together", shape)
                    size = count * shape.block_bytes
                    same = _plain(driver, cache, host, kind, min(size, GIB))
                    line += (
                        f"  {kind.name:3} {rate / 1e9:5.1f} GB/s = {100 * rate / plain[kind]:3.0f} % of 1 GiB's,"
                        f" {100 * rate / same:3.0f} % of one copy's; host {host_us:5.0f} us;"
                    )
                print(line)
        torch.cuda.synchronize()
        host.close()
        cache.close()


def _swap_rate(mover, kind, count, slots, together, shape):  # type: ignore[no-untyped-def]
    generator = random.Random(count)
    took, launched = [], []
    for _ in range(7):
        blocks = generator.sample(range(1024), count)
        first = generator.randrange(slots - count)
        where = list(range(first, first + count)) if together else generator.sample(range(slots), count)
        pairs = list(zip(blocks, where, strict=True)) if kind is MoveKind.OUT else list(zip(where, blocks, strict=True))
        torch.cuda.synchronize()
        began = now()
        event = mover.move(kind, pairs)
        launched.append(now() - began)
        event.synchronize()
        took.append(now() - began)
    return count * shape.block_bytes / statistics.median(took), 1e6 * statistics.median(launched)


def _plain(driver: Driver, cache: CudaKvCache, host: PinnedSwapSpace, kind: MoveKind, size: int) -> float:
    stream = Stream("plain", driver.device)
    memory = torch.empty(size, dtype=torch.uint8, device="cuda")
    # Slots of one piece, so that it can be one copy.
    size = min(size, host.slots_a_piece * host.slot_bytes)
    took = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = now()
        if kind is MoveKind.OUT:
            driver.to_host(host.address(0), memory.data_ptr(), size, stream.handle)
        else:
            driver.to_device(memory.data_ptr(), host.address(0), size, stream.handle)
        stream.synchronize()
        took.append(now() - began)
    return size / statistics.median(took)


if __name__ == "__main__":
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for chosen in sys.argv[1:] or ["handles", "resize", "swap"]:
        {"handles": handles, "resize": resize, "swap": swap}[chosen]()
