"""The costs of messages between CPU places: a hop to the next stage, and an all-reduce between ranks."""

from __future__ import annotations

import functools
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ppengine.bench.costs import Curve
from ppengine.bench.forked import in_forks

_GROUPS, _TIMES = 12, 10
"""Groups of calls, and calls in each."""


def hops(sizes: list[int]) -> Curve:
    """Return the seconds of a message between two processes: half of the time there and back."""
    from ppengine.stage.wire import Wire

    ends = _connected()

    def play(number: int) -> list[tuple[float, float]]:
        wire = Wire(ends[number], 1 - number, lambda: False)
        found = []
        for size in sizes:
            data = memoryview(bytearray(size))

            def there_and_back(data: memoryview = data) -> None:
                for step in (number, 1 - number):
                    wire.receive(data) if step else wire.send([data])

            found.append((float(size), _fixed_s(there_and_back) / 2))
        return found

    return rising(in_forks(2, play, list[tuple[float, float]])[0])


def reduces(ranks: int, sizes: list[int], dtype: Any) -> Curve:
    """Return the seconds of an all-reduce of `ranks` processes, by bytes of a part."""
    import torch

    from ppengine.stage.backends.cpu.host_group import HostGroup
    from ppengine.stage.edge_addresses import FolderBook
    from ppengine.stage.meeting import meet
    from ppengine.stage.rank_group import pairs
    from ppengine.stage.recorder import Recorder
    from ppengine.stage.wire import Wire

    def play(folder: Path, rank: int) -> list[tuple[float, float]]:
        book = FolderBook(folder, 1)

        def meet_all() -> dict[int, Wire]:
            mine = [pair for pair in pairs(range(ranks)) if rank in pair]
            names = {sum(pair) - rank: (f"p{pair[0]}.{pair[1]}", pair[1] == rank) for pair in mine}
            wires = {peer: meet(book, name, up, 0, lambda: False, peer) for peer, (name, up) in names.items()}
            return dict(sorted(wires.items()))

        torch.set_num_threads(1)
        group = HostGroup(0, rank, ranks, folder, Recorder(folder / f"r{rank}.ring", "main", 0, rank))
        group.join(1, meet_all)
        found = []
        for size in sizes:
            part = torch.zeros(1, size, dtype=dtype)
            found.append((float(part.nbytes), _fixed_s(lambda part=part: group.all_reduce(part, 0))))  # type: ignore[misc]
        group.close()
        return found

    with tempfile.TemporaryDirectory(dir=_shared_memory()) as folder:
        play_here = functools.partial(play, Path(folder))
        return rising(in_forks(ranks, play_here, list[tuple[float, float]])[0])


def _fixed_s(work: Callable[[], object]) -> float:
    """Return the mean seconds of `work` in the best group of several; all processes do it equally often."""
    means = []
    for _ in range(_GROUPS):
        begun = time.perf_counter()
        for _ in range(_TIMES):
            work()
        means.append((time.perf_counter() - begun) / _TIMES)
    return min(means)


def rising(points: list[tuple[float, float]]) -> Curve:
    """Return a curve that does not fall: noise must not make larger sizes cheaper."""
    made: list[tuple[float, float]] = []
    for size, seconds in points:
        made.append((size, max(seconds, made[-1][1] if made else 0.0)))
    return Curve(made)


def _connected() -> list[socket.socket]:
    """Return both ends of a TCP connection, which is what edges are."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        caller = socket.create_connection(listener.getsockname())
        return [listener.accept()[0], caller]


def _shared_memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
