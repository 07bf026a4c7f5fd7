"""The time that the parts of a step cost, measured or from given rates, and the tokens a second that follow.

Pure arithmetic. docs/design/measuring.md has the formula.
"""

from __future__ import annotations

from bisect import bisect_left

import msgspec

from ppengine.bench.share_sizes import share_bytes
from ppengine.checkpoint.model_shard import shard_of
from ppengine.checkpoint.model_spec import ModelSpec


class Curve(msgspec.Struct, frozen=True):
    """Seconds by size: straight between the points, and on along the last two. Sizes rise."""

    points: list[tuple[float, float]]

    def at(self, size: float) -> float:
        """Return the seconds of `size`; below the first point, those of the first."""
        points = self.points
        if size <= points[0][0] or len(points) == 1:
            return points[0][1]
        after = min(max(1, bisect_left(points, size, key=lambda point: point[0])), len(points) - 1)
        (low, begin), (high, end) = points[after - 1], points[after]
        return max(0.0, begin + (end - begin) * (size - low) / (high - low))


class ShareTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's share of the model's work, `1 / tensor` of it, in seconds."""

    tensor: int
    threads: int
    """Threads that a CPU place computes with; 1 for a card."""
    busy: bool
    """Measured while the other cores computed as well; for cards there is no difference."""
    layer: Curve
    """One layer, by tokens of the step, without reading older context."""
    context_s: float
    """One layer, a token of context that a decode reads."""
    pair_s: float
    """One layer, a token of context that a token of a prompt's chunk reads."""
    head: Curve
    """Head and sampling, by sampled rows."""
    embed: Curve
    """Looking up tokens, by tokens."""


class HostTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Work beside the layers, in seconds."""

    step_s: float = 0.0
    """Fixed work of a stage a step: plan, records, messages."""
    row_s: float = 0.0
    """Work of a stage for each row of a step."""
    core_step_s: float = 0.0
    core_row_s: float = 0.0
    """The same of the core, which schedules and retires."""
    others: float = 0.0
    """Cores that gateway and agent keep busy."""


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """All that an estimate takes."""

    device: str
    cores: int
    """Cores that all places and the core share; 0: each place has a card of its own."""
    item_bytes: int
    """Bytes of a weight, and of a key or value."""
    shares: list[ShareTimes]
    hop: Curve
    """A message from a stage to the next, by bytes."""
    reduce: dict[int, Curve]
    """An all-reduce by bytes, for each number of ranks."""
    host: HostTimes = HostTimes()

    def share(self, tensor: int, threads: int, busy: bool) -> ShareTimes:
        """Return the times of a share. Raises KeyError if it was not measured."""
        found = [each for each in self.shares if (each.tensor, each.threads) == (tensor, threads)]
        if not found:
            raise KeyError(f"{tensor} ranks of {threads} threads were not measured")
        return next((each for each in found if each.busy == busy), found[0])


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one length, all there from the beginning."""

    requests: int
    input: int
    output: int


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """One micro-batch: `tokens` that read `context` older ones each; `rows` of them are sampled."""

    tokens: float
    rows: float
    context: float
    decode: bool


class Pipe(msgspec.Struct, frozen=True, kw_only=True):
    """A layout as the estimate sees it."""

    tensor: int
    layers: list[int]
    """Layers of each stage."""
    threads: int
    ahead: bool
    """Whether the core schedules the next step before the last one has retired."""
    chunk: int
    """Most tokens of a step."""
    at_once: int
    """Most requests that run at a time."""


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one micro-batch."""

    latency: float
    """From its start on the first stage until its tokens are back there."""
    longest: float
    """The busiest stage."""
    cpu: float
    """CPU seconds of all processes; 0 with cards."""


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """A workload from its first step to its last."""

    seconds: float
    cpu: float
    """CPU seconds of stages and core; 0 with cards."""


def speed_of(spec: ModelSpec, pipe: Pipe, costs: Costs, load: Load) -> Speed:
    """Return the time of `load`: all prompts in chunks, then a step for each further token of the running requests."""
    running = min(load.requests, pipe.at_once)
    batches = min(len(pipe.layers), running)
    rows = running / batches
    work = Work(tokens=rows, rows=rows, context=load.input + load.output / 2, decode=True)
    each = micro_batch(spec, pipe, costs, work, batches)
    steps = (load.output - 1) * max(1.0, load.requests / pipe.at_once)
    prompts = _prefill(spec, pipe, costs, load)
    return Speed(
        seconds=prompts.seconds + steps * _cycle_s(each, batches, costs), cpu=prompts.cpu + steps * batches * each.cpu
    )


def micro_batch(spec: ModelSpec, pipe: Pipe, costs: Costs, work: Work, batches: int) -> MicroBatch:
    """Return the times of one micro-batch while `batches` of them are in flight."""
    host, ranks, stages = costs.host, pipe.tensor, len(pipe.layers)
    message = spec.hidden_size * costs.item_bytes
    busy = batches * ranks > 1
    # Ranks of a stage work at the same time; if there are more than cores, they take turns.
    turns = max(1.0, ranks * pipe.threads / costs.cores) if costs.cores else 1.0
    walls, cpu = [], host.core_step_s + host.core_row_s * work.rows
    core_s = cpu
    for stage, layers in enumerate(pipe.layers):
        own = costs.share(ranks, pipe.threads, busy)
        each = own.layer.at(work.tokens) + work.tokens * work.context * (own.context_s if work.decode else own.pair_s)
        computed = layers * each + (own.head.at(work.rows) if stage == stages - 1 and work.rows else 0.0)
        computed += 0.0 if stage else own.embed.at(work.tokens)
        beside = host.step_s + host.row_s * work.rows
        shared = 0.0
        if ranks > 1:
            sums = 2 * layers + (stage == 0)
            shared = sums * costs.reduce[ranks].at(work.tokens * message)
            shared += costs.reduce[ranks].at(work.rows * 8) if stage == stages - 1 and work.rows else 0.0
        walls.append(turns * (computed + beside) + shared)
        cpu += ranks * (computed * pipe.threads + beside) + shared
    hops = (stages - 1) * costs.hop.at(work.tokens * message) + costs.hop.at(work.rows * 8) if stages > 1 else 0.0
    latency = sum(walls) + hops + (0.0 if pipe.ahead and costs.cores != 1 else core_s)
    return MicroBatch(latency=latency, longest=max(walls), cpu=cpu if costs.cores else 0.0)


def _cycle_s(each: MicroBatch, batches: int, costs: Costs) -> float:
    """Return the seconds in which `batches` micro-batches have passed all stages once."""
    cores = max(0.5, costs.cores - costs.host.others)
    return max(each.latency, batches * each.longest, batches * each.cpu / cores)


def _prefill(spec: ModelSpec, pipe: Pipe, costs: Costs, load: Load) -> Speed:
    """Return the time of all prompts, in chunks of equal size that follow each other through the stages."""
    total = load.requests * load.input
    chunks = -(-total // pipe.chunk)
    tokens = total / chunks
    work = Work(tokens=tokens, rows=load.requests / chunks, context=load.input / 2, decode=False)
    batches = min(chunks, len(pipe.layers))
    each = micro_batch(spec, pipe, costs, work, batches)
    seconds = each.latency + (chunks - 1) * _cycle_s(each, batches, costs) / batches
    return Speed(seconds=seconds, cpu=chunks * each.cpu)


FURTHER_RANK_US = 2.0
"""As measured on four H200: an all-reduce of 8 KiB takes 4.7 us by itself, and some 9 in a decode step of an engine."""


class GivenRates(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of a card."""

    gbps: float
    tflops: float
    hop_us: float
    reduce_us: float
    """Fixed time of an all-reduce of two ranks; each further rank takes `FURTHER_RANK_US` more."""
    link_gbps: float
    """Rate of a hop and of an all-reduce."""
    step_us: float
    """Time of a decode step through all layers in which nothing runs on the card."""
    layer_us: float
    """Time of a layer with more than one token beside its bytes and products: its kernels begin and end."""


def costs_of_rates(spec: ModelSpec, rates: GivenRates, item_bytes: int, ranks: list[int], device: str) -> Costs:
    """Return the costs of cards with `rates`: weights and context are read once a step, products come on top.

    A message of a hop, and of an all-reduce, takes its fixed time and its bytes at the rate of the link. In two shots n
    ranks send 2 (n - 1) / n of the bytes. The time of a step without a running kernel is spread over all layers: it is
    between kernels. Products of one token are chained to each other on cards, others are not: so they have `layer_us`
    more.
    """
    byte_s, flop_s, link_s = 1e-9 / rates.gbps, 1e-12 / rates.tflops, 1e-9 / rates.link_gbps
    shares, idle_s = [], rates.step_us * 1e-6 / spec.num_layers
    for size in ranks:
        shard = shard_of(spec, 0, size)
        layer = share_bytes(spec, shard, 1, item_bytes, first=False, last=False)
        head = shard.vocabulary_widths[-1] * (spec.embed_dim or spec.hidden_size) * item_bytes
        kv = 2 * shard.num_kv_heads * spec.head_dim * item_bytes
        pair = 4 * shard.num_heads * spec.head_dim * flop_s
        shares.append(
            ShareTimes(
                tensor=size, threads=1, busy=False,
                layer=_layer(idle_s + layer * byte_s, 2 * layer / item_bytes * flop_s, rates.layer_us * 1e-6),
                context_s=kv * byte_s, pair_s=pair,
                head=_line(head * byte_s, 2 * head / item_bytes * flop_s), embed=_line(0.0, 0.0),
            )
        )  # fmt: skip
    joined = {
        size: _line((rates.reduce_us + FURTHER_RANK_US * (size - 2)) * 1e-6, link_s * 2 * (size - 1) / size)
        for size in ranks if size > 1
    }  # fmt: skip
    hop = _line(rates.hop_us * 1e-6, link_s)
    return Costs(device=device, cores=0, item_bytes=item_bytes, shares=shares, hop=hop, reduce=joined)


def _layer(begin: float, slope: float, more: float) -> Curve:
    """Return a line that is `more` higher from two tokens on."""
    return Curve([(1.0, begin + slope), (2.0, begin + 2 * slope + more), (3.0, begin + 3 * slope + more)])


def _line(begin: float, slope: float) -> Curve:
    return Curve([(0.0, begin), (1.0, begin + slope)])
