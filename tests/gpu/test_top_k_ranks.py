"""Ranks that share a vocabulary draw the tokens of the kernel that reads whole logits, in processes of their own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import fresh_triton
import pytest
import torch
import triton
import triton.language as tl
from interpreted_ranks import PART_BYTES, Member, interpret_few_programs, together
from kernel_variants import Variants
from ppkernels.gpu import collectives, draw, greedy_ranks, rank_memory, top_k_ranks
from ppkernels.gpu.sampling import DeviceSampling, Parameters, choose
from ppkernels.gpu.top_k_ranks import choose_below
from test_greedy_ranks import columns_of, part_of
from torch import Tensor

CPU = torch.device("cpu")
# Rows that are not finite are part of the tests; numpy, which interprets, warns of them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
ROWS = 8


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("tests/gpu/test_card_group.py tries them on the card")
    interpret_few_programs(monkeypatch)
    monkeypatch.setattr(collectives, "WORD_BYTES", 2**14)


class Call(NamedTuple):
    """Rows of whole logits, and their tokens by the kernel that reads these."""

    logits: Tensor
    sampling: DeviceSampling
    slots: Tensor
    positions: Tensor
    most: int
    tokens: list[int]
    newest: list[int]


def make_call(logits: Tensor, parameters: list[Parameters], slots: list[int] | None = None) -> Call:
    """Return a call of the rows of `slots`, or of all, each with the parameters of its slot."""
    slots = list(range(len(parameters))) if slots is None else slots
    sampling = DeviceSampling(len(parameters), CPU, banned=5)
    sampling.set(range(len(parameters)), parameters)
    rows, positions = torch.tensor(slots, dtype=torch.int32), torch.arange(len(slots), dtype=torch.int32) + 2
    newest = torch.full((len(parameters),), -7, dtype=torch.int32)
    tokens = choose(logits[slots], sampling, rows, positions, greedy=False, newest=newest)
    most = max(one.top_k for one in (parameters[slot] for slot in slots))
    return Call(logits[slots], sampling, rows, positions, most, tokens.tolist(), newest.tolist())


def check(member: Member, vocabulary: int, calls: list[Call]) -> None:
    """Compare the tokens of a rank with those of whole logits."""
    columns = columns_of(vocabulary, member.rank, member.size)
    for number, call in enumerate(calls):
        part, newest = part_of(call.logits, columns), torch.full((len(call.newest),), -7, dtype=torch.int32)
        before = part.clone()
        found = member.choose_below(part, columns, call.sampling, call.slots, call.positions, call.most, newest)
        assert (found.tolist(), newest.tolist()) == (call.tokens, call.newest), number
        assert torch.equal(part, before), "bans are taken back"


def alike(vocabulary: int, size: int, calls: list[Call]) -> None:
    """Fail if ranks do not draw what whole logits give."""
    together(size, lambda member: check(member, vocabulary, calls))


def normal(rows: int, vocabulary: int, seed: int) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)).mul_(1.5)


def spread(top_k: int, row: int, **more: Any) -> Parameters:
    """Return parameters of a row of its own kind; every fifth has no top-p."""
    heat, share = 0.1 + 1.9 * (row % 7) / 6, 0.1 + 0.9 * (row % 5) / 4
    return Parameters(heat, share, top_k, seed=31 * row + 5, sample=row % 3, **more)


@pytest.mark.parametrize(
    ("vocabulary", "size", "dtype"),
    [(303, 4, torch.float32), (303, 4, torch.bfloat16), (35_001, 2, torch.bfloat16)],
    ids=str,
)
def test_ranks_draw_the_tokens_of_whole_logits(vocabulary: int, size: int, dtype: torch.dtype) -> None:
    logits = normal(ROWS, vocabulary, vocabulary).to(dtype)
    calls = [make_call(logits, [spread(top_k, row) for row in range(ROWS)]) for top_k in (1, 64)]
    # Beside greedy rows, and each with a number of its own.
    mixed = [Parameters() if row % 3 == 1 else spread(1 + 9 * row % 64, row) for row in range(ROWS)]
    calls += [make_call(logits, mixed, slots) for slots in ([3], list(range(ROWS)), [1])]
    assert len({token for call in calls for token in call.tokens}) > 11
    alike(vocabulary, size, calls)


@pytest.mark.parametrize(("size", "numbers"), [(2, (7, 64)), (4, (3, 20))])
def test_of_equals_at_the_cut_the_lowest_stay(
    size: int, numbers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of few levels: the cut is in a level that all ranks have, or that one rank has.

    Rows have several tiles here, and mostly more candidates than a kernel gathers.
    """
    monkeypatch.setattr(top_k_ranks, "DRAW_BLOCK", 32)
    monkeypatch.setattr(top_k_ranks, "CANDIDATES", 32)
    logits = normal(ROWS, 257, 5).div_(1.5).round_().to(torch.bfloat16)
    logits[::3, :100] -= 3
    calls = [make_call(logits, [spread(top_k, row) for row in range(ROWS)]) for top_k in numbers]
    flat = make_call(torch.ones(4, 257), [Parameters(2.0, 1.0, 1 + 15 * row, seed=row) for row in range(4)])
    assert max(flat.tokens) > 20
    alike(257, size, [*calls, flat])


def close_call() -> Call:
    """Return rows of logits in float32 that differ, but few of which differ once they are scaled by the best one."""
    logits = normal(ROWS, 260, 6).mul_(6e-8).add_(0.25)
    logits[torch.arange(ROWS), 130 * (torch.arange(ROWS) % 4 > 0) + 7] = 2.5
    scaled = (logits - 2.5) / 1.9  # of few levels
    assert all(len(set(row)) < 5 for row in scaled.tolist()) and len(set(logits[0].tolist())) > 12
    numbers = [9 if row % 2 else 33 for row in range(ROWS)]
    return make_call(logits, [Parameters(1.9, 1.0, top_k, seed=row) for row, top_k in enumerate(numbers)])


def test_logits_that_are_equal_once_scaled_stay_by_token() -> None:
    """The best logit may be that of another rank."""
    alike(260, 2, [close_call()])


def test_candidates_by_the_best_of_a_rank_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the best logit of all ranks is exchanged first."""
    call = close_call()
    monkeypatch.setattr(top_k_ranks, "_top", triton.jit(_choose_by_its_own))

    def live(member: Member) -> None:
        columns = columns_of(260, member.rank, 2)
        found = member.choose_below(part_of(call.logits, columns), columns, *call[1:5])
        assert found.tolist() != call.tokens

    together(2, live)


def test_banned_tokens_do_not_come() -> None:
    logits = normal(ROWS, 300, 7)
    best = logits.sort(dim=-1, descending=True).indices
    wishes = [spread(1 + row % 4, row, banned=best[row, :5].tolist(), banned_until=6) for row in range(ROWS)]
    call = make_call(logits, wishes)
    until = [int(position) < 6 for position in call.positions]
    banned = [token in one.banned for token, one in zip(call.tokens, wishes, strict=True)]
    assert until.count(True) == 4 and not any(banned[:4]) and any(banned[4:])
    alike(300, 2, [call])


@pytest.mark.parametrize(("dtype", "top_k"), [(torch.float32, 5), (torch.bfloat16, 64)], ids=str)
def test_few_tokens_are_finite(dtype: torch.dtype, top_k: int) -> None:
    """Rows with fewer finite logits than top-k, in one rank or in both, or with none."""
    logits = torch.full((ROWS, 140), -math.inf, dtype=dtype)
    for row in range(1, ROWS):
        logits[row, (torch.arange(row) * 37 + 11 * row) % 140] = torch.linspace(-1, 1, row).to(dtype)
    call = make_call(logits, [spread(top_k, row) for row in range(ROWS)])
    assert call.tokens[0] == 139
    alike(140, 2, [call])


def test_a_rank_has_fewer_tokens_than_top_k() -> None:
    few = normal(ROWS, 9, 8).to(torch.bfloat16)
    alike(9, 4, [make_call(few, [spread(top_k, row) for row in range(ROWS)]) for top_k in (8, 64)])


def test_calls_of_all_kinds_alternate() -> None:
    logits = normal(3, 64, 9)
    call = make_call(logits, [spread(9, row) for row in range(3)])

    def live(member: Member) -> None:
        columns = columns_of(64, member.rank, 2)
        for number in range(3):
            check(member, 64, [call] * (number + 1))
            slots, greedy = torch.arange(3), DeviceSampling(3, CPU)
            best = member.choose(part_of(logits, columns), columns, greedy, slots, slots)
            assert best.tolist() == logits.argmax(1).tolist()
            assert member.reduce(torch.ones(1, 4, dtype=torch.float16)).tolist() == [[2] * 4]
        assert member.counters.tolist() == [12] * collectives.PROGRAMS

    together(2, live)


def test_ranks_draw_one_token_where_not_all_is_finite() -> None:
    logits = normal(5, 80, 10)
    logits[0], logits[1, 3], logits[2, ::2], logits[3, 60:], logits[4, 30:] = math.nan, math.inf, math.nan, math.nan, 0
    sampling, slots = DeviceSampling(5, CPU), torch.arange(5)
    sampling.set(range(5), [spread(6, row) for row in range(5)])

    def live(member: Member) -> None:
        columns = columns_of(80, member.rank, 2)
        tokens = member.choose_below(part_of(logits, columns), columns, sampling, slots, slots, 6)
        assert int(tokens.min()) >= 0 and int(tokens.max()) < 80
        assert torch.equal(member.gather(tokens.view(1, 5), [5, 5]).view(2, 5), tokens.expand(2, 5))

    together(2, live)


def _keep_one_less(row, count, best, temperature, start, end, top_k, BLOCK):
    return draw.cut_to_number(row, count, best, temperature, start, end, top_k - 1, BLOCK)


def _draw_below_one_more(row, count, best, temperature, start, end, limited, top_k, top_p, total, number, BLOCK):
    return draw.draw_from(
        row, count, best, temperature, start, end, limited, top_k + 1, top_p, total, number, BLOCK
    )  # fmt: skip


def _scale_by_its_own(pair, row, joined, number, released, table, RANK, SIZE, WORDS_AT, WORDS):
    _, token, released = greedy_ranks.best_of_ranks(
        pair, row, joined, number, released, table, RANK, SIZE, WORDS_AT, WORDS
    )
    best, _ = greedy_ranks.unpaired(pair)
    return best, token, released


_top = top_k_ranks._top


def _send_from_the_last(
    values, width, best, temperature, top_k, candidates, ids, kept, kept_ids, CAPACITY, LANES, BLOCK
):
    x, place = _top(
        values, width, best, temperature, top_k, candidates, ids, kept, kept_ids, CAPACITY, LANES, BLOCK
    )  # fmt: skip
    return tl.flip(x, 0), tl.flip(place, 0)


def _choose_by_its_own(
    values, width, best, temperature, top_k, candidates, ids, kept, kept_ids, CAPACITY, LANES, BLOCK
):
    own = tl.max(tl.load(candidates + tl.arange(0, BLOCK)))
    return _top(values, width, own, temperature, top_k, candidates, ids, kept, kept_ids, CAPACITY, LANES, BLOCK)


@pytest.mark.parametrize(
    ("name", "planted"),
    [
        ("draw_from", draw.draw_from),
        ("cut_to_number", _keep_one_less),
        ("draw_from", _draw_below_one_more),
        ("best_of_ranks", _scale_by_its_own),
        ("_top", _send_from_the_last),
    ],
)
def test_planted_errors_show(name: str, planted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is none, but has a wrong first token."""
    wishes = [Parameters(2.0, 1.0, 64 if row % 2 else 2, seed=row) for row in range(ROWS)]
    logits = normal(ROWS, 200, 13)
    logits[::3, :100] -= 9  # one rank has all that are kept
    logits[1::3, 100:] -= 9
    call = make_call(logits, wishes)
    if planted is not draw.draw_from:
        monkeypatch.setattr(top_k_ranks, name, triton.jit(planted))

    def live(member: Member) -> None:
        columns = columns_of(200, member.rank, 2)
        part = part_of(call.logits, columns)
        if planted is draw.draw_from:
            columns = columns._replace(first=0)
        found = member.choose_below(part, columns, *call[1:5])
        assert found.tolist() != call.tokens

    together(2, live)


def test_a_rank_that_has_not_joined_draws_of_its_own() -> None:
    logits = normal(ROWS, 128, 11)
    member = Member(1, 2, [0, 0], 0)
    member.table[0] = 0
    columns = columns_of(128, 1, 2)
    part = part_of(logits, columns)
    own = make_call(part, [Parameters() if row % 2 else spread(9, row) for row in range(ROWS)])
    found = member.choose_below(part, columns, own.sampling, own.slots, own.positions, 9)
    assert found.tolist() == [token + 64 for token in own.tokens]
    with pytest.raises(ValueError, match="32 rows with a top-k of up to 64 do not fit a call"):
        member.choose_below(torch.zeros(32, 64), columns, own.sampling, own.slots, own.positions, 64)
    assert top_k_ranks.fits(31, 64) and not top_k_ranks.fits(1, 65)


def test_a_released_rank_draws_tokens_of_the_vocabulary() -> None:
    """Kernels behind it look them up, though they are void."""
    one = collectives.memory_bytes(2, PART_BYTES)
    memory = torch.randint(0, 256, (2 * one,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    word = torch.tensor([rank_memory.RELEASED])
    call = make_call(normal(ROWS, 32, 12), [spread(1 + 2 * row, row) for row in range(ROWS)])
    for rank in (0, 1):
        member = Member(rank, 2, [memory.data_ptr(), memory.data_ptr() + one], word.data_ptr())
        columns = columns_of(64, rank, 2)
        tokens = member.choose_below(call.logits.clone(), columns, call.sampling, call.slots, call.positions, call.most)
        assert int(tokens.min()) >= 0 and int(tokens.max()) < 64


def test_one_variant_serves_any_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    variants, table = Variants(monkeypatch, runs=False), torch.zeros(4, dtype=torch.int64)
    sampling, ints = DeviceSampling(1, CPU), torch.zeros(70, dtype=torch.int32)
    for rows in range(1, 32):
        logits, slots = torch.zeros(rows, 32, dtype=torch.bfloat16), ints[rows % 5 : rows % 5 + rows]
        for most in (1, 16, 2 * rows):
            choose_below(
                logits, columns_of(64, 1, 2), sampling, slots, slots, most, ints, table, table, 1, 2, PART_BYTES
            )
    assert len(variants.taken()) == 1


COMPILE = """
import sys
import triton
from ppkernels.gpu.top_k_ranks import _choose_rows as kernel
from triton.backends.compiler import GPUTarget
constants = {"NEWEST": True, "BANNED_WIDTH": 128, "RANK": 1, "SIZE": 4, "WORDS_AT": 2**27, "WORDS": 2**17,
             "PROGRAMS": 128, "LANES": 64, "MERGED": 256, "ROOM": 8192 + 256, "CAPACITY": 8192, "BLOCK": 4096}
types = {name: "*i32" for name in ("slots", "positions", "newest", "ids")} | {
    name: "*i64" for name in ("parameters", "tokens", "table", "counters")} | {
    "logits": sys.argv[2], "candidates": sys.argv[2]}
names = kernel.arg_names
source = triton.compiler.ASTSource(
    kernel, {name: "constexpr" if name in constants else types.get(name, "i32") for name in names},
    {(names.index(name),): value for name, value in constants.items()},
    {(names.index(name),): [["tt.divisibility", 16]]
     for name in ("logits", "candidates", "ids", "row_stride", "width")})
built = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options={"num_warps": 16})
assert len(built.asm["cubin"]) > 0 and built.metadata.shared < 99 * 1024, built.metadata.shared
print(built.asm["ptx"])
"""


@pytest.mark.parametrize(("card", "kind"), [(90, "*bf16"), (80, "*fp32")])
def test_it_compiles_for_a_card_and_reads_16_bytes_at_a_time(card: int, kind: str, tmp_path: Path) -> None:
    code = fresh_triton.run(COMPILE, tmp_path, str(card), kind)
    lines = [line.split(";")[0].split("//")[0].strip() for line in code.splitlines()]
    assert any("ld.global.v4.b32" in line for line in lines), "logits"
    volatile = [line for line in lines if "ld.volatile.global" in line]
    assert volatile and all(".b64" in line for line in volatile), "words of other ranks, as often as it looks"
