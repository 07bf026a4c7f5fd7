"""Measure the attention kernels on a GPU: `python tests/gpu/bench_attention.py` with `kernels` on PYTHONPATH.

Times are medians of CUDA graph replays, divided by the layers in the graph; there are so many layers that the caches do
not fit into the L2 cache. Rates count the bytes of keys and values, or the products that a causal mask leaves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import numpy as np
import torch
from ppkernels.attention_plan import AttentionPlan
from ppkernels.batch import Batch
from ppkernels.block_copy import copy_layers
from ppkernels.gpu.paged_prefill import attend_chunks
from ppkernels.kv_layout import cache_shape
from ppkernels.paged_attention import paged_attention
from ppkernels.rotary import rotate
from ppkernels.rotate_and_store import rotate_and_store
from ppkernels.shared_prefixes import find_shared, on_device, pad_words, words_of
from ppkernels.store_kv import store_kv
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

DEVICE = torch.device("cuda")
BLOCK = 16
LEAST_BYTES = 1 << 30
MODELS = {"OPT-6.7B": (32, 32, 128, torch.float16), "Llama-8B": (32, 8, 128, torch.bfloat16)}

PARTS = {f"Llama-8B, rank of {n}": (32 // n, 8 // n, 128, torch.bfloat16) for n in (2, 4)}


def main() -> None:
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; copy {rate:.0f} GB/s\n")
    for name, model in MODELS.items():
        bench_decode(name, model, rate)
    for name, model in {**MODELS, **PARTS}.items():
        bench_shared(name, model)
    for name, model in MODELS.items():
        bench_prefill(name, model)
    for name, model in MODELS.items():
        bench_writes(name, model)


def bench_decode(name: str, model: tuple[int, int, int, torch.dtype], rate: float) -> None:
    heads, kv_heads, width, dtype = model
    print(f"{name} decode      µs  GB/s share |  SDPA, contiguous, µs")
    for batch in (1, 32, 64, 128, 256):
        for context in (512, 2048):
            size = 2 * batch * context * kv_heads * width * dtype.itemsize
            layers = max(2, min(32, LEAST_BYTES // size))
            rows = [(context - 1, 1)] * batch
            caches, step = paged(rows, kv_heads, width, dtype, layers)
            fused = torch.randn(batch, heads + 2 * kv_heads, width, device=DEVICE, dtype=dtype)
            plan = AttentionPlan(step, heads, dtype)
            own = per_layer(lambda kv, fused=fused, plan=plan: paged_attention(fused, kv, plan), caches)
            query = fused[:, :heads].unsqueeze(2).contiguous()
            dense = [kv.view(-1)[: size // dtype.itemsize].view(2, batch, kv_heads, context, width) for kv in caches]
            theirs = per_layer(
                lambda kv, query=query: scaled_dot_product_attention(query, kv[0], kv[1], enable_gqa=heads != kv_heads),
                dense,
            )
            speed = size / own / 1e3
            print(f"  {batch:4} x {context:5} {own:9.1f} {speed:5.0f}  {speed / rate:4.0%} | {theirs:9.1f}")


def bench_shared(name: str, model: tuple[int, int, int, torch.dtype]) -> None:
    """Print decodes that share a prefix: each row reads it, a tile of rows does, and the same launches without one."""
    heads, kv_heads, width, dtype = model
    print(f"\n{name} shared prefix    each row µs   once µs        | nothing shared, µs")
    for rows, prefix, own in (
        (256, 1_504, 100),
        (128, 1_504, 100),
        (32, 1_504, 100),
        (16, 12_000, 200),
        (4, 12_000, 200),
    ):
        lengths = [prefix + 1 + n * 2 * own // rows for n in range(rows)]
        caches, step = paged([(length - 1, 1) for length in lengths], kv_heads, width, dtype, 8)
        step.block_tables[1:, : prefix // BLOCK] = step.block_tables[0, : prefix // BLOCK]
        fused = torch.randn(rows, heads + 2 * kv_heads, width, device=DEVICE, dtype=dtype)
        words = find_shared(
            step.block_tables.cpu().numpy().astype(int), np.array(lengths), np.ones(rows, int), BLOCK, 1
        )
        none = np.zeros(words_of(rows), int)
        pad_words(None, 0, none, rows)
        times = []
        for found in (None, words, none):
            there = None if found is None else on_device(torch.tensor(found, dtype=torch.int32, device=DEVICE), rows)
            plan = AttentionPlan(replace(step, shared=there), heads, dtype)
            times.append(per_layer(lambda kv, fused=fused, plan=plan: paged_attention(fused, kv, plan), caches))
        each, once, empty = times
        label = f"{rows} x {prefix} and {own}"
        print(f"  {label:24} {each:11.1f} {once:9.1f}  {each / once:5.2f} | {empty:9.1f}  {empty - each:+.1f}")


def bench_prefill(name: str, model: tuple[int, int, int, torch.dtype]) -> None:
    heads, kv_heads, width, dtype = model
    print(f"\n{name} prefill               µs  TFLOP/s |  other cards' kernel | torch's, of other lengths, contiguous")
    steps = {
        "1 x 4096": [(0, 4096)],
        "4096 after 8192": [(8192, 4096)],
        "8 x 512": [(0, 512)] * 8,
        "2048 after 2048": [(2048, 2048)],
        "512 after 3584": [(3584, 512)],
        "8 after 8192": [(8192, 8)],
        "64 after 8192": [(8192, 64)],
        "16 x 8 after 1024": [(1024, 8)] * 16,
        "1536 + 128 decodes of 1024": [(0, 1536)] + [(1023, 1)] * 128,
    }
    for label, rows in steps.items():
        caches, step = paged(rows, kv_heads, width, dtype, 4)
        tokens = sum(count for _, count in rows)
        fused = torch.randn(tokens, heads + 2 * kv_heads, width, device=DEVICE, dtype=dtype)
        plan = AttentionPlan(step, heads, dtype)
        own = per_layer(lambda kv, fused=fused, plan=plan: paged_attention(fused, kv, plan), caches)
        flops = sum(4 * heads * width * (count * start + count * (count + 1) // 2) for start, count in rows)
        out = fused.new_empty(tokens, heads * width)
        plain = per_layer(lambda kv, f=fused, s=step, o=out: attend_chunks(f, kv, s, heads, o), caches)
        line = f"  {label:27} {own:8.1f} {flops / own / 1e6:7.0f}  | {plain:8.1f} {flops / plain / 1e6:7.0f}"
        if all(start == 0 for start, _ in rows):
            starts, longest = step.query_start, max(step.query_lens)
            parts = fused.split((heads, kv_heads, kv_heads), 1)
            arguments = (*parts, starts, starts, longest, longest, 0.0, True, False)
            theirs = per_layer(lambda _, a=arguments: torch.ops.aten._flash_attention_forward(*a), caches)
            line += f"  | {flops / theirs / 1e6:7.0f}"
        print(line)


def bench_writes(name: str, model: tuple[int, int, int, torch.dtype]) -> None:
    heads, kv_heads, width, dtype = model
    print(f"\n{name} writes")
    for tokens in (1, 128, 4096):
        caches, step = paged([(0, tokens)], kv_heads, width, dtype, 16)
        fused = torch.randn(tokens, heads + 2 * kv_heads, width, device=DEVICE, dtype=dtype)
        time = per_layer(lambda kv, fused=fused, step=step: store_kv(kv, fused, step.slot_mapping), caches)
        moved = 4 * tokens * kv_heads * width * dtype.itemsize
        line = f"  store {tokens:5} tokens {time:7.1f} µs  {moved / time / 1e3:6.0f} GB/s"
        tables = torch.randn(2, tokens, width, device=DEVICE, dtype=dtype)
        arguments = (*tables, step.positions)
        apart = per_layer(lambda _, f=fused, a=arguments: rotate(f, heads + kv_heads, *a), caches)
        both = per_layer(
            lambda kv, f=fused, a=arguments, s=step.slot_mapping: rotate_and_store(kv, f, heads, *a, s), caches
        )
        print(f"{line}; rotate {apart:7.1f} µs; in one launch {both:7.1f} µs")
    caches, _ = paged([(0, BLOCK * 512)], kv_heads, width, dtype, 32)
    pairs = [(256 + index, index) for index in range(1, 257)]
    time = median_us(lambda: copy_layers(caches, caches, pairs))
    moved = len(pairs) * 2 * sum(kv[0].nbytes for kv in caches)
    print(f"  256 blocks x 32 layers moved: {time:.0f} µs  {moved / time / 1e3:.0f} GB/s")


def paged(
    rows: list[tuple[int, int]], kv_heads: int, width: int, dtype: torch.dtype, layers: int
) -> tuple[list[Tensor], Batch]:
    """Return caches of random numbers and a batch of rows of (tokens before, tokens now), blocks at random."""
    lengths = [start + count for start, count in rows]
    counts = [count for _, count in rows]
    used = [-(-length // BLOCK) for length in lengths]
    shape = cache_shape(sum(used) + 1, BLOCK, kv_heads, width, DEVICE)
    caches = [torch.randn(shape, device=DEVICE, dtype=dtype) for _ in range(layers)]
    tables = torch.zeros((len(rows), max(used)), dtype=torch.int32)
    for row, blocks in enumerate((torch.randperm(sum(used)) + 1).split(used)):
        tables[row, : used[row]] = blocks
    positions = torch.cat([torch.arange(start, start + count) for start, count in rows])
    owner = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(counts))
    slots = tables[owner, positions // BLOCK] * BLOCK + positions % BLOCK

    def placed(integers: list[int] | Tensor) -> Tensor:
        return torch.as_tensor(integers, dtype=torch.int32, device=DEVICE)

    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    decode_only = max(counts) == 1
    batch = Batch(
        placed(positions), placed(slots), placed(starts), counts, placed(lengths), placed(tables), decode_only, BLOCK
    )
    return caches, batch


def per_layer(layer: Callable[[Tensor], object], caches: list[Tensor]) -> float:
    """Return the median µs of `layer`, over replays of a graph that runs it once for each cache."""
    layer(caches[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for cache in caches:
            layer(cache)
    return median_us(graph.replay) / len(caches)


def median_us(work: Callable[[], object]) -> float:
    """Return the median µs of `work` on the device, over 10 runs behind 3 others."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(14)]
    for event in events:
        event.record()
        work()
    torch.cuda.synchronize()
    return 1e3 * median(first.elapsed_time(second) for first, second in itertools.pairwise(events[3:]))


def copy_rate() -> float:
    """Return GB/s of a copy on the device, bytes read plus written."""
    source = torch.randn(1 << 29, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_us(lambda: target.copy_(source)) / 1e3


if __name__ == "__main__":
    main()
