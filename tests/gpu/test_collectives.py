"""Collectives of ranks on GPUs: sums in rank order, columns, numbers of calls, and a release, between processes.

Without a GPU, Triton's interpreter runs the kernels, each rank in a process with its parts in shared memory.
"""

from __future__ import annotations

import mmap
import os
import sys
import traceback
from collections.abc import Callable

import pytest
import torch
from ppkernels.gpu import collectives

PART_BYTES = 64 * 1024
Rank = Callable[["Member"], None]


class Member:
    """One rank of an interpreted group: its table and counters, over memory that all ranks share."""

    def __init__(self, rank: int, size: int, addresses: list[int], word: int, base: int = 0) -> None:
        self.rank, self.size = rank, size
        flags = [address + 2 * PART_BYTES for address in addresses]
        self.table = torch.tensor([1, word, *addresses, *flags])
        self.counters = torch.full((collectives.PROGRAMS,), base)

    def reduce(self, part: torch.Tensor) -> torch.Tensor:
        collectives.all_reduce(part, self.table, self.counters, self.rank, self.size, PART_BYTES)
        return part

    def gather(self, part: torch.Tensor, widths: list[int]) -> torch.Tensor:
        starts = torch.tensor([0, *widths]).cumsum(0)
        result = torch.full((len(part), sum(widths)), -1, dtype=part.dtype)
        collectives.all_gather(
            part, result, starts, self.table, self.counters, self.rank, self.size, PART_BYTES
        )  # fmt: skip
        return result


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one program after the other: those of two ranks take turns all the same."""
    if torch.cuda.is_available():
        pytest.skip("tests/gpu/test_card_group.py tries them on the card")
    monkeypatch.setattr(collectives, "PROGRAMS", 2)
    monkeypatch.setattr(collectives, "TILE", 64)


def together(size: int, live: Rank, base: int = 0, word_value: int = 0) -> None:
    """Run `live` as each rank, in processes; fail if one does."""
    memory = mmap.mmap(-1, size * (2 * PART_BYTES + collectives.flag_bytes(size)) + 4096)
    shared = torch.frombuffer(memory, dtype=torch.uint8)
    one = 2 * PART_BYTES + collectives.flag_bytes(size)
    addresses = [shared.data_ptr() + rank * one for rank in range(size)]
    word = shared.data_ptr() + size * one
    shared[size * one :].view(torch.int64)[0] = word_value
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                live(Member(rank, size, addresses, word, base))
                code = 0
            except Exception:  # noqa: BLE001 - printed, and seen by its exit code
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * size


# bfloat16 is tried on cards: the interpreter cuts it off, where a card rounds.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_those_in_rank_order_on_every_rank(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    calls = [
        [torch.randn(rows, 50, generator=generator).to(dtype) for _ in range(size)] for rows in (1, 7, 2, 1)
    ]  # fmt: skip

    def live(member: Member) -> None:
        for parts in calls:
            total = torch.zeros(parts[0].shape)
            for part in parts:
                total += part.float()
            assert torch.equal(member.reduce(parts[member.rank].clone()), total.to(dtype))
        assert member.counters.tolist() == [len(calls)] * 2

    together(size, live)


def test_columns_of_uneven_width_are_gathered() -> None:
    whole, widths = torch.arange(9 * 11).view(9, 11), [4, 5, 2]
    parts = torch.split(whole, widths, 1)

    def live(member: Member) -> None:
        for _ in range(3):
            assert torch.equal(member.gather(parts[member.rank].contiguous(), widths), whole)

    together(3, live)


def test_flags_of_an_older_generation_are_none() -> None:
    def live(member: Member) -> None:
        assert torch.equal(member.reduce(torch.ones(1, 64)), torch.full((1, 64), 2.0))

    together(2, live, base=5 << 40)


def test_a_released_rank_waits_no_more() -> None:
    def live(member: Member) -> None:
        if member.rank == 0:  # Rank 1 never calls.
            member.reduce(torch.ones(1, 64))

    together(2, live, word_value=collectives.RELEASED)


def test_a_rank_that_has_not_joined_gets_its_own_part() -> None:
    def live(member: Member) -> None:
        member.table[0] = 0
        assert torch.equal(member.reduce(torch.ones(1, 64)), torch.ones(1, 64))
        gathered = member.gather(torch.full((2, 3), 7), [3, 3])
        assert gathered[:, 3 * member.rank : 3 * member.rank + 3].tolist() == [[7] * 3] * 2

    together(2, live)
