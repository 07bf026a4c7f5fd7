"""The layouts pipeline x tensor of a model: whether each fits, how many requests run, and the one to take.

Pure arithmetic; the blocks are those of `common.memory_arithmetic`, as the engine counts them.
"""

from __future__ import annotations

import math
import mmap

import msgspec

from ppengine.bench.costs import Costs, Load, Pipe, speed_of
from ppengine.bench.share_sizes import activation_bytes, share_bytes
from ppengine.checkpoint.model_shard import Shard, refusal, shard_of
from ppengine.checkpoint.model_spec import ModelSpec
from ppengine.common.config import ConfigError, Profile
from ppengine.common.groups import Groups
from ppengine.common.memory_arithmetic import StageBudget, block_bytes, fewest_blocks, plan_memory, shortage
from ppengine.common.partition import partition_layers
from ppengine.common.sizes import size_text

ALIKE = 0.02
"""Share of tokens a second by which layouts count as equally fast; then the one with fewer places is taken."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The places that there are."""

    places: int
    """Most processes: cards, or the cores of a CPU."""
    cards: bool
    memory: int
    """Bytes of a card, or those of the host that all CPU places share."""
    shared: bool
    cores: int = 0
    granule: int = mmap.PAGESIZE
    """Bytes in which KV cache is mapped: pages of a CPU, handles of a card."""

    def memory_of(self, places: int) -> int:
        """Return the bytes that each of `places` has."""
        return self.memory // places if self.shared else self.memory


class Layout(msgspec.Struct, kw_only=True):
    """One layout. `refusal`: why it cannot be; empty: it fits."""

    pipeline: int
    tensor: int
    refusal: str = ""
    layers: list[int] = []
    weights_bytes: list[int] = []
    """Those of a rank, by stage."""
    peak_bytes: list[int] = []
    """Weights and the activations of the largest step, as estimated."""
    block_bytes: list[int] = []
    blocks: int = 0
    at_once: int = 0
    """Requests of the workload that run at a time, by blocks and `scheduler.max_num_seqs`."""
    threads: int = 1
    tokens_s: float | None = None
    """Output tokens a second of the workload; None: the time was not estimated."""
    single_tokens_s: float | None = None
    """The same of one request alone."""
    cpu_ms: float = 0.0
    """CPU milliseconds of stages and core for an output token of the workload; 0 with cards."""

    @property
    def places(self) -> int:
        """Processes."""
        return self.pipeline * self.tensor

    @property
    def name(self) -> str:
        """`pipeline x tensor`."""
        return f"{self.pipeline} x {self.tensor}"


def all_layouts(places: int) -> list[tuple[int, int]]:
    """Return pipeline and tensor of every layout of at most `places` processes, in order."""
    return [(pipeline, tensor) for pipeline in range(1, places + 1) for tensor in range(1, places // pipeline + 1)]


def lay_out(
    spec: ModelSpec, profile: Profile, machine: Machine, item_bytes: int, load: Load, pipeline: int, tensor: int
) -> Layout:
    """Return one layout with its room, or with the reason why it cannot be."""
    made = Layout(pipeline=pipeline, tensor=tensor)
    if text := refusal(spec, tensor):
        made.refusal = text
        return made
    parallel = profile.parallel
    cut = parallel.partition if parallel.partition and len(parallel.partition) == pipeline else None
    try:
        spans = partition_layers(spec.num_layers, pipeline, cut, head=spec.head_layers)
    except ConfigError as error:
        made.refusal = str(error)
        return made
    made.layers = [end - start for start, end in spans]
    made.threads = profile.threads_per_stage or max(1, machine.cores // made.places) if machine.cores else 1
    _fill(made, spec, profile, machine, item_bytes, load)
    return made


def _fill(made: Layout, spec: ModelSpec, profile: Profile, machine: Machine, item_bytes: int, load: Load) -> None:
    """Add bytes, blocks and requests at once; or the refusal if a place has too little memory."""
    budgets = _budgets(made, spec, profile, machine, item_bytes)
    memory = profile.memory
    longest = profile.model.max_model_len or spec.max_model_len
    wanted = fewest_blocks(longest, memory.block_size)
    short = shortage(budgets, memory.utilization, wanted)
    if short is not None:
        made.refusal = (
            f"{short.name} is short by {size_text(short.short_bytes)} ({short.short_bytes} bytes) of "
            f"{size_text(machine.memory_of(made.places))} for one request of {longest} tokens"
        )
        return
    made.blocks = plan_memory(budgets, memory.utilization).mapped
    a_request = -(-(load.input + load.output) // memory.block_size)
    made.at_once = min((made.blocks - 1) // a_request, profile.scheduler.max_num_seqs)
    if not made.at_once:
        made.refusal = f"{made.blocks} blocks hold no request of {load.input} + {load.output} tokens: {a_request}"


def _budgets(made: Layout, spec: ModelSpec, profile: Profile, machine: Machine, item_bytes: int) -> list[StageBudget]:
    """Return the memory of every place; the ranks of a stage may differ by a few rows."""
    budgets, groups = [], Groups(made.pipeline, made.tensor)
    for place in groups.places:
        shard = shard_of(spec, place.rank, made.tensor)
        weights, peak, block = _bytes_of(made, spec, profile, shard, place.stage, item_bytes)
        if not place.rank:
            made.weights_bytes.append(weights)
            made.peak_bytes.append(peak)
            made.block_bytes.append(block)
        else:
            made.weights_bytes[-1] = max(made.weights_bytes[-1], weights)
            made.peak_bytes[-1] = max(made.peak_bytes[-1], peak)
        quantum = _quantum(block // made.layers[place.stage], machine.granule)
        budgets.append(StageBudget(machine.memory_of(made.places), peak, block, quantum, None, groups.text(place)))
    return budgets


def _bytes_of(
    made: Layout, spec: ModelSpec, profile: Profile, shard: Shard, stage: int, item_bytes: int
) -> tuple[int, int, int]:
    """Return weights, peak and a block's bytes of one rank of `stage`."""
    layers, first, last = made.layers[stage], stage == 0, stage == made.pipeline - 1
    scheduler = profile.scheduler
    weights = share_bytes(spec, shard, layers, item_bytes, first=first, last=last)
    tokens = scheduler.max_num_batched_tokens
    rows = min(scheduler.max_num_seqs, tokens)
    peak = weights + activation_bytes(spec, shard, item_bytes, tokens, rows, last=last)
    peak += 0 if first else tokens * spec.hidden_size * item_bytes
    block = block_bytes(
        block_size=profile.memory.block_size, layers=layers, kv_heads=shard.num_kv_heads, head_dim=spec.head_dim,
        dtype_bytes=item_bytes,
    )  # fmt: skip
    return weights, peak, block


def _quantum(layer_block_bytes: int, granule: int) -> int:
    return granule // math.gcd(granule, layer_block_bytes)


def estimate(made: Layout, spec: ModelSpec, profile: Profile, costs: Costs, load: Load) -> None:
    """Add the tokens a second of a layout that fits."""
    scheduler = profile.scheduler
    pipe = Pipe(
        tensor=made.tensor, layers=made.layers, threads=made.threads, ahead=scheduler.schedule_ahead,
        chunk=scheduler.max_num_batched_tokens, at_once=made.at_once,
    )  # fmt: skip
    many, alone = (speed_of(spec, pipe, costs, each) for each in (load, msgspec.structs.replace(load, requests=1)))
    made.tokens_s = load.requests * load.output / many.seconds
    made.single_tokens_s = load.output / alone.seconds
    made.cpu_ms = round(1e3 * many.cpu / (load.requests * load.output), 4)


def choose(layouts: list[Layout]) -> tuple[Layout | None, str]:
    """Return the layout to take, and why in one line; None if none fits."""
    runs = [each for each in layouts if not each.refusal and each.tokens_s is not None]
    if not runs:
        return None, "no layout fits"
    most = max(each.tokens_s or 0.0 for each in runs)
    alike = [each for each in runs if (each.tokens_s or 0.0) >= (1 - ALIKE) * most]
    best = min(alike, key=lambda each: (each.places, -(each.tokens_s or 0.0)))
    return best, _why(best, [each for each in runs if each is not best])


def _why(best: Layout, others: list[Layout]) -> str:
    made, single = best.tokens_s or 0.0, best.single_tokens_s or 0.0
    if not others:
        return f"the only layout that fits: {made:,.0f} tokens/s expected"
    second = max(others, key=lambda each: each.tokens_s or 0.0)
    quickest = max(others, key=lambda each: each.single_tokens_s or 0.0)
    theirs = second.tokens_s or 0.0
    text = f"{made:,.0f} tokens/s expected, {made / theirs:.2f} of {second.name}"
    if theirs >= made:
        text += f" with {second.places - best.places} places fewer"
    if (quickest.single_tokens_s or 0.0) > (1 + ALIKE) * single:
        text += f"; for one request alone {quickest.name} is {(quickest.single_tokens_s or 0.0) / single:.2f} as fast"
    return text
