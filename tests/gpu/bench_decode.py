"""Where the time of a step goes: `python tests/gpu/bench_decode.py`, with all three packages on PYTHONPATH.

One stage holds a whole model of dummy weights and runs decode steps, and last one with prompts beside decodes. `step`
is the time from one step to the next where two are under way, as in an engine; `graph` that of replays back to back;
`host` what the runner's thread takes for a step, `launch` for the graph alone. Of one step each kernel is given what
passes from the end of the one before it to its own end, and `idle` is when none runs: so the parts add up, whether or
not kernels overlap. A linear layer's rate counts its weights once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from bench_attention import copy_rate, median_us
from ppengine.checkpoint.model_spec import read_spec
from ppengine.models import StageModel, build_stage, init_dummy
from ppengine.models.layers import Linear
from ppengine.protocol.steps import TOKEN_ON_DEVICE, TOKEN_REGISTERED, Register, Row, Step
from ppengine.stage.backends.base import Ends
from ppengine.stage.backends.cuda.cuda_runner import CudaRunner
from ppengine.stage.backends.cuda.decode_graphs import DecodeGraphs, Padding
from ppengine.stage.backends.cuda.device_tokens import LocalTokenTable
from ppengine.stage.backends.cuda.host_copies import HostCopies
from ppengine.stage.backends.cuda.streams import Stream
from ppengine.stage.batch_state import BatchState
from ppengine.stage.checks import StageChecks
from ppengine.stage.generations import Generations
from ppengine.stage.recorder import Recorder
from ppengine.stage.runner import RunnerParts
from ppkernels.gpu.adjustments import DeviceAdjustments
from ppkernels.gpu.sampling import DeviceSampling
from ppkernels.kv_layout import cache_shape
from torch.profiler import ProfilerActivity, profile

DEVICE = torch.device("cuda")
BLOCK, LENGTH = 16, 2048
_IDS = {"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}
MODELS: dict[str, dict[str, Any]] = {
    "opt-6.7b": {
        "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 4096, "num_hidden_layers": 32,
        "ffn_dim": 16384, "num_attention_heads": 32, "word_embed_proj_dim": 4096, "vocab_size": 50272,
        "max_position_embeddings": 2048, "activation_function": "relu", "do_layer_norm_before": True,
        "torch_dtype": "float16", "tie_word_embeddings": True, **_IDS,
    },
    "llama-8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
        "torch_dtype": "bfloat16", "tie_word_embeddings": False, **_IDS,
    },
}  # fmt: skip
MODELS["llama-8b-half"] = MODELS["llama-8b"] | {
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 7168,
    "vocab_size": 64128, "max_position_embeddings": 32768,
}  # fmt: skip
"""The products of one of two ranks."""
CLASSES = {
    "attention": "attend|weigh",
    "norm": "_norm_rows",
    "rotary, store": "_store|rotate",
    "activation": "_silu_and_mul|relu|launch_clamp",
    "sampling": "sample_rows",
}
PRODUCTS = "gemm|gemv|nvjet|cutlass|splitK|_few_rows|multiply"
REDUCES = "splitKreduce|reduce_kernel"


class Kernel(NamedTuple):
    name: str
    start: float
    end: float


class Breakdown(NamedTuple):
    parts: dict[Any, tuple[int, float]]
    """(count, µs) by (part, bytes of weights)."""
    idle: float
    count: int

    @property
    def summary(self) -> str:
        return f"{self.count} kernels, idle {self.idle:.0f} µs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=sorted(MODELS, reverse=True))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64, 128, 256])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=2048, help="of the step with prompts, decodes included")
    parser.add_argument("--spread", type=int, default=1, help="blocks lie apart in a cache so many times as large")
    args = parser.parse_args()
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; copy {rate:.0f} GB/s, context {args.context}")
    with torch.inference_mode():
        for name in args.models:
            bench(name, args.rows, args.context, args.tokens, rate, args.spread)
            torch.cuda.empty_cache()


def bench(name: str, sizes: list[int], context: int, tokens: int, rate: float, spread: int) -> None:
    model = build(MODELS[name], LENGTH + context)
    blocks = -(-(context + 1) // BLOCK)
    spec, dtype = model.spec, model._table.dtype
    shape = cache_shape(max(sizes) * blocks * spread + 1, BLOCK, spec.num_kv_heads, spec.head_dim, DEVICE)
    caches = [torch.randn(shape, device=DEVICE, dtype=dtype) for _ in range(spec.num_layers)]
    compute = Stream("compute", DEVICE)
    latest = torch.zeros(1 << 16, dtype=torch.int32, device=DEVICE)
    graphs = DecodeGraphs(model, caches, compute, max(sizes), -(-(LENGTH + context) // BLOCK), BLOCK, latest, None)
    graphs.sizes, graphs.shared_sizes = sorted(sizes), []
    graphs.capture(torch.cuda.graph_pool_handle(), lambda done: None)
    state = BatchState(LENGTH + context, BLOCK)
    buffers: Any = SimpleNamespace(
        compute=compute, device=DEVICE, graphs=[graphs], latest=latest, incoming=None, progress=SimpleNamespace(),
        sampling=DeviceSampling(1 << 16, DEVICE, banned=64),
        adjustments=DeviceAdjustments(1 << 16, spec.vocab_size, LENGTH + context, DEVICE),
        mover=None, copies=HostCopies(compute.order.ledger),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        ring = Recorder(Path(folder) / "main.ring", "main", 0, 0)
        known = LocalTokenTable()
        known.expect(0, np.arange(max(sizes)))
        parts: Any = RunnerParts(
            stage=0, rank=0, generation=1, model=model, state=state, cache=SimpleNamespace(layers=caches), swap=None,
            ring=ring, ends=Ends(tokens=known), checks=StageChecks(0, 0, Generations(1)),
        )  # fmt: skip
        runner = CudaRunner(parts, buffers)
        register(runner, max(sizes), blocks, context, spread)
        for rows in sizes:
            step, host = run_steps(runner, decodes(rows, context))
            graph = graphs._graphs[Padding(rows, shared=False)][0]
            with compute.use():
                replay = median_us(graph.replay)
                kernels = breakdown(graph.replay, model)
                launch = host_us(graph.replay)
            print(
                f"\n{name}, {rows} rows: step {step:.0f} µs, graph {replay:.0f}, host {host:.0f}, launch {launch:.0f}, "
                f"{kernels.summary}"
            )
            show(kernels, rows, rows, rate)
        rows = decodes(max(sizes), context)
        for slot in range(min(len(rows), max(0, tokens - len(rows)) // context)):
            rows[slot] = Row(slot, 0, context, True, TOKEN_REGISTERED)
        tokens = sum(row.count for row in rows)
        step, host = run_steps(runner, rows, times=12)
        kernels = breakdown(lambda: runner.execute(Step(1, 2, 0, rows=rows)).finish(), model)
        print(f"\n{name}, {len(rows)} rows, {tokens} tokens: step {step:.0f} µs, host {host:.0f}, {kernels.summary}")
        show(kernels, tokens, len(rows), rate)


def show(kernels: Breakdown, tokens: int, sampled: int, rate: float) -> None:
    for (part, size), (count, time_us) in sorted(kernels.parts.items(), key=lambda item: -item[1][1]):
        line = f"  {part:28} {count:4} x {time_us / count:7.2f} µs {time_us / 1e3:7.3f} ms"
        if size:
            speed = size * count / time_us / 1e3
            rows = sampled if part.startswith("head") else tokens
            line += f" {speed:6.0f} GB/s {speed / rate:4.0%} {rows * speed / 1e3:4.0f} TFLOP/s"  # of 2 bytes a weight
        print(line, flush=True)


def build(config: dict[str, Any], length: int) -> StageModel:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        spec = read_spec(Path(folder))
    dtype = getattr(torch, spec.dtype)
    model = build_stage(spec, (0, spec.num_layers), True, True, dtype, DEVICE, length)
    init_dummy(model, 0)
    model.pack()
    return model


def decodes(rows: int, context: int) -> list[Row]:
    return [Row(slot, context - 1, 1, True, TOKEN_ON_DEVICE) for slot in range(rows)]


def register(runner: CudaRunner, rows: int, blocks: int, context: int, spread: int) -> None:
    """Make `rows` requests known, each with blocks of its own, not side by side."""
    order = torch.randperm(rows * blocks * spread)[: rows * blocks].add_(1).view(rows, blocks).tolist()
    prompt = torch.randint(10, 50000, (context,)).tolist()
    known = [Register(slot, str(slot), prompt, context, 0.0, 1.0, 0, slot, 0, 0, [], -1) for slot in range(rows)]
    tables = [(slot, 0, order[slot]) for slot in range(rows)]
    runner.execute(Step(1, 1, 0, register=known, tables=tables)).finish()


def run_steps(runner: CudaRunner, rows: list[Row], times: int = 60) -> tuple[float, float]:
    """Return µs from step to step, and those that the thread took to launch and to finish one."""
    ends, hosts, pending = [], [], deque()
    step = Step(1, 2, 0, rows=rows)
    for _ in range(times):
        begun = time.perf_counter()
        pending.append(runner.execute(step))
        launched = time.perf_counter()
        if len(pending) > 2:
            oldest = pending.popleft()
            for wait in oldest._waits:
                wait.synchronize()
            done = time.perf_counter()
            oldest.finish()
            hosts.append(time.perf_counter() - done + launched - begun)
        ends.append(time.perf_counter())
    torch.cuda.synchronize()
    gaps = [after - before for before, after in itertools.pairwise(ends[times // 3 :])]
    return 1e6 * median(gaps), 1e6 * median(hosts[times // 3 :])


def host_us(launch: Callable[[], object]) -> float:
    """Return the median µs for which `launch` keeps its thread while the device is idle."""
    times = []
    for _ in range(9):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        launch()
        times.append(time.perf_counter() - begun)
    torch.cuda.synchronize()
    return 1e6 * median(times)


def breakdown(run: Callable[[], object], model: StageModel) -> Breakdown:
    """Return that of the median of 9 runs."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(9):
            run()
            torch.cuda.synchronize()
    found = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [Kernel(event.name, event.time_range.start, event.time_range.end) for event in found]
    kernels.sort(key=lambda kernel: kernel.start)
    count = len(kernels) // 9
    replays = [kernels[first : first + count] for first in range(0, 9 * count, count)]
    replays.sort(key=lambda replay: replay[-1].end - replay[0].start)
    return attribute(replays[4], model)


def attribute(kernels: list[Kernel], model: StageModel) -> Breakdown:
    layers = [
        (f"{name.rsplit('.', 1)[-1]} {module.weight.shape[1]} > {module.weight.shape[0]}", module.weight.nbytes)
        for name, module in model.named_modules()
        if isinstance(module, Linear)
    ]
    products = [k for k in kernels if re.search(PRODUCTS, k.name) and not re.search(REDUCES, k.name)]
    known = iter(layers if len(products) == len(layers) else [("product", 0)] * len(products))
    parts: dict[Any, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    end, idle, last = kernels[0].start, 0.0, ("product", 0)
    for kernel in kernels:
        idle += max(0.0, kernel.start - end)
        took = max(0.0, kernel.end - max(end, kernel.start))
        end = max(end, kernel.end)
        more = 1
        if re.search(REDUCES, kernel.name):
            part, more = last, 0
        elif re.search(PRODUCTS, kernel.name):
            part = last = next(known)
        else:
            classes = [word for word, names in CLASSES.items() if re.search(names, kernel.name)]
            part = (classes[0] if classes else kernel.name.removeprefix("void at::native::")[:28]), 0
        number, total = parts[part]
        parts[part] = number + more, total + took
    return Breakdown({part: (max(number, 1), total) for part, (number, total) in parts.items()}, idle, len(kernels))


if __name__ == "__main__":
    main()
