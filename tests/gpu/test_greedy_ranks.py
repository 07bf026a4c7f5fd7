"""Ranks that share a vocabulary choose the tokens of the kernel that reads whole logits, in processes of their own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import fresh_triton
import pytest
import torch
from interpreted_ranks import PART_BYTES, Member, interpret_few_programs, together
from kernel_variants import Variants
from ppengine.checkpoint.model_shard import shard_of
from ppkernels.gpu import collectives, rank_memory
from ppkernels.gpu.greedy_ranks import Columns, choose_greedy
from ppkernels.gpu.sampling import DeviceSampling, Parameters, choose
from thread_group import make_spec
from torch import Tensor

CPU = torch.device("cpu")
SLOTS, BASE = 9, 7 << 40
# Rows that are not finite are part of the tests; numpy, which interprets, warns of them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("tests/gpu/test_card_group.py tries them on the card")
    interpret_few_programs(monkeypatch)


class Call(NamedTuple):
    """Rows of whole logits, and their tokens by the kernel that reads these."""

    logits: Tensor
    slots: Tensor
    positions: Tensor
    tokens: list[int]
    newest: list[int]


def columns_of(vocabulary: int, rank: int, size: int) -> Columns:
    """Return a rank's share."""
    first, end = shard_of(make_spec(vocab_size=vocabulary), rank, size).vocabulary
    return Columns(first, end - first, vocabulary)


def part_of(logits: Tensor, columns: Columns) -> Tensor:
    """Return a rank's logits."""
    return logits[:, columns.first : columns.first + columns.width].contiguous()


def draw(rows: int, vocabulary: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return logits of few levels, so that the best of a row is in many columns; some rows are no usual ones."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator).mul_(2).round_()
    if rows > 4:
        logits[0] = -math.inf
        logits[1], logits[1, vocabulary - 1], logits[1, vocabulary // 2] = -1.0, 0.0, -0.0
        logits[2, ::3] = math.inf
        logits[3], logits[3, -1] = -math.inf, -9.0
    return logits.to(dtype)


def make_sampling(best: Tensor) -> DeviceSampling:
    """Return parameters by slot; every other slot bans some of the `best` tokens, below some position."""
    sampling = DeviceSampling(SLOTS, CPU, banned=5)
    bans = [Parameters(banned=best[slot].tolist(), banned_until=5) for slot in range(0, SLOTS, 2)]
    sampling.set(range(0, SLOTS, 2), bans)
    return sampling


def make_calls(vocabulary: int, dtype: torch.dtype) -> tuple[DeviceSampling, list[Call]]:
    """Return calls of one and of several rows."""
    whole = draw(SLOTS, vocabulary, dtype, vocabulary)
    sampling = make_sampling(whole.float().sort(dim=-1, descending=True, stable=True).indices[:, :4])
    calls = []
    for slots in ([5], [0, 1, 2, 3, 4, 5, 6, 7, 8], [8], [6], [7, 5, 8]):
        logits, rows = whole[slots], torch.tensor(slots, dtype=torch.int32)
        positions = torch.arange(len(slots), dtype=torch.int32) + 2  # bans of the last rows have ended
        newest = torch.full((SLOTS,), -7, dtype=torch.int32)
        tokens = choose(logits, sampling, rows, positions, greedy=True, newest=newest)
        calls.append(Call(logits, rows, positions, tokens.tolist(), newest.tolist()))
    return sampling, calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("vocabulary", "size"), [(67, 2), (64, 4), (35_001, 2)])
def test_ranks_choose_the_tokens_of_whole_logits(vocabulary: int, size: int, dtype: torch.dtype) -> None:
    sampling, calls = make_calls(vocabulary, dtype)
    assert len(set(calls[1].tokens)) > 4 and max(calls[1].tokens) > vocabulary // 2

    def live(member: Member) -> None:
        columns = columns_of(vocabulary, member.rank, size)
        for number, call in enumerate(calls):
            part, newest = part_of(call.logits, columns), torch.full((SLOTS,), -7, dtype=torch.int32)
            before = part.clone()
            found = member.choose(part, columns, sampling, call.slots, call.positions, newest)
            assert (found.tolist(), newest.tolist()) == (call.tokens, call.newest)
            assert torch.equal(part, before)
            # Other calls between: all ranks number them in one order, and inboxes alternate.
            for _ in range(number % 3):
                assert member.reduce(torch.ones(1, 4, dtype=torch.float16)).tolist() == [[size] * 4]
            whole = torch.arange(size * 2).view(1, -1)
            widths = [2] * size
            assert torch.equal(
                member.gather(whole[:, 2 * member.rank : 2 * member.rank + 2].contiguous(), widths), whole
            )
        assert member.counters.tolist() == [BASE + 2 * len(calls) + 4] * collectives.PROGRAMS

    together(size, live, BASE)


def test_ranks_choose_one_token_where_nothing_is_a_number() -> None:
    logits, sampling, slots = draw(3, 40, torch.float32, 1), DeviceSampling(3, CPU), torch.arange(3)
    logits[0], logits[1, 30:], logits[2, ::2] = math.nan, math.nan, math.nan

    def live(member: Member) -> None:
        columns = columns_of(40, member.rank, 2)
        tokens = member.choose(part_of(logits, columns), columns, sampling, slots, slots)
        assert int(tokens.min()) >= 0 and int(tokens.max()) < 40
        assert torch.equal(member.gather(tokens.view(1, 3), [3, 3]).view(2, 3), tokens.expand(2, 3))

    together(2, live)


def test_a_wrong_first_token_shows() -> None:
    sampling, calls = make_calls(64, torch.float32)

    def live(member: Member) -> None:
        columns = columns_of(64, member.rank, 2)._replace(first=0)
        found = member.choose(part_of(calls[1].logits, columns), columns, sampling, *calls[1][1:3])
        assert found.tolist() != calls[1].tokens

    together(2, live)


def test_a_rank_that_has_not_joined_chooses_of_its_own() -> None:
    logits, sampling, slots = draw(3, 40, torch.float32, 1), DeviceSampling(3, CPU), torch.arange(3)
    member = Member(1, 2, [0, 0], 0)
    member.table[0] = 0
    columns = columns_of(40, 1, 2)
    part = part_of(logits, columns)
    assert member.choose(part, columns, sampling, slots, slots).tolist() == (part.argmax(1) + 20).tolist()
    with pytest.raises(ValueError, match="65 rows: ranks choose 64 tokens at most in a call"):
        member.choose(torch.zeros(65, 20), columns, sampling, slots, slots)


def test_a_released_rank_chooses_tokens_of_the_vocabulary() -> None:
    """Kernels behind it look them up, though they are void."""
    one = collectives.memory_bytes(2, PART_BYTES)
    memory = torch.randint(0, 256, (2 * one,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    word, rows = torch.tensor([rank_memory.RELEASED]), 40
    slots, sampling = torch.zeros(rows, dtype=torch.int32), DeviceSampling(1, CPU)
    for rank in (0, 1):
        member = Member(rank, 2, [memory.data_ptr(), memory.data_ptr() + one], word.data_ptr())
        columns = columns_of(64, rank, 2)
        newest = torch.zeros(1, dtype=torch.int32)
        tokens = member.choose(draw(rows, 32, torch.float32, 4), columns, sampling, slots, slots, newest)
        assert int(tokens.min()) >= 0 and int(tokens.max()) < 64 and len(set(tokens.tolist())) > 8
        # The other rank finds this call as the newest one.
        _, words = collectives.newest_of(rank, 2, PART_BYTES)
        at = (1 - rank) * one + words[1]
        assert int(memory[at : at + 8].view(torch.int64)) >> 32 == 1


def test_one_variant_serves_any_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    variants, table = Variants(monkeypatch, runs=False), torch.zeros(4, dtype=torch.int64)
    sampling, ints = DeviceSampling(1, CPU), torch.zeros(70, dtype=torch.int32)
    for rows in range(1, 65):
        logits, slots = torch.zeros(rows, 32, dtype=torch.bfloat16), ints[rows % 5 : rows % 5 + rows]
        choose_greedy(logits, columns_of(64, 1, 2), sampling, slots, slots, ints, table, table, 1, 2, PART_BYTES)
    assert len(variants.taken()) == 1


COMPILE = """
import triton
from ppkernels.gpu.greedy_ranks import _choose_rows as kernel
from triton.backends.compiler import GPUTarget
constants = {"NEWEST": True, "BANNED_WIDTH": 128, "RANK": 1, "SIZE": 4, "WORDS_AT": 2**27, "WORDS": 2**17, "MOST": 128,
             "BLOCK": 16384}
types = {name: "*i32" for name in ("slots", "positions", "newest")} | {
    name: "*i64" for name in ("parameters", "tokens", "table", "counters")} | {"logits": "*bf16"}
names = kernel.arg_names
source = triton.compiler.ASTSource(
    kernel, {name: "constexpr" if name in constants else types.get(name, "i32") for name in names},
    {(names.index(name),): value for name, value in constants.items()},
    {(names.index(name),): [["tt.divisibility", 16]] for name in ("logits", "row_stride", "width")})
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 32}).asm["ptx"])
"""


def test_it_compiles_for_a_card_and_reads_16_bytes_at_a_time(tmp_path: Path) -> None:
    lines = [line.split(";")[0].split("//")[0].strip() for line in fresh_triton.run(COMPILE, tmp_path).splitlines()]
    assert any("ld.global.v4.b32" in line for line in lines), "logits"
    assert any("ld.volatile.global.b64" in line for line in lines), "words of other ranks, as often as it looks"
