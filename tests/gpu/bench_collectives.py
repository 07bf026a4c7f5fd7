"""Cost of a collective between ranks on cards, in a graph: `python tests/gpu/bench_collectives.py`, two cards or more.

Each rank is a process. A graph has 40 calls in a row, in bfloat16, as in the layers of a model. `sum` is an all-reduce
of rows of WIDTH; `norm` adds it to a residual and norms that, beside `sum, then norm` in two kernels. Tokens of
VOCABULARY columns, greedy and below a top-k, come from gathered logits, or from the best tokens of each rank.
`--set NAME=VALUE` tries another constant of `ppkernels.gpu.collectives`, or of `card_group`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ppengine.checkpoint.model_shard import Shard
from ppengine.protocol.place import Place
from ppengine.stage.backends.cuda import card_group
from ppengine.stage.backends.cuda.driver_api import Driver
from ppengine.stage.backends.cuda.streams import Stream
from ppengine.stage.edge_addresses import FolderBook
from ppengine.stage.meeting import meet
from ppengine.stage.rank_group import pairs
from ppengine.stage.wire import Wire
from ppkernels.gpu import collectives
from ppkernels.gpu.sampling import DeviceSampling, Parameters, choose
from ppkernels.norms import Norm
from torch import Tensor

WIDTH, CALLS, REPLAYS = 4096, 40, 10
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048, 8192)
VOCABULARY, SAMPLED = 128_256, (1, 16, 256, 512)
BELOW = Parameters(temperature=0.8, top_p=0.95, top_k=50)


def graph_us(call: Callable[[], object], ready: Callable[[], None]) -> float:
    """Return microseconds of one of `CALLS` calls in a graph: the median of three measurements."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        ready()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (CALLS * REPLAYS))
    return sorted(times)[1]


def measure(group: card_group.CardGroup, device: torch.device) -> None:
    """Print a line for each number of rows."""
    norm = Norm(torch.ones(WIDTH, device=device, dtype=torch.bfloat16), None, 1e-5, centred=False)
    one = torch.zeros(1, WIDTH, device=device)

    def ready() -> None:
        group.all_reduce(one, 0)
        torch.cuda.synchronize()

    for rows in ROWS:
        part, residual = (torch.randn(rows, WIDTH, device=device).to(torch.bfloat16) for _ in range(2))
        ways = {
            "sum": lambda part=part: group.all_reduce(part, 0),
            "norm": lambda part=part, into=residual: group.reduce_norm(part, into, norm, 0),
            "sum, then norm": lambda part=part, into=residual: norm.of_sum(into, group.all_reduce(part, 0)),
        }
        found = "  ".join(f"{name} {graph_us(call, ready):7.2f}" for name, call in ways.items())
        if group.rank == 0:
            print(f"{part.nbytes // 1024:6d} KiB  {found}", flush=True)
    measure_sampling(group, device, ready)


def measure_sampling(group: card_group.CardGroup, device: torch.device, ready: Callable[[], None]) -> None:
    """Print a line for each number of rows that are sampled, greedy and below BELOW."""
    width, none = VOCABULARY // group.size, (0, 1)
    span, widths = (group.rank * width, (group.rank + 1) * width), [width] * group.size
    shard = Shard(group.rank, group.size, none, none, none, span, width * group.size)
    for rows in SAMPLED:
        greedy, below = (DeviceSampling(rows, device) for _ in range(2))
        below.set(range(rows), [BELOW] * rows)
        part = torch.randn(rows, width, device=device).to(torch.bfloat16)
        slots = torch.arange(rows, device=device, dtype=torch.int32)
        newest = torch.zeros_like(slots)
        where = slots, slots

        def gathered(sampling: DeviceSampling, greedy: bool, part: Tensor = part, where: Any = where) -> Tensor:
            return choose(group.all_gather(part, widths, 0), sampling, *where, greedy=greedy)

        ways = {
            "greedy": (
                partial(gathered, greedy, greedy=True),
                partial(group.choose_greedy, part, shard, greedy, *where, newest),
            ),
            f"top-k {BELOW.top_k}": (
                partial(gathered, below, greedy=False),
                partial(group.choose_below, part, shard, below, *where, BELOW.top_k, newest),
            ),
        }
        for name, (whole, best) in ways.items():
            assert torch.equal(whole(), best())
            found = f"logits {graph_us(whole, ready):7.2f}  best tokens {graph_us(best, ready):7.2f}"
            if group.rank == 0:
                print(f"{rows:6d} rows  {name} of {found}", flush=True)


def live(folder: Path, rank: int, size: int) -> None:
    """Be one rank."""
    driver = Driver(rank)
    uuid = f"GPU-{torch.cuda.get_device_properties(driver.device).uuid}"
    compute = Stream("compute", driver.device, torch.cuda.current_stream(driver.device))
    group = card_group.CardGroup(driver, uuid, Place(0, rank), size, folder, compute, 2**26)
    book = FolderBook(folder, 1)

    def meet_all() -> dict[int, Wire]:
        wires = {}
        for first, second in pairs(range(size)):
            if rank in (first, second):
                peer = second if rank == first else first
                wires[peer] = meet(book, f"g0.{first}.{second}", rank == second, 0, lambda: False, peer)
        return wires

    group.join(1, meet_all)
    measure(group, driver.device)
    torch.cuda.synchronize()
    group.close()


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    for name, value in (each.split("=") for each in options.set):
        owner = collectives if hasattr(collectives, name) else card_group
        assert hasattr(owner, name), name
        setattr(owner, name, int(value))
    if options.rank is not None:
        live(options.folder, options.rank, options.ranks)
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", folder, "--ranks", str(options.ranks)]
        ranks = [subprocess.Popen([*command, "--rank", str(rank)], env=os.environ) for rank in range(options.ranks)]
        codes = [rank.wait() for rank in ranks]
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
