"""Collectives between ranks on CPUs, each rank a thread here: sums, columns, order, ends and differences."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from ppengine.common.groups import ATTENTION, MLP, site
from ppengine.common.ring import Kind, RingReader
from ppengine.stage.backends.cpu.host_group import BUFFER_BYTES, HostGroup
from ppengine.stage.edge_addresses import FolderBook
from ppengine.stage.meeting import meet
from ppengine.stage.rank_calls import RanksDifferError
from ppengine.stage.rank_group import pairs
from ppengine.stage.wire import PeerLostError, SupersededError, Wire
from stage_helpers import make_ring, until
from torch import Tensor

Act = Callable[[HostGroup], Any]


def join(folder: Path, rank: int, size: int, left: Callable[[], bool]) -> HostGroup:
    """Return the group of one rank, once all have met."""
    book = FolderBook(folder, 1)

    def meet_all() -> dict[int, Wire]:
        wires = {}
        for first, second in pairs(range(size)):
            if rank in (first, second):
                peer = second if rank == first else first
                wires[peer] = meet(book, f"g0.{first}.{second}", rank == second, 0, left, peer)
        return dict(sorted(wires.items()))

    group = HostGroup(0, rank, size, folder, make_ring(folder, f"main{rank}"))
    group.join(1, meet_all)
    return group


def together(folder: Path, acts: list[Act], left: Callable[[], bool] = lambda: False) -> list[Any]:
    """Return what each rank's act returns, or its exception."""

    broken = threading.Event()

    def live(rank: int) -> Any:
        try:
            group = join(folder, rank, len(acts), lambda: left() or broken.is_set())
        except BaseException:
            broken.set()  # The other ranks would wait for this one for ever.
            raise
        try:
            return acts[rank](group)
        except (PeerLostError, RanksDifferError, SupersededError) as error:
            return error
        finally:
            group.close()

    with ThreadPoolExecutor(len(acts)) as pool:
        return list(pool.map(live, range(len(acts))))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_get_the_bits_of_a_sum_in_rank_order(tmp_path: Path, size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    rounds = [
        [torch.randn(rows, 48, generator=generator, dtype=torch.float64).to(dtype) for _ in range(size)]
        for rows in (1, 5, 1, 17)
    ]

    def act(rank: int) -> Act:
        return lambda group: [group.all_reduce(parts[rank].clone(), site(1, MLP)) for parts in rounds]

    found = together(tmp_path, [act(rank) for rank in range(size)])
    for number, parts in enumerate(rounds):
        wide = [part if dtype in (torch.float64, torch.float32) else part.float() for part in parts]
        total = wide[0].clone()
        for part in wide[1:]:
            total += part
        for results in found:
            assert torch.equal(results[number], total.to(dtype))


def test_a_part_longer_than_the_buffer_goes_in_rounds(tmp_path: Path) -> None:
    rows = 2 * BUFFER_BYTES // (8 * 64) + 3
    parts = [torch.full((rows, 64), float(rank + 1), dtype=torch.float64) for rank in range(2)]
    found = together(tmp_path, [lambda each, part=part: each.all_reduce(part.clone(), 0) for part in parts])
    assert all(torch.equal(each, torch.full((rows, 64), 3.0, dtype=torch.float64)) for each in found)


def test_columns_of_uneven_width_are_gathered_in_rank_order(tmp_path: Path) -> None:
    whole, widths = torch.randn(9, 11, dtype=torch.float64), [4, 5, 2]
    parts = torch.split(whole, widths, 1)
    found = together(tmp_path, [lambda each, part=part: each.all_gather(part, widths, 0) for part in parts])
    assert all(torch.equal(each, whole) for each in found)
    ids = [torch.tensor([[rank], [rank + 10]]) for rank in range(3)]
    found = together(tmp_path, [lambda each, part=part: each.all_gather(part, [1, 1, 1], 0) for part in ids])
    assert all(each.tolist() == [[0, 1, 2], [10, 11, 12]] for each in found)


def test_ranks_that_launch_different_things_name_both_call_sites(tmp_path: Path) -> None:
    def act(part: int, rows: int) -> Act:
        def launch(group: HostGroup) -> Tensor:
            group.step = 8
            group.all_reduce(torch.ones(2, 4), site(3, ATTENTION))
            return group.all_reduce(torch.ones(rows, 4), site(3, part))

        return launch

    for other in (act(ATTENTION, 2), act(MLP, 3)):
        for error in together(tmp_path, [act(MLP, 2), other]):
            assert isinstance(error, RanksDifferError)
            assert "all-reduce 2 (MLP of layer 3, m8, float32[2, 4] 32 B)" in str(error), error
            assert "it is the first difference" in str(error)


@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_measured_when_ranks_meet_and_leave_no_record(tmp_path: Path, size: int) -> None:
    found = together(tmp_path, [lambda group: group.sums] * size)
    for number, sums in enumerate(found):
        assert [each.bytes for each in sums.times] == [2**13, 2**17, BUFFER_BYTES]
        assert {each.way for each in sums.times} == {"shared memory"}
        assert all(each.us > 1 for each in sums.times) and sums.times[2].us > 50
        assert [each.most_bytes for each in sums.routes] == [BUFFER_BYTES, None]
        rows = RingReader(tmp_path / f"main{number}.ring").rows(0)
        assert not [row for row in rows if row[1] == Kind.ALL_REDUCE]


def test_a_rank_that_goes_is_lost_with_its_number(tmp_path: Path) -> None:
    error, _ = together(tmp_path, [lambda each: each.all_reduce(torch.ones(1, 4), 0), lambda each: None])
    assert isinstance(error, PeerLostError) and (error.peer, error.rank) == (0, 1)
    assert str(error) == "lost stage 0 rank 1: it closed the connection"


def test_a_wait_is_a_record_with_the_rank_and_ends_with_the_generation(tmp_path: Path) -> None:
    over, left = threading.Event(), threading.Event()
    rows: list[tuple[int, ...]] = []

    def first(group: HostGroup) -> Tensor:
        group.step = 5
        try:
            return group.all_reduce(torch.ones(1, 4), site(2, MLP))
        finally:
            left.set()

    def second(group: HostGroup) -> None:
        reader = RingReader(tmp_path / "main0.ring")
        until(lambda: any(row[1] == Kind.ALL_REDUCE for row in reader.rows(0)), "the first rank waits")
        rows.extend(reader.rows(0))
        over.set()
        assert left.wait(20)

    error, _ = together(tmp_path, [first, second], over.is_set)
    assert isinstance(error, SupersededError)
    _, kind, peer, step, *_ = rows[0]
    assert (kind, peer, step) == (Kind.ALL_REDUCE, 1, 5)


def test_a_group_whose_ranks_have_not_met_is_alone(tmp_path: Path) -> None:
    group, part = HostGroup(0, 1, 2, tmp_path, make_ring(tmp_path, "main")), torch.ones(2, 3)
    assert group.all_reduce(part, 0) is part
    assert group.all_gather(part, [2, 3], 0).shape == (2, 5)
