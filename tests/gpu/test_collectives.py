"""Collectives of ranks on GPUs: sums in rank order, columns, numbers of calls, and a release, between processes.

Without a GPU, Triton's interpreter runs the kernels, each rank in a process with its parts in shared memory.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import fresh_triton
import pytest
import torch
from interpreted_ranks import PART_BYTES, Member, interpret_few_programs, together
from ppkernels.gpu import collectives, rank_memory
from ppkernels.norms import Norm


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("tests/gpu/test_card_group.py tries them on the card")
    interpret_few_programs(monkeypatch)


@pytest.fixture(autouse=True)
def read_once(few_programs: None) -> None:
    """Have this process read the kernels' sources before it forks: otherwise each rank of each test reads them."""
    read_sources()


@functools.cache
def read_sources() -> None:
    memory = torch.zeros(2 * collectives.memory_bytes(2, PART_BYTES), dtype=torch.uint8)
    word = torch.tensor([rank_memory.RELEASED])  # so that rank 0 waits for no other
    addresses = [memory.data_ptr(), memory.data_ptr() + len(memory) // 2]
    member = Member(0, 2, addresses, word.data_ptr())
    for dtype in (torch.float32, torch.float16):
        member.reduce(torch.ones(1, 2, dtype=dtype))
        for centred in (False, True):
            norm = Norm(torch.ones(2), torch.ones(2), 1e-5, centred)
            member.add_norm(torch.ones(1, 2, dtype=dtype), torch.ones(1, 2, dtype=dtype), norm)
    member.gather(torch.ones(1, 2), [2, 2])


def parts_of_calls(size: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """The parts of all ranks in calls of a few rows, which go in words if they are halves, and of more."""
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(rows, 50, generator=generator).to(dtype) for _ in range(size)] for rows in (1, 7, 2, 1, 7)]


def total_of(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum in float32, in rank order."""
    total = torch.zeros(parts[0].shape)
    for part in parts:
        total += part.float()
    return total


# bfloat16 is tried on cards: the interpreter cuts it off, where a card rounds.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_those_in_rank_order_on_every_rank(size: int, dtype: torch.dtype) -> None:
    calls = parts_of_calls(size, dtype)

    def live(member: Member) -> None:
        for parts in calls:
            assert torch.equal(member.reduce(parts[member.rank].clone()), total_of(parts).to(dtype))
        assert member.counters.tolist() == [len(calls)] * collectives.PROGRAMS

    together(size, live)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("centred", [False, True])
def test_sums_are_added_and_normed(centred: bool, dtype: torch.dtype) -> None:
    calls = parts_of_calls(2, dtype)
    weight, bias = torch.linspace(0.5, 2, 50).to(dtype), torch.linspace(-1, 1, 50).to(dtype)
    norm = Norm(weight, bias if centred else None, 1e-5, centred)

    def live(member: Member) -> None:
        for number, parts in enumerate(calls):
            residual = torch.randn(len(parts[0]), 50, generator=torch.Generator().manual_seed(number)).to(dtype)
            after = (total_of(parts) + residual.float()).to(dtype)
            found = member.add_norm(parts[member.rank].clone(), residual, norm)
            assert torch.equal(residual, after)
            torch.testing.assert_close(found, norm(after), atol=2e-3, rtol=2e-3)
            assert found.isfinite().all()

    together(2, live)


@pytest.mark.parametrize("size", [2, 3])
def test_sums_in_two_shots_have_the_bits_of_one(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of uneven shares, of one that is empty, and calls in one shot between them."""
    monkeypatch.setattr(collectives, "TWO_SHOT_BYTES", 512 if size == 2 else 1600)
    monkeypatch.setattr(collectives, "MANY_TWO_SHOT_BYTES", 512)
    monkeypatch.setattr(collectives, "SMALL_SHARE_TILE", 32)
    monkeypatch.setattr(collectives, "SHARE_TILE", 64)
    generator = torch.Generator().manual_seed(2)
    calls = [[torch.randn(rows, 50, generator=generator) for _ in range(size)] for rows in (7, 3, 1, 9, 7, 3)]
    assert sum(parts[0].nbytes >= 512 for parts in calls) == 5

    def live(member: Member) -> None:
        for parts in calls:
            assert torch.equal(member.reduce(parts[member.rank].clone()), total_of(parts))
        assert member.counters.tolist() == [len(calls)] * collectives.PROGRAMS

    together(size, live)


def test_a_late_word_of_the_call_before_the_last_is_none() -> None:
    def live(member: Member) -> None:
        for number in range(1, 9):
            part = torch.full((1, 64), float(number + 10 * member.rank), dtype=torch.float16)
            assert member.reduce(part).tolist() == [[2.0 * number + 10] * 64]

    together(2, live)

    together(2, live)


@pytest.mark.parametrize("way", ["words", "flags", "shots", "columns"])
def test_a_rank_finds_the_newest_call_of_another_in_its_memory(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "shots":
        monkeypatch.setattr(collectives, "TWO_SHOT_BYTES", 1)
        monkeypatch.setattr(collectives, "SHARE_TILE", 64)
    size, base = 2, 3 << 40
    one = collectives.memory_bytes(size, PART_BYTES)
    memory = torch.zeros(size * one, dtype=torch.uint8)
    word = torch.tensor([rank_memory.RELEASED])  # so that neither waits
    members = [
        Member(rank, size, [memory.data_ptr(), memory.data_ptr() + one], word.data_ptr(), base) for rank in (0, 1)
    ]
    for call in range(1, 5):
        for member in members:
            part = torch.ones(2, 32, dtype=torch.float16 if way == "words" else torch.float32)
            if way == "columns":
                member.gather(part, [32, 32])
            else:
                member.reduce(part)
            flags, words = collectives.newest_of(member.rank, size, PART_BYTES)
            inbox = memory[(1 - member.rank) * one :]
            raised = [int(inbox[at : at + 8].view(torch.int64)) for at in flags]
            sent = [int(inbox[at : at + 8].view(torch.int64)) >> 32 for at in words]
            if way == "words":
                assert raised == [0, 0] and sent[call & 1] == call and sent[1 - (call & 1)] == call - 1
            else:
                assert sent == [0, 0] and raised == ([base + call] * 2 if way == "shots" else [base + call, 0])


COMPILE = """
import triton
from ppkernels.gpu.collectives import _reduce_shares as kernel
from triton.backends.compiler import GPUTarget
constants = {"RANK": 0, "SIZE": 2, "PART_BYTES": 2**25, "MOST": 128, "TILE": 1024}
types = {"part": "*bf16", "elements": "i32", "share": "i32", "table": "*i64", "counters": "*i64"}
source = triton.compiler.ASTSource(
    kernel, types | dict.fromkeys(constants, "constexpr"),
    {(kernel.arg_names.index(name),): value for name, value in constants.items()},
    {(at,): [["tt.divisibility", 16]] for at in range(3)})
print(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])
"""


def test_parts_move_16_bytes_at_a_time(tmp_path: Path) -> None:
    """Element by element, large sums of two H200 took 1.2 to 1.4 times as long."""
    code = fresh_triton.run(COMPILE, tmp_path)
    assert "st.global.v4.b32" in code
    assert not re.findall(r"(?:ld|st)\S*\.global\S*\.b16", code)


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


def test_a_released_rank_waits_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def live(member: Member) -> None:
        if member.rank == 0:  # Rank 1 never calls.
            member.reduce(torch.ones(1, 64))
            member.reduce(torch.ones(1, 64, dtype=torch.float16))
            monkeypatch.setattr(collectives, "TWO_SHOT_BYTES", 0)
            member.reduce(torch.ones(1, 64))

    together(2, live, word_value=rank_memory.RELEASED)


def test_a_rank_that_has_not_joined_gets_its_own_part() -> None:
    def live(member: Member) -> None:
        member.table[0] = 0
        for dtype in (torch.float32, torch.float16):
            assert torch.equal(member.reduce(torch.ones(1, 64, dtype=dtype)), torch.ones(1, 64, dtype=dtype))
        gathered = member.gather(torch.full((2, 3), 7), [3, 3])
        assert gathered[:, 3 * member.rank : 3 * member.rank + 3].tolist() == [[7] * 3] * 2

    together(2, live)
