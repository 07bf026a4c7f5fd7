"""Microseconds and GB/s of the operations on a GPU, beside torch's own: `python tests/gpu/bench_ops.py [WORD]`.

Each time is the median of replays of a graph that runs the operation many times over buffers that together are
larger than the L2 cache where there are many rows, so launches cost what they cost in the engine. Bytes are those that
have to be read and written once. The first line is what a copy reaches, the ceiling of everything else.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from ppkernels import activation, norms, rotary, sampling
from ppkernels.gpu.sampling import DeviceSampling, Parameters, choose
from torch import Tensor

ROWS = (1, 32, 128, 256, 4096)
L2 = 60 << 20
COMPILED = {"dynamic": False, "fullgraph": True}
Make = Callable[[], tuple[object, ...]]
Norm = Callable[..., Tensor]


def microseconds(operations: list[Callable[[], object]]) -> float:
    """Return what one of `operations` takes, in a graph of all of them."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for operation in operations[:2]:
            operation()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for operation in operations:
            operation()
    times = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(operations))
    return statistics.median(times[1:])


def line(name: str, rows: int, size: float, make: Make, peers: dict[str, Callable[..., object]]) -> None:
    """Measure each of `peers` on what `make` returns (arguments on fresh buffers), and print one line.

    `size` is in bytes. Many sets of buffers are taken in turn, so that together they are more than the L2 cache holds.
    """
    count = max(1, min(40, int(2 * L2 / size) + 1))
    parts = [f"{name:28} {rows:5}"]
    for which, function in peers.items():
        if which == "compile" and rows not in (128, 4096):
            continue
        try:
            arguments = [make() for _ in range(count)]
            took = microseconds([partial(function, *arguments[i % count]) for i in range(max(20, count))])
            parts.append(f"{which} {took:8.2f} us {size / took / 1000:6.0f} GB/s")
        except Exception as failure:  # noqa: BLE001 - a peer that does not run is no reason to measure nothing
            torch.cuda.synchronize()
            parts.append(f"{which} failed: {str(failure).splitlines()[0][:60]}")
    print(" | ".join(parts), flush=True)


def like(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda")


def bench_copy() -> None:
    def make() -> tuple[Tensor, Tensor]:
        source = torch.zeros(1 << 28, dtype=torch.float32, device="cuda")
        return source, torch.empty_like(source)

    # By a kernel: a graph gives a plain copy to a copy engine, which is slower.
    line("copy of 1 GiB", 1, 2 << 30, make, {"torch": lambda source, target: torch.neg(source, out=target)})


def bench_norms(name: str, dtype: torch.dtype, norm: Norm, reference: Norm, add_norm: Norm) -> None:
    """Norms of width 4096, and the same after an update of the residual stream."""
    width = 4096

    def update(residual: Tensor, update: Tensor) -> Tensor:
        return reference(residual.add_(update))

    for rows in ROWS:
        make = partial(make_rows, dtype, rows, width)
        peers = {"ours": norm, "eager": reference, "compile": torch.compile(reference, **COMPILED)}
        line(name, rows, 2 * rows * width * dtype.itemsize, make, peers)
        peers = {"ours": add_norm, "eager": update, "compile": torch.compile(update, **COMPILED)}
        make = partial(make_rows, dtype, rows, width, updates=True)
        line(f"add and {name}", rows, 4 * rows * width * dtype.itemsize, make, peers)


def make_rows(dtype: torch.dtype, rows: int, width: int, updates: bool = False) -> tuple[Tensor, ...]:
    values = like(dtype, rows, width)
    # Zeros, so that the residual stream stays finite however often it is updated.
    return (values, torch.zeros_like(values)) if updates else (values,)


def bench_rms() -> None:
    weight = like(torch.bfloat16, 4096)
    bench_norms(
        "rms_norm 4096 bf16",
        torch.bfloat16,
        lambda x: norms.rms_norm(x, weight, 1e-5),
        lambda x: norms.rms_norm_reference(x, weight, 1e-5),
        lambda x, y: norms.add_rms_norm(x, y, weight, 1e-5),
    )


def bench_layer() -> None:
    weight, bias = like(torch.float16, 4096), like(torch.float16, 4096)
    bench_norms(
        "layer_norm 4096 fp16",
        torch.float16,
        lambda x: norms.layer_norm(x, weight, bias, 1e-5),
        lambda x: norms.layer_norm_reference(x, weight, bias, 1e-5),
        lambda x, y: norms.add_layer_norm(x, y, weight, bias, 1e-5),
    )


def bench_rotary() -> None:
    """The 32 query and 8 key heads of Llama-8B, in front of its 8 value heads."""
    head_dim, count = 128, 40
    frequencies = 10000.0 ** -torch.arange(0, 1, 2 / head_dim, device="cuda")
    cos, sin = rotary.rotary_tables(frequencies, 8192, 1.0, torch.bfloat16)

    def make(rows: int) -> tuple[object, ...]:
        return like(torch.bfloat16, rows, 48, head_dim), count, cos, sin, torch.randint(0, 8192, (rows,), device="cuda")

    for rows in ROWS:
        reference = rotary.rotate_reference
        peers = {"ours": rotary.rotate, "eager": reference, "compile": torch.compile(reference, **COMPILED)}
        line("rotary 40 x 128 bf16", rows, 2 * rows * count * head_dim * 2, partial(make, rows), peers)


def bench_silu() -> None:
    for rows in ROWS:
        reference = activation.silu_and_mul_reference
        peers = {"ours": activation.silu_and_mul, "eager": reference, "compile": torch.compile(reference, **COMPILED)}
        make = partial(make_rows, torch.bfloat16, rows, 2 * 14336)
        line("silu_and_mul 14336 bf16", rows, 3 * rows * 14336 * 2, make, peers)


def bench_relu() -> None:
    """OPT-6.7B's first product of the MLP; the last peer is the product alone."""
    weight, bias = like(torch.float16, 16384, 4096), like(torch.float16, 16384)
    for rows in ROWS:
        peers = {
            "ours": lambda x: activation.linear_relu(x, weight, bias),
            "eager": lambda x: activation.linear_relu_reference(x, weight, bias),
            "product": lambda x: torch.nn.functional.linear(x, weight),
        }
        size = weight.nbytes + rows * (4096 + 16384) * 2
        line("linear_relu 4096 > 16384", rows, size, partial(make_rows, torch.float16, rows, 4096), peers)


CHOICES = {
    "greedy": Parameters(),
    "temperature": Parameters(temperature=1.0),
    "top-p 0.9": Parameters(temperature=1.0, top_p=0.9),
    "top-p 0.9, flat": Parameters(temperature=50.0, top_p=0.9),
    "top-k 50": Parameters(temperature=1.0, top_k=50),
    "top-k 50, top-p 0.9": Parameters(temperature=1.0, top_k=50, top_p=0.9),
}


def make_logits(dtype: torch.dtype, rows: int, vocabulary: int) -> tuple[Tensor]:
    """Return logits as of text: the probabilities fall with the 1.5th power of the rank, give or take."""
    ranks = torch.rand((rows, vocabulary), device="cuda").argsort(-1) + 1
    return ((like(torch.float32, rows, vocabulary) * 0.5 - 1.5 * ranks.log()).to(dtype),)


def bench_sampling(vocabulary: int, dtype: torch.dtype) -> None:
    """The peer is the reference with its sort and its waits, timed by the host."""
    for (name, one), rows in itertools.product(CHOICES.items(), (1, 128, 256)):
        table = DeviceSampling(rows, torch.device("cuda"))
        table.set(range(rows), [one] * rows)
        keys = torch.arange(rows, device="cuda")
        run = partial(choose, parameters=table, slots=keys, positions=keys, greedy=one.temperature == 0)
        size = rows * vocabulary * dtype.itemsize
        line(f"{name}, {vocabulary}", rows, size, partial(make_logits, dtype, rows, vocabulary), {"ours": run})
        given = make_logits(dtype, rows, vocabulary)[0]
        columns = ([value] * rows for value in (one.temperature, one.top_p, one.top_k, 0, 0, 0))
        inputs = sampling.SamplingInputs(*columns)
        times = []
        for _ in range(4):
            torch.cuda.synchronize()
            start = time.perf_counter()
            sampling.sample_reference(given, inputs)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        print(f"{'':34} | eager {statistics.median(times[1:]) * 1e6:8.0f} us", flush=True)


BENCHES: dict[str, Callable[[], None]] = {
    "copy": bench_copy,
    "rms": bench_rms,
    "layer": bench_layer,
    "rotary": bench_rotary,
    "silu": bench_silu,
    "relu": bench_relu,
    "sampling-opt": partial(bench_sampling, 50272, torch.float16),
    "sampling-llama": partial(bench_sampling, 128256, torch.bfloat16),
}


if __name__ == "__main__":
    print(torch.cuda.get_device_name(), torch.__version__)
    for word in sys.argv[1:] or BENCHES:
        BENCHES[word]()
