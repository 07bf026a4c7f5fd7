"""The costs of CPU places, measured with the model's own shapes: layers, head, hops and all-reduces.

`python -m ppengine.bench.place_rates` reads what to measure as JSON on stdin and prints the costs as JSON: a process
of its own, which has loaded torch once and forks a process for each place that computes.
"""

from __future__ import annotations

import functools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ppengine.bench.costs import Costs, Curve, HostTimes, ShareTimes
from ppengine.bench.forked import in_forks
from ppengine.bench.link_rates import hops, reduces, rising
from ppengine.bench.share_sizes import share_bytes
from ppengine.checkpoint.model_spec import read_spec

_ROWS = (1, 4, 16, 64)
_CHUNK = 256
"""Tokens of the largest step that is measured; longer ones follow its slope."""
_CONTEXT = 512
_WEIGHTS_BYTES = 96 << 20
"""Layers of at least this size run in a row, so that no cache holds weights that a stage would read from memory."""
_ROUND_S = 0.03
"""Seconds in which one figure is measured again and again; at least three times."""
_LONGER = 8
"""Times that with several threads: each try is spoiled if another process takes the turn of one of them."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The costs to measure."""

    model: str
    dtype: str
    block_size: int
    chunk: int
    cores: int
    shares: list[tuple[int, int]]
    """Tensor ranks and threads of a place."""
    small: str
    """The model of `host_rates`, whose computing is measured too."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Costs without those of the host, and the seconds that a step of the small model computes, by its rows."""

    costs: Costs
    small: Curve


def measured_costs(wanted: Wanted) -> Measured:
    """Return the costs of `wanted`. Raises ValueError if they cannot be measured."""
    command = [sys.executable, "-m", "ppengine.bench.place_rates"]
    ran = subprocess.run(command, input=msgspec.json.encode(wanted), capture_output=True, check=False)
    if ran.returncode:
        last = ran.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ValueError(f"the costs of a place could not be measured: {last}")
    return msgspec.json.decode(ran.stdout, type=Measured)


def measure(wanted: Wanted) -> Measured:
    """Measure in this process and forks of it."""
    import torch

    from ppengine.stage.backends.selection import resolve_dtype

    torch.set_num_threads(1)
    spec = read_spec(Path(wanted.model))
    dtype = resolve_dtype(wanted.dtype, spec.dtype)
    share_of_places(wanted, dtype, 1, 1, False, warm=True)  # loads kernels, which the forks then have
    shares = []
    for tensor, threads in wanted.shares:
        together = max(1, wanted.cores // threads)
        for busy in sorted({tensor > 1 and together > 1, together > 1}):
            work = functools.partial(share_of_places, wanted, dtype, tensor, threads, busy)
            shares.append(in_forks(together if busy else 1, lambda _, work=work: work(), ShareTimes)[0])  # type: ignore[misc]
    row_bytes = spec.hidden_size * dtype.itemsize
    sizes = [rows * spec.hidden_size for rows in (1, 16, min(wanted.chunk, _CHUNK))]
    ranks = sorted({tensor for tensor, _ in wanted.shares if tensor > 1})
    costs = Costs(
        device=f"CPU, {wanted.cores} cores",
        cores=wanted.cores,
        item_bytes=dtype.itemsize,
        shares=shares,
        hop=hops([row_bytes * rows for rows in (1, 16, min(wanted.chunk, _CHUNK))]),
        reduce={size: reduces(size, sizes, dtype) for size in ranks},
        host=HostTimes(),
    )
    return Measured(costs=costs, small=_of_small(wanted))


def _of_small(wanted: Wanted) -> Curve:
    """Return the seconds that a step of the small model computes, by rows."""
    import torch

    small = msgspec.structs.replace(wanted, model=wanted.small, dtype="float32")
    (times,) = in_forks(1, lambda _: share_of_places(small, torch.float32, 1, 1, False), ShareTimes)
    return Curve(
        [
            (rows, times.layer.at(rows) + times.head.at(rows) + times.embed.at(rows))
            for rows in (float(each) for each in _ROWS)
        ]
    )


def share_of_places(
    wanted: Wanted, dtype: Any, tensor: int, threads: int, busy: bool, warm: bool = False
) -> ShareTimes:
    """Return the times of rank 0's share of some layers and the head; `warm`: run each kernel once, quickly."""
    import torch

    torch.set_num_threads(threads)
    bench = _Share(wanted, dtype, tensor, busy)
    with torch.inference_mode():
        if warm:
            bench.decode_s(1, 0, once=True)
            bench.chunk_s(_ROWS[1], 0, once=True)
            bench.head_s(1, once=True)
            bench.embed_s(1, once=True)
            none = Curve([(0.0, 0.0)])
            return ShareTimes(tensor=1, threads=1, busy=False, layer=none, context_s=0, pair_s=0, head=none, embed=none)
        points = [(float(rows), bench.decode_s(rows, 0)) for rows in _ROWS]
        context = bench.longest
        reading = (bench.decode_s(_ROWS[2], context) - points[2][1]) / (_ROWS[2] * context)
        tokens = min(wanted.chunk, _CHUNK, bench.longest)
        fresh, later = bench.chunk_s(tokens, 0), bench.chunk_s(tokens, bench.longest)
        pair = max(0.0, (later - fresh) / (tokens * bench.longest))
        if tokens > points[-1][0]:
            points.append((float(tokens), fresh - pair * tokens * tokens / 2))
        head = [(float(rows), bench.head_s(rows)) for rows in _ROWS]
        embed = [(float(rows), bench.embed_s(rows)) for rows in _ROWS]
    return ShareTimes(
        tensor=tensor, threads=threads, busy=busy, layer=rising(points), context_s=max(0.0, reading), pair_s=pair,
        head=rising(head), embed=rising(embed),
    )  # fmt: skip


class _Share:
    """Some layers and the head of the model, rank 0 of `tensor`, and a KV cache."""

    def __init__(self, wanted: Wanted, dtype: Any, tensor: int, busy: bool) -> None:
        import torch

        from ppengine.checkpoint.model_shard import shard_of
        from ppengine.models import build_stage
        from ppengine.protocol.steps import Register
        from ppengine.protocol.token_ids import compact
        from ppengine.stage.backends.base import KvShape
        from ppengine.stage.backends.cpu.kv_cache import CpuKvCache
        from ppengine.stage.batch_state import BatchState
        from ppengine.stage.rank_group import LoneRank

        self._spec = spec = read_spec(Path(wanted.model))
        shard = shard_of(spec, 0, tensor)

        one = share_bytes(spec, shard, 1, dtype.itemsize, first=False, last=False)
        layers = self._layers = max(1, min(spec.num_layers, -(-_WEIGHTS_BYTES // one)))
        self._model = build_stage(
            spec, layers=(0, layers), first=True, last=True, dtype=dtype, shard=shard, group=LoneRank(0, tensor)
        )
        for source in self._model.sources:
            source.target.fill_(0.01)
        self._model.pack()
        self.longest = min(spec.max_model_len // 2, _CONTEXT)
        self._blocks = -(-2 * self.longest // wanted.block_size)
        shape = KvShape(self._layers, wanted.block_size, shard.num_kv_heads, spec.head_dim, dtype)
        self._cache = CpuKvCache(shape, _ROWS[-1] * self._blocks + 1)
        self._cache.map_blocks(_ROWS[-1] * self._blocks + 1)
        self._state = BatchState(2 * self.longest, wanted.block_size)
        self._state.register(
            [Register(slot, "probe", compact(), 0, 0.0, 1.0, 0, 0, 0, 0, [], -1) for slot in range(_ROWS[-1])]
        )
        self._state.set_tables(
            [
                (slot, 0, list(range(1 + slot * self._blocks, 1 + (slot + 1) * self._blocks)))
                for slot in range(_ROWS[-1])
            ]
        )
        self._dtype, self._torch, self._busy = dtype, torch, busy

    def decode_s(self, rows: int, context: int, once: bool = False) -> float:
        """Return the seconds of one layer for `rows` decodes that read `context` tokens each."""
        from ppengine.protocol.steps import Row

        return self._run_s([Row(slot, context, 1, True, 0) for slot in range(rows)], once)

    def chunk_s(self, tokens: int, context: int, once: bool = False) -> float:
        """Return the seconds of one layer for a chunk of a prompt behind `context` tokens."""
        from ppengine.protocol.steps import Row

        return self._run_s([Row(0, context, tokens, True, 0)], once)

    def head_s(self, rows: int, once: bool = False) -> float:
        """Return the seconds of head and greedy sampling; the ranks' candidates are not gathered."""
        from ppkernels.sampling import sample
        from ppkernels.sampling_inputs import SamplingInputs

        hidden = self._torch.full((rows, self._spec.hidden_size), 0.5, dtype=self._dtype)
        greedy = SamplingInputs([0.0] * rows, [1.0] * rows, [0] * rows, [0] * rows, [0] * rows, [1] * rows)
        return _computed_s(lambda: sample(self._model.logits(hidden), greedy).tokens.tolist(), self._busy, once)

    def embed_s(self, rows: int, once: bool = False) -> float:
        """Return the seconds of looking up `rows` tokens, without the sum over ranks."""
        ids = self._torch.arange(rows) % self._spec.vocab_size
        return _computed_s(lambda: self._model.embed(ids, ids), self._busy, once)

    def _run_s(self, rows: list[Any], once: bool) -> float:
        plan = self._state.plan(rows)
        hidden = self._torch.full((int(plan.query_start[-1]), self._spec.hidden_size), 0.5, dtype=self._dtype)
        seconds = _computed_s(lambda: self._model.run(hidden, plan.batch, self._cache.layers), self._busy, once)
        return seconds / self._layers


def _computed_s(work: Callable[[], object], busy: bool, once: bool = False) -> float:
    """Return the seconds that `work` computes, in several runs after one that warms up.

    It is CPU time, without the turns of other processes; of several threads, their mean. If the other cores shall be
    `busy` it is the median; otherwise the least, since other processes slow it through shared caches, memory and
    hyper-threads.
    """
    import torch

    threads = torch.get_num_threads()
    clock = time.thread_time if threads == 1 else time.process_time
    work()
    took: list[float] = []
    until = time.perf_counter() + _ROUND_S * (1 if threads == 1 else _LONGER)
    while not once and (len(took) < 3 or time.perf_counter() < until):
        begun = clock()
        work()
        took.append((clock() - begun) / threads)
    if not took:
        return 0.0
    return statistics.median(took) if busy else min(took)


if __name__ == "__main__":
    print(msgspec.json.encode(measure(msgspec.json.decode(sys.stdin.buffer.read(), type=Wanted))).decode())
