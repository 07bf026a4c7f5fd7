"""The products of few rows for Hopper cards, run as Python: `python tests/kernels/run_products.py`.

Gluon has no interpreter. Here torch stands in for its language, so that the same lines run on a CPU: programs in random
order, and in each the two groups of warps as threads. Barriers have phases, arrivals and bytes as on a card, memory is
checked to be written once and inside, and what is not written yet is NaN. It must run without TRITON_INTERPRET.
"""

from __future__ import annotations

import itertools
import random
import threading
from types import SimpleNamespace
from typing import Any

import torch
from ppkernels.activation_kind import Activation
from ppkernels.few_rows import few_rows_reference
from ppkernels.gpu.hopper_products import add_units, copy_units, product_kernel, product_launch, spans
from torch import Tensor

PATIENCE = 20.0
"""Seconds after which a wait is a deadlock."""
LOCK = threading.Condition()
thread = threading.local()


class Values(torch.Tensor):
    """Values of a group of warps."""

    type = property(lambda _: SimpleNamespace(layout=None))  # type: ignore[assignment]


class Pointer:
    """A place in memory, or many."""

    def __init__(self, memory: Memory, at: Any = 0) -> None:
        self.memory, self.at = memory, at

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.at + offset)


class Memory:
    """Memory of the card, whose elements may be written once in a launch."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.written = values.view(-1), torch.zeros(values.numel(), dtype=torch.int32)

    def places(self, at: Any, mask: Any) -> tuple[Tensor, Tensor]:
        at = torch.as_tensor(at)
        kept = torch.ones_like(at, dtype=torch.bool) if mask is None else torch.as_tensor(mask).expand(at.shape)
        inside = (at >= 0) & (at < len(self.values))
        assert bool((inside | ~kept).all()), "memory outside of the tensor"
        return at, kept


def load(pointer: Pointer, mask: Any = None, other: float = 0.0, cache_modifier: str = "") -> Any:
    at, kept = pointer.memory.places(pointer.at, mask)
    found = torch.full(at.shape, other, dtype=pointer.memory.values.dtype)
    found[kept] = pointer.memory.values[at[kept]]
    return found.as_subclass(Values)


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    at, kept = pointer.memory.places(pointer.at, mask)
    pointer.memory.values[at[kept]] = torch.as_tensor(value, dtype=pointer.memory.values.dtype).expand(at.shape)[kept]
    pointer.memory.written[at[kept]] += 1


def atomic_add(pointer: Pointer, value: int, sem: str, scope: str) -> int:
    before = int(pointer.memory.values[pointer.at])
    pointer.memory.values[pointer.at] += value
    return before


class Barrier:
    """A barrier in shared memory: a phase ends when all arrivals and all bytes have come."""

    def __init__(self) -> None:
        self.phase = self.bytes = 0
        self.missing = 1

    def come(self, arrivals: int, expected: int) -> None:
        with LOCK:
            self.missing -= arrivals
            self.bytes += expected
            assert self.missing >= 0
            if self.missing == self.bytes == 0:
                self.phase, self.missing = self.phase ^ 1, 1
                LOCK.notify_all()

    def wait(self, phase: int) -> None:
        with LOCK:
            assert LOCK.wait_for(lambda: self.phase != phase, PATIENCE), "a deadlock"


class Shared:
    """Shared memory of a program: tiles, or barriers."""

    def __init__(self, kind: Any, shape: list[int], layout: object) -> None:
        tiles = kind != torch.int64
        self.parts: list[Any] = [
            torch.full(shape[1:], float("nan"), dtype=kind) if tiles else Barrier() for _ in range(shape[0])
        ]

    def index(self, number: int) -> Any:
        assert 0 <= number < len(self.parts)
        return self.parts[number]


class Descriptor:
    """A matrix of which boxes are copied."""

    layout = None

    def __init__(self, values: Tensor) -> None:
        self.values = values


def copy(matrix: Descriptor, place: list[int], full: Barrier, tile: Tensor) -> None:
    assert matrix is thread.weight or thread.followed, "inputs are read before the kernel before has ended"
    box = matrix.values[place[0] : place[0] + tile.shape[0], place[1] : place[1] + tile.shape[1]]
    assert box.numel() > 0
    tile.zero_()
    tile[: box.shape[0], : box.shape[1]] = box
    full.come(0, -tile.numel() * tile.itemsize)


def follow(chain: bool) -> None:
    thread.followed = True


def warp_specialize(groups: list[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
    state, failures = dict(vars(thread)), []

    def run(function: Any, arguments: tuple[Any, ...]) -> None:
        vars(thread).update(state)
        try:
            function(*arguments)
        except BaseException as failure:  # noqa: BLE001 - the other thread must not hide it
            failures.append(failure)

    threads = [threading.Thread(target=run, args=group) for group in groups]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if failures:
        raise failures[0]


LANGUAGE = SimpleNamespace(
    float32=torch.float32, int64=torch.int64, load=load, store=store, atomic_add=atomic_add, exp=torch.exp,
    zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype).as_subclass(Values), zeros_like=torch.zeros_like,
    arange=lambda first, end, layout: torch.arange(first, end), minimum=min, static_range=range,
    where=torch.where, cdiv=lambda one, other: -(-one // other),
    program_id=lambda axis: thread.program, num_programs=lambda axis: thread.programs,
    SliceLayout=lambda axis, layout: None, NVMMADistributedLayout=lambda *parts: None,
    allocate_shared_memory=Shared, warp_specialize=warp_specialize,
)  # fmt: skip
STAND_INS = {
    "gl": LANGUAGE,
    "mbarrier": SimpleNamespace(
        MBarrierLayout=lambda: None, init=lambda barrier, count: None, wait=Barrier.wait,
        expect=lambda barrier, size: barrier.come(1, size), arrive=lambda barrier, count: barrier.come(count, 0),
    ),
    "tma": SimpleNamespace(async_copy_global_to_shared=copy),
    "warpgroup_mma": lambda left, right, sums, is_async: sums + left.float() @ right.float(),
    "warpgroup_mma_wait": lambda left, values: values[0] if len(values) == 1 else values,
    "fence_async_shared": lambda: None, "wait_for_warps": lambda: None, "follow": follow, "let_follow": lambda _: None,
}  # fmt: skip


def stand_in() -> None:
    """Have the modules of the kernel use torch, and Python's own calls."""
    for module in (product_kernel, add_units, copy_units):
        for name, value in list(vars(module).items()):
            if name in STAND_INS:
                setattr(module, name, STAND_INS[name])
            elif hasattr(spans, name):
                setattr(module, name, getattr(spans, name))
            elif hasattr(value, "fn"):
                setattr(module, name, value.fn)


class Launch:
    """Launches the kernel as `multiply[grid](...)` does."""

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launched(inputs: Any, weight: Any, *arguments: Any, **constants: Any) -> None:
            for option in ("num_warps", "maxnreg", "launch_pdl"):
                constants.pop(option)
            constants["DOT"] = {"bf16": torch.bfloat16, "fp16": torch.float16}[str(constants["DOT"])]
            memories = [Memory(each) for each in arguments[:5]]
            matrices = Descriptor(inputs.base), Descriptor(weight.base)
            order = random.sample(range(grid[0]), grid[0])
            for thread.program in order:
                thread.programs, thread.followed, thread.weight = grid[0], False, matrices[1]
                product_kernel.multiply(*matrices, *map(Pointer, memories), *arguments[5:], **constants)
            bias, residual, output, partial, counters = memories
            assert int(bias.written.max()) == int(residual.written.max()) == 0, "inputs are written"
            assert int(output.written.min()) == int(output.written.max()) == 1, "outputs are written once"
            assert int(partial.written.max()) <= 1, "a place of partial sums is used twice"
            assert not bool(counters.values.any()), "counters are 0 behind a launch"

        return launched


def poisoned(*shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full(shape[0] if isinstance(shape[0], tuple) else shape, float("nan"), dtype=dtype)


def main() -> None:
    stand_in()
    product_launch.multiply = Launch()
    product_launch.torch = SimpleNamespace(**{**vars(torch), "empty": poisoned})
    torch.cuda.is_current_stream_capturing = lambda: False
    seed = torch.seed()
    print("seed", seed)
    random.seed(seed)
    cases = itertools.product(((200, 264), (64, 1000), (1, 8), (330, 128), (8192, 64)), (5, 16), (1, 7, 132))
    for (outputs, width), rows, programs in cases:
        product_launch.processors = lambda _, programs=programs: programs
        for activation in (None, Activation.RELU, Activation.SILU_AND_MUL):
            parts = 2 if activation is Activation.SILU_AND_MUL else 1
            if programs == 1 and outputs > 1000:
                continue
            weight = torch.randn(outputs * parts, width, dtype=torch.bfloat16) * width**-0.5
            inputs = torch.randn(rows, width, dtype=torch.bfloat16)
            bias = torch.randn(outputs * parts, dtype=torch.bfloat16)
            residual = torch.randn(rows, outputs, dtype=torch.bfloat16)
            around = [bias, activation, residual] if random.random() < 0.5 else [None, activation, None]
            into = parts == 1 and random.random() < 0.5
            found = [product_launch.multiply_rows(inputs, weight, *around, into_stream=into) for _ in range(2)]
            doubled = [each.double() if isinstance(each, Tensor) else each for each in around]
            exact = few_rows_reference(inputs.double(), weight.double(), *doubled)
            error = float(((found[0].double() - exact).abs() / (exact.abs() + 1)).nan_to_num(9.0).max())
            assert error < 2**-8, f"{outputs} x {width}, {rows} rows, {programs} programs, {activation}: {error}"
            assert torch.equal(*found), "sums do not depend on the order of programs"
    print("right")


if __name__ == "__main__":
    main()
