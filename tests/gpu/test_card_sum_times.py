"""Ranks on real cards, a process each, time sums when they meet: times, ways, later sums, and ranks that are lost.

python -m pytest -s tests/gpu/test_card_sum_times.py      prints the times
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from real import needs_gpu

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings (extra gpu)")
pytest.importorskip("msgspec", reason="needs the engine's packages")

from ppengine.common.device_page import DevicePage, DevicePageReader
from ppengine.protocol.place import Place
from ppengine.stage.backends.cuda.card_group import CardGroup
from ppengine.stage.backends.cuda.driver_api import Driver
from ppengine.stage.backends.cuda.stream_progress import DeviceProgress
from ppengine.stage.backends.cuda.streams import Stream
from ppengine.stage.backends.cuda.sum_ways import COPIES, ONE_SHOT, TWO_SHOTS, StepRows
from ppengine.stage.edge_addresses import FolderBook
from ppengine.stage.meeting import meet
from ppengine.stage.rank_group import pairs
from ppengine.stage.wire import PeerLostError, SupersededError, Wire

pytestmark = needs_gpu
CARDS = torch.cuda.device_count()
ROWS = StepRows(4096, torch.bfloat16, 9000)
WAYS = {
    2: [(8, ONE_SHOT), (1024, ONE_SHOT), (4096, ONE_SHOT), (16384, TWO_SHOTS), (32776, COPIES)],
    4: [(8, ONE_SHOT), (1024, TWO_SHOTS), (4096, TWO_SHOTS), (16384, TWO_SHOTS)],
}
"""KiB of a part, and its way, by ranks."""
GENERATIONS = 3
ranks_of_cards = [
    pytest.param(size, marks=pytest.mark.skipif(size > CARDS, reason=f"needs {size} GPUs")) for size in WAYS
]


class Member:
    """One rank."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.folder, self.rank, self.size, self.left = folder, rank, size, False
        driver = Driver(rank % CARDS)
        self.device = driver.device
        uuid = f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"
        self.compute = Stream("compute", self.device, purpose="steps")
        self.rows = rows = ROWS
        page, part_bytes = DevicePage(folder / f"page{rank}"), rows.most * rows.row_bytes
        self.group = CardGroup(driver, uuid, Place(0, rank), size, folder, self.compute, part_bytes, page, rows)
        progress = DeviceProgress(page, driver)
        progress.follow(self.compute)
        progress.follow(self.group.stream)
        self.group.warm_up()
        torch.cuda.synchronize(self.device)

    def join(self, generation: int) -> None:
        book = FolderBook(self.folder, generation)

        def meet_all() -> dict[int, Wire]:
            wires = {}
            for first, second in pairs(range(self.size)):
                if self.rank in (first, second):
                    peer = second if self.rank == first else first
                    upstream = self.rank == second
                    wires[peer] = meet(book, f"g0.{first}.{second}", upstream, 0, lambda: self.left, peer)
            return wires

        self.group.join(generation, meet_all)

    def lives(self) -> None:
        """Time sums in each generation. A graph of before the ranks met, and other sums, are right behind them."""
        graph, static, out = self.captured()
        timed: Any = self.group._timed
        measure, found = timed.measure, []

        def clocked(*args: Any) -> Any:
            begun = time.perf_counter()
            times = measure(*args)
            found.append({"took_ms": 1e3 * (time.perf_counter() - begun)})
            return times

        timed.measure = clocked
        for generation in range(1, GENERATIONS + 1):
            self.group.step = 5 * self.rank
            self.join(generation)
            assert self.group.sums is not None
            if self.size <= CARDS:
                found[-1]["times"] = [(one.bytes, one.way, one.us) for one in self.group.sums.times]
            else:
                assert self.group.sums.times == [] == found
            for step in range(1, 20):
                self.group.step = step
                self.check_sums(step)
                with self.compute.use():
                    static.fill_(step * (self.rank + 1))
                    graph.replay()
                torch.cuda.synchronize(self.device)
                assert torch.equal(out, torch.full_like(out, step * self.size * (self.size + 1) / 2))
                self.group.compare()
            torch.cuda.synchronize(self.device)
            self.group.close()
        (self.folder / f"found{self.rank}").write_text(json.dumps(found))

    def captured(self) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]:
        static = torch.zeros(8, self.rows.width, device=self.device, dtype=self.rows.dtype)
        with self.compute.use():
            self.group.all_reduce(static * 1, 0)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        calls: list[bytes] = []
        with torch.cuda.graph(graph, stream=self.compute.raw):
            out = self.group.calls.capture(lambda: self.group.all_reduce(static * 1, 0), calls)
        return graph, static, out

    def check_sums(self, step: int) -> None:
        wanted = self.size * (self.size + 1) / 2
        with self.compute.use():
            for rows in (1, 100, 700, 1100):
                part = torch.full((rows, self.rows.width), self.rank + 1.0, device=self.device, dtype=self.rows.dtype)
                total = self.group.all_reduce(part, 0)
                assert bool((total == wanted).all()), (step, rows)
            residual = torch.ones(300, self.rows.width, device=self.device, dtype=self.rows.dtype)
            sums = [self.group.send(torch.full_like(residual, self.rank + 1.0), 0) for _ in range(2)]
            for one in sums:
                one.add_to(residual)
            assert bool((residual == 1 + 2 * wanted).all()), step

    def loses(self) -> None:
        """Rank 1 dies when it begins its sums; rank 0 waits on its device."""
        self.waits(PeerLostError)

    def is_superseded(self) -> None:
        """Rank 1 hangs when it begins its sums; rank 0 waits on its device, until a newer generation begins."""
        self.waits(SupersededError)

    def waits(self, kind: type[Exception]) -> None:
        timed: Any = self.group._timed
        launch, look = timed._launch, self.group._look
        there, begun = self.folder / "there", list[float]()

        def hang(*args: Any) -> None:
            while not there.exists():
                time.sleep(0.01)
            time.sleep(0.5)
            if kind is PeerLostError:
                os.kill(os.getpid(), 9)
            time.sleep(3600)

        def launched(*args: Any) -> Any:
            begun.append(time.monotonic())
            there.write_text("")
            return launch(*args)

        def later() -> None:
            self.left = kind is SupersededError and time.monotonic() - begun[0] > 1.5
            look()

        timed._launch = hang if self.rank else launched
        self.group._look = later  # type: ignore[method-assign]
        try:
            self.join(1)
        except kind as error:
            assert kind is SupersededError or (error.peer, error.rank) == (0, 1)  # type: ignore[attr-defined]
        else:
            raise AssertionError("rank 1 has made no sum")
        assert 0.4 < time.monotonic() - begun[0] < 6
        assert DevicePageReader(self.folder / f"page{self.rank}").late() == (0, []), "no rank is late in them"
        torch.cuda.synchronize(self.device)
        assert self.group._flags is None


@pytest.fixture
def shared() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def run(shared: Path, size: int, what: str, wanted: int = 0) -> None:
    """Run `what` as each rank; the last ones must end with `wanted`, unless that is None."""
    command = [sys.executable, __file__, str(shared), str(size), what]
    processes = [subprocess.Popen([*command, str(rank)]) for rank in range(size)]
    try:
        assert processes[0].wait(150) == 0
        for process in processes[1:]:
            assert what == "is_superseded" or process.wait(30) == wanted
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize("size", ranks_of_cards)
def test_all_ranks_report_times_of_the_same_ways(size: int, shared: Path) -> None:
    run(shared, size, "lives")
    found = [json.loads((shared / f"found{rank}").read_text()) for rank in range(size)]
    for rank, generations in enumerate(found):
        for number, each in enumerate(generations):
            print(f"\nrank {rank} generation {number + 1}: all in {each['took_ms']:.1f} ms")
            for size_bytes, way, us in each["times"]:
                print(f"  {size_bytes // 1024:6d} KiB  {us:8.2f} us  {size_bytes / us / 1e3:7.1f} GB/s  {way}")
            assert [(size_bytes // 1024, way) for size_bytes, way, _ in each["times"]] == WAYS[size]
            assert all(us > 0 for _, _, us in each["times"])
        # Ranks wait for the last one to meet, and a first copy between cards takes longer.
        assert min(each["took_ms"] for each in generations) < 50
    assert [len(generations) for generations in found] == [GENERATIONS] * size


@pytest.mark.skipif(CARDS != 1, reason="needs one GPU")
def test_ranks_that_share_a_card_report_no_times(shared: Path) -> None:
    run(shared, 2, "lives")
    assert [json.loads((shared / f"found{rank}").read_text()) for rank in range(2)] == [[], []]


@pytest.mark.skipif(CARDS < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("what", "wanted"), [("loses", -9), ("is_superseded", 0)])
def test_a_rank_that_waits_for_another_is_released(what: str, wanted: int, shared: Path) -> None:
    run(shared, 2, what, wanted)


if __name__ == "__main__":
    getattr(Member(Path(sys.argv[1]), int(sys.argv[4]), int(sys.argv[2])), sys.argv[3])()
