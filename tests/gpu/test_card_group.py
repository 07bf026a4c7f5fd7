"""Ranks on real cards, a process each: sums, tokens, graphs of before the ranks met, generations, releases, lost ranks.

Two ranks share a card where there is one: their kernels take turns then, which shows no speed.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from real import needs_gpu

HERE = Path(__file__).parent
pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings (extra gpu)")
pytest.importorskip("msgspec", reason="needs the engine's packages")

from ppengine.checkpoint.model_shard import Shard  # noqa: E402
from ppengine.common.device_page import DevicePage, DevicePageReader  # noqa: E402
from ppengine.protocol.place import Place  # noqa: E402
from ppengine.stage.backends.cuda.card_group import CardGroup  # noqa: E402
from ppengine.stage.backends.cuda.driver_api import Driver  # noqa: E402
from ppengine.stage.backends.cuda.stream_progress import DeviceProgress  # noqa: E402
from ppengine.stage.backends.cuda.streams import Stream  # noqa: E402
from ppengine.stage.edge_addresses import FolderBook  # noqa: E402
from ppengine.stage.meeting import meet  # noqa: E402
from ppengine.stage.rank_group import pairs  # noqa: E402
from ppengine.stage.wire import PeerLostError, Wire  # noqa: E402
from ppkernels.gpu.sampling import DeviceSampling, Parameters, choose  # noqa: E402
from ppkernels.norms import Norm  # noqa: E402

pytestmark = needs_gpu
SIZE, WIDTH, REPLAYS, COLUMNS = 2, 512, 50, 4000
TYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def shared() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def part(rank: int, call: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * call + rank)
    return torch.randn(rows, WIDTH, generator=generator).to(dtype)


def total(call: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    parts = [part(rank, call, rows, dtype).float() for rank in range(SIZE)]
    return sum(parts[1:], torch.zeros(rows, WIDTH) + parts[0]).to(dtype)


def levels(call: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Return logits whose best is in many columns; some rows have none, or only NaN."""
    logits = torch.randn(rows, SIZE * COLUMNS, generator=torch.Generator().manual_seed(call)).mul_(2).round_()
    logits[1::5, ::3], logits[2::5], logits[3::5] = float("nan"), float("nan"), float("-inf")
    return logits.to(dtype)


class Member:
    """One rank."""

    def __init__(self, folder: Path, rank: int, part_bytes: int = 1) -> None:
        self.folder, self.rank = folder, rank
        self.driver = Driver(rank % torch.cuda.device_count())
        self.device = self.driver.device
        uuid = f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"
        self.compute = Stream("compute", self.device, torch.cuda.current_stream(self.device))
        self.page = DevicePage(folder / f"page{rank}")
        self.sampling = DeviceSampling(300, self.device)
        self.sampling.set([0, 16], [Parameters(banned=range(0, SIZE * COLUMNS, 1000), banned_until=9)] * 2)
        self.group = CardGroup(self.driver, uuid, Place(0, rank), SIZE, folder, self.compute, part_bytes, self.page)

    def join(self, generation: int) -> None:
        book = FolderBook(self.folder, generation)

        def meet_all() -> dict[int, Wire]:
            wires = {}
            for first, second in pairs(range(SIZE)):
                if self.rank in (first, second):
                    peer = second if self.rank == first else first
                    wires[peer] = meet(
                        book, f"g0.{first}.{second}", self.rank == second, 0, lambda: False, peer
                    )  # fmt: skip
            return wires

        self.group.join(generation, meet_all)

    def leave(self) -> None:
        torch.cuda.synchronize(self.device)
        self.group.close()

    def sums(self) -> None:
        call = 0
        for dtype in TYPES:
            for rows in (1, 64, 7, 3000):
                call += 1
                found = self.group.all_reduce(part(self.rank, call, rows, dtype).to(self.device), 0)
                assert torch.equal(found.cpu(), total(call, rows, dtype)), (dtype, rows)

    def norms(self) -> None:
        norm = Norm(torch.linspace(0.5, 2, WIDTH, device=self.device).to(torch.bfloat16), None, 1e-5, centred=False)
        for call, rows in enumerate((1, 7, 64, 700, 3000)):  # in words, with flags, and above what is fused
            residual = part(9, call, rows, torch.bfloat16).to(self.device)
            before = residual.float().cpu()
            found = self.group.reduce_norm(
                part(self.rank, call, rows, torch.bfloat16).to(self.device), residual, norm, 0
            )
            parts = [part(rank, call, rows, torch.bfloat16).float() for rank in range(SIZE)]
            after = sum(parts, torch.zeros(rows, WIDTH)) + before
            torch.testing.assert_close(residual.float().cpu(), after, atol=0.05, rtol=0.01)
            torch.testing.assert_close(found, norm(residual), atol=0.02, rtol=0.02)

    def pieces(self) -> None:
        """Sums of two pieces by copies, in two generations; each rank is late in turn."""
        norm = Norm(torch.linspace(0.5, 2, WIDTH, device=self.device).to(torch.bfloat16), None, 1e-5, centred=False)
        busy = torch.randn(2048, 2048, device=self.device)
        for generation in (1, 2):
            if generation > 1:
                self.leave()
                self.join(generation)
            for call in range(40):
                if call % SIZE == self.rank:
                    for _ in range(20):
                        busy = busy @ busy * 0
                stream = [part(9, call, rows, torch.bfloat16).to(self.device) for rows in (1000, 700)]
                before = [each.float().cpu() for each in stream]
                parts = [
                    [part(rank, 2 * call + piece, rows, torch.bfloat16) for piece, rows in enumerate((1000, 700))]
                    for rank in range(SIZE)
                ]
                sums = [self.group.send(each.to(self.device) * 1, 0) for each in parts[self.rank]]
                for piece, one in enumerate(sums):
                    if call % 3:
                        found = one.add_norm(stream[piece], norm)
                        torch.testing.assert_close(found, norm(stream[piece]), atol=0.02, rtol=0.02)
                    else:
                        one.add_to(stream[piece])
                    total = sum((each[piece].float() for each in parts[1:]), parts[0][piece].float())
                    assert torch.equal(stream[piece].cpu(), (total + before[piece]).to(torch.bfloat16)), (call, piece)

    def columns(self) -> None:
        for dtype in (*TYPES, torch.int64):
            whole = torch.arange(33 * 1000).view(33, 1000).to(dtype)
            widths = [512, 488]
            mine = torch.split(whole, widths, 1)[self.rank].contiguous().to(self.device)
            assert torch.equal(self.group.all_gather(mine, widths, 0).cpu(), whole), dtype

    def greedy(self) -> None:
        """Tokens of few rows, and of more than there are programs, with sums between."""
        for call in range(4):
            for dtype in TYPES:
                for rows in (1, 16, 17, 300):
                    whole = levels(call, rows, dtype).to(self.device)
                    slots = torch.arange(rows, device=self.device, dtype=torch.int32)
                    positions, newest = slots + 3, torch.zeros_like(slots)
                    wanted = choose(whole, self.sampling, slots, positions, greedy=True)
                    assert torch.equal(self.choose(whole, slots, positions, newest), wanted), (call, dtype, rows)
                    assert torch.equal(newest, wanted.int())
                    if rows == 16:
                        found = self.group.all_reduce(part(self.rank, call, rows, dtype).to(self.device), 0)
                        assert torch.equal(found.cpu(), total(call, rows, dtype))

    def choose(
        self, whole: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, newest: torch.Tensor
    ) -> torch.Tensor:
        """Return the greedy tokens of this rank's columns and the other's."""
        return self.group.choose_greedy(*self.share(whole), self.sampling, slots, positions, newest)

    def share(self, whole: torch.Tensor) -> tuple[torch.Tensor, Shard]:
        """Return this rank's columns."""
        span, none = (self.rank * COLUMNS, (self.rank + 1) * COLUMNS), (0, 1)
        return whole[:, slice(*span)].contiguous(), Shard(self.rank, SIZE, none, none, none, span, SIZE * COLUMNS)

    def below(self) -> None:
        """Tokens below top-k, beside greedy ones; of levels, so that equals are at the cut, and of other logits."""
        heats, numbers, banned = (0.0, 0.1, 0.8, 2.0), (1, 2, 50, 64, 7), range(0, SIZE * COLUMNS, 1000)
        sampling = DeviceSampling(300, self.device)
        rows_of = [
            Parameters(heats[row % 4], 1 - row % 3 / 4, numbers[row % 5], row, banned=banned, banned_until=row % 2 * 99)
            for row in range(300)
        ]
        sampling.set(range(300), rows_of)
        for call in range(4):
            for dtype in TYPES:
                for rows in (1, 16, 17, 300):
                    generator = torch.Generator().manual_seed(call)
                    whole = torch.randn(rows, SIZE * COLUMNS, generator=generator).mul_(3)
                    if call % 2:
                        whole.round_()
                    whole[3::5], whole[4::5, 30:] = -math.inf, -math.inf
                    whole = whole.to(dtype).to(self.device)
                    slots = torch.arange(rows, device=self.device, dtype=torch.int32)
                    newest = torch.zeros_like(slots)
                    wanted = choose(whole, sampling, slots, slots, greedy=False)
                    for _ in range(9):  # One read too early of a word is rare.
                        found = self.group.choose_below(*self.share(whole), sampling, slots, slots, 64, newest)
                        assert torch.equal(found, wanted) and torch.equal(newest, wanted.int()), (call, dtype, rows)
                    if rows == 16:
                        found = self.group.all_reduce(part(self.rank, call, rows, dtype).to(self.device), 0)
                        assert torch.equal(found.cpu(), total(call, rows, dtype))

    def many(self) -> None:
        """Thousands of calls of all kinds and widths, compared on the device; each rank is late at random."""
        draw, late = torch.Generator(self.device).manual_seed(3), random.Random(self.rank)
        wrong, sampling = torch.zeros(5, device=self.device, dtype=torch.int64), DeviceSampling(64, self.device)
        sampling.set(range(64), [Parameters(0.2 + row % 4 / 2, 1 - row % 3 / 4, 1 + row, row) for row in range(64)])
        slots = torch.arange(64, device=self.device, dtype=torch.int32)
        norm = Norm(torch.ones(1024, device=self.device, dtype=torch.bfloat16), None, 1e-5, centred=False)
        busy, newest = torch.randn(1024, 1024, device=self.device), torch.zeros_like(slots)
        for call in range(600):
            for _ in range(late.choice((0, 0, 1, 3))):
                busy = busy @ busy * 0
            dtype, rows = TYPES[call % 3], (1, 2, 16, 64, 200)[call % 5]
            large = 4096, 2100 if call % 40 == 0 else 9  # the former in two shots
            for width, count in (*((width, rows) for width in (64, 128, 256, 1024)), large):
                both = torch.randn(2, count, width, generator=draw, device=self.device).to(dtype)
                found = self.group.all_reduce(both[self.rank].clone(), 0)
                wrong[0] += (found != (both[0].float() + both[1].float()).to(dtype)).sum()
            both = torch.randn(3, rows, 1024, generator=draw, device=self.device).to(torch.bfloat16)
            stream, total = both[2].clone(), (both[0].float() + both[1].float() + both[2].float()).to(torch.bfloat16)
            self.group.reduce_norm(both[self.rank].clone(), stream, norm, 0)
            wrong[1] += (stream != total).sum()
            whole = torch.randn(rows, 1000, generator=draw, device=self.device).to(dtype)
            mine = torch.split(whole, [512, 488], 1)[self.rank].contiguous()
            wrong[2] += (self.group.all_gather(mine, [512, 488], 0) != whole).sum()
            whole = torch.randn(64, SIZE * COLUMNS, generator=draw, device=self.device).mul_(3).to(dtype)
            found = self.choose(whole, slots, slots, newest)
            wrong[3] += (found != choose(whole, self.sampling, slots, slots, greedy=True)).sum()
            found = self.group.choose_below(*self.share(whole), sampling, slots, slots, 64, newest)
            wrong[4] += (found != choose(whole, sampling, slots, slots, greedy=False)).sum()
        assert wrong.tolist() == [0] * 5, "sums, sums with norms, columns, greedy tokens, tokens below top-k"

    def captured(self) -> None:
        """Capture before the ranks meet, as boot does; replay in two generations, with eager calls between."""
        static = torch.zeros(8, WIDTH, device=self.device, dtype=torch.bfloat16)
        stream = torch.cuda.Stream(self.device)

        def forward() -> torch.Tensor:
            once = self.group.all_reduce(static * 2, 0)
            return self.group.all_gather(self.group.all_reduce(once + 1, 0)[:, : WIDTH // 2], [WIDTH // 2] * 2, 0)

        with torch.cuda.stream(stream):
            forward()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = forward()
        for generation in (1, 2):
            self.join(generation)
            for call in range(REPLAYS):
                static.copy_(part(self.rank, call, 8, torch.bfloat16))
                graph.replay()
                if call % 10 == 0:
                    eager = self.group.all_reduce(part(self.rank, call, 3, torch.float32).to(self.device), 0)
                    assert torch.equal(eager.cpu(), total(call, 3, torch.float32))
                torch.cuda.synchronize(self.device)
                doubled = [(part(rank, call, 8, torch.bfloat16) * 2).float() for rank in range(SIZE)]
                once = sum(doubled[1:], doubled[0]).to(torch.bfloat16) + 1
                twice = (once.float() + once.float()).to(torch.bfloat16)
                assert torch.equal(out.cpu(), torch.cat([twice[:, : WIDTH // 2]] * 2, 1)), (generation, call)
            self.leave()

    def late(self) -> None:
        """Rank 1 sends nothing before rank 0, whose device waits for it, has noted that."""
        DeviceProgress(self.page, self.driver).follow(self.compute)
        first, mine = (DevicePageReader(self.folder / f"page{rank}") for rank in (0, self.rank))

        def by_copies(part: torch.Tensor) -> None:
            self.group.send(part, 0).add_to(torch.ones_like(part))

        calls = [(torch.float32, self.group.all_reduce), (torch.bfloat16, self.group.all_reduce)]
        calls.append((torch.bfloat16, lambda part, site: by_copies(part)))
        for number, (dtype, call) in enumerate(calls, start=1):
            part = torch.ones(3, WIDTH, device=self.device, dtype=dtype)
            deadline = time.monotonic() + 60
            while self.rank == 1 and first.late() != (number, [1]):
                assert time.monotonic() < deadline, (number, first.late())
                time.sleep(0.01)
            with self.compute.working():
                call(part, 0)
            torch.cuda.synchronize(self.device)
            assert self.rank == 0 or mine.late()[1] == [], "rank 0 was not late"
        while mine.late()[1]:
            assert time.monotonic() < deadline, "it has gone on"
            time.sleep(0.01)

    def silent_copies(self) -> None:
        """As `silent`, in a sum by copies."""
        self.silent(copied=True)

    def silent(self, copied: bool = False) -> None:
        """Rank 1 launches nothing: rank 0 waits on its device, until it is released."""
        if self.rank == 1:
            (self.folder / "there").write_text("")
            time.sleep(3600)
        if copied:
            self.group.send(torch.ones(4, WIDTH, device=self.device), 0).add_to(
                torch.ones(4, WIDTH, device=self.device)
            )
        else:
            self.group.all_reduce(torch.ones(4, WIDTH, device=self.device), 0)
        waits = torch.cuda.Event()
        waits.record()
        time.sleep(0.5)
        assert not waits.query(), "the device waits for the other rank"
        self.group.check_peer()
        os.kill(int((self.folder / "pid1").read_text()), 9)
        deadline = time.monotonic() + 5
        while True:
            try:
                self.group.check_peer()
            except PeerLostError as error:
                assert (error.peer, error.rank) == (0, 1), error
                break
            assert time.monotonic() < deadline
        for release in self.group.releases():
            release()
        while not waits.query():
            assert time.monotonic() < deadline + 5, "the released device runs on"
        self.leave()


def live(folder: Path, rank: int, what: str) -> None:
    member = Member(folder, rank, 2**25 if what == "many" else 1)
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    if what == "captured":
        member.captured()
        return
    # All kernels are compiled before the ranks meet, as in boot.
    for dtype in TYPES:
        member.group.all_reduce(torch.zeros(3, WIDTH, device=member.device, dtype=dtype), 0)
    lone = torch.ones(3, WIDTH, device=member.device)
    member.group.send(lone.clone(), 0).add_to(lone)
    assert torch.equal(lone, torch.full_like(lone, 2.0)), "no rank is there yet"
    for dtype in (*TYPES, torch.int64):
        member.group.all_gather(torch.zeros(2, 512 - 24 * rank, device=member.device, dtype=dtype), [512, 488], 0)
        ints = torch.zeros(1, device=member.device, dtype=torch.int32)
        whole = torch.zeros(1, SIZE * COLUMNS, device=member.device, dtype=dtype)
        member.choose(whole, ints, ints, ints)
        if dtype in TYPES:
            member.group.choose_below(*member.share(whole), member.sampling, ints, ints, 1, ints)
    member.join(1)
    getattr(member, what)()
    if not what.startswith("silent"):
        member.leave()


@pytest.mark.parametrize(
    "what",
    ["sums", "norms", "pieces", "columns", "greedy", "below", "many", "captured", "late", "silent", "silent_copies"],
)
def test_ranks(what: str, shared: Path) -> None:
    processes = [subprocess.Popen([sys.executable, __file__, str(shared), str(rank), what]) for rank in range(SIZE)]
    try:
        assert processes[0].wait(150) == 0
        assert processes[1].wait(20) == (-9 if what.startswith("silent") else 0)
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    live(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
