"""Paged attention on a GPU against attention written plainly in float64."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from batches import Paged, make_paged, plain_attention
from ppkernels.attention_plan import AttentionPlan
from ppkernels.gpu import hopper, paged_decode, paged_prefill
from ppkernels.paged_attention import paged_attention, paged_attention_reference
from torch import Tensor

ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Largest error of a token's output, in parts of its norm."""
EXTRA = 3
STEPS = {
    "decodes": [(4, 1), (0, 1), (127, 1), (64, 1), (200, 1)],
    "chunks": [(16, 16), (0, 70), (3, 5), (40, 2), (70, 37)],
    "far chunks": [(300, 8), (0, 5), (253, 40), (511, 3), (100, 2)],
    "mixed": [(4, 1), (0, 11), (31, 1), (5, 7), (150, 1), (64, 33)],
}


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int


SHAPES = [Shape(4, 4, 64, 16), Shape(8, 2, 128, 16), Shape(6, 2, 80, 32), Shape(5, 1, 96, 16), Shape(2, 1, 256, 32)]
PAIRS = [(shape, dtype) for shape in SHAPES for dtype in ERROR]
if not torch.cuda.is_available():
    # The interpreter takes up to a second for a pair, and compiles none: each shape has one of the halves, in turn.
    HALVES = [torch.float16, torch.bfloat16]
    PAIRS = [pair for n, shape in enumerate(SHAPES) for pair in ((shape, torch.float32), (shape, HALVES[n % 2]))]
SPLIT = [(*pair, parts, least) for pair in PAIRS for parts in (2, 5) for least in (64, 256)]
if not torch.cuda.is_available():
    # Each shape has all four, two with each of its types, and each type has all four.
    SPLIT = [
        (shape, dtype, parts, least)
        for shape, dtype, parts, least in SPLIT
        if (SHAPES.index(shape) // 2 + (dtype == torch.float32) + (parts == 2) + (least == 64)) % 2
    ]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_HOPPER = DEVICE.type == "cuda" and torch.cuda.get_device_capability()[0] == 9
HOPPER = [
    *(Shape(group * 2, 2, width, block) for group, width, block in ((1, 64, 16), (4, 128, 16), (8, 128, 64))),
    Shape(32, 8, 64, 128),
    Shape(32, 2, 128, 32),
    Shape(32, 1, 128, 8),
    Shape(64, 1, 128, 256),
]
"""Shapes that the kernel for Hopper cards takes."""
LONG = {
    "long": [(0, 700), (1000, 513), (5, 1), (0, 128), (128, 128), (2000, 3), (128, 256)],
    "one long row": [(1500, 900)],
    "beside decodes": [*[(9, 1)] * 70, (130, 300), *[(40, 1)] * 250, (0, 200), *[(1, 1)] * 60],
    "many": [(n % 37, 2 + n % 50) for n in range(200)],
    "as many as it takes": [*[(5, 1)] * 700, *[(n % 9, 2 + n % 3) for n in range(324)]],
    "more than it takes": [*[(5, 1)] * 701, *[(n % 9, 2 + n % 3) for n in range(324)]],
}

HALF_TYPES = (torch.bfloat16, torch.float16)
HOPPER_CASES = list(itertools.product([*LONG, "far chunks"], HOPPER, HALF_TYPES, [1, 7, 132])) if ON_HOPPER else []


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Fill memory that torch allocates with NaN, so that gaps of a kernel show."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["every card's", *["Hopper's"] * ON_HOPPER])
def chunk_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernel for chunks: Hopper's takes those steps that it can."""
    name: str = request.param
    if name == "every card's":
        monkeypatch.setattr(hopper, "serves", lambda *_: False)
    return name


@pytest.fixture
def seed() -> int:
    return random.SystemRandom().randrange(2**31)


def queries(paged: Paged, heads: int, seed: int) -> Tensor:
    """[T, heads + EXTRA, head_dim]: wider than the queries, as a fused projection is."""
    shape = (len(paged.batch.positions), heads + EXTRA, paged.kv.shape[4])
    wide = torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    return wide.to(paged.kv)


def attend(paged: Paged, query: Tensor) -> Tensor:
    return paged_attention(query, paged.kv, AttentionPlan(paged.batch, query.shape[1] - EXTRA, query.dtype))


def errors(output: Tensor, paged: Paged, query: Tensor) -> Tensor:
    """Return ||output - plain|| / ||plain|| of each token; NaN is inf."""
    plain = plain_attention(paged, query[:, :-EXTRA])
    return ((output.cpu().double() - plain).norm(dim=1) / plain.norm(dim=1)).nan_to_num(torch.inf)


@pytest.mark.parametrize("parts", [1, 6])
@pytest.mark.parametrize(("shape", "dtype"), PAIRS, ids=str)
def test_decodes(
    shape: Shape, dtype: torch.dtype, parts: int, device: torch.device, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one part, as where rows are many, and in more parts than most rows have tiles."""
    if parts == 1:
        monkeypatch.setattr(paged_decode, "PROGRAMS_PER_PROCESSOR", 0)
    else:
        monkeypatch.setattr(paged_decode, "split_count", lambda *_: parts)
    compare("decodes", shape, dtype, device, seed, torch.int32)


@pytest.mark.parametrize(("shape", "dtype"), PAIRS, ids=str)
def test_chunks(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int, chunk_kernel: str) -> None:
    compare("chunks", shape, dtype, device, seed, torch.int64)


@pytest.mark.parametrize(("step", "shape", "dtype", "places"), HOPPER_CASES, ids=str)
def test_a_hopper_card(
    step: str, shape: Shape, dtype: torch.dtype, places: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs with many tiles in turn, and with one part of a tile's context."""
    from ppkernels.gpu.hopper import launch

    monkeypatch.setattr(launch, "processors", lambda _: places)
    compare(step, shape, dtype, DEVICE, seed, torch.int32)


@pytest.mark.parametrize(("shape", "dtype", "parts", "least"), SPLIT, ids=str)
def test_chunks_whose_context_is_split(
    shape: Shape, dtype: torch.dtype, parts: int, least: int, device: torch.device, seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Tokens of a tile that see nothing of its last part, parts without a slot, and rows that have one part."""
    monkeypatch.setattr(hopper, "serves", lambda *_: False)
    monkeypatch.setattr(paged_prefill, "split_count", lambda *_: parts)
    monkeypatch.setattr(paged_prefill, "LEAST_PART", least)
    compare("far chunks", shape, dtype, device, seed, torch.int32)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", ERROR, ids=str)
def test_a_mixed_step(
    dtype: torch.dtype, split: bool, device: torch.device, seed: int, chunk_kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if split:
        monkeypatch.setattr(paged_prefill, "split_count", lambda *_: 3)
        monkeypatch.setattr(paged_prefill, "LEAST_PART", 64)
    compare("mixed", SHAPES[1], dtype, device, seed, torch.int64)


def compare(
    step: str, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int, integers: torch.dtype
) -> None:
    rows = (STEPS | LONG)[step]
    paged = make_paged(rows, shape.kv_heads, shape.head_dim, dtype, block_size=shape.block_size, seed=seed,
                       device=device, integers=integers)  # fmt: skip
    query = queries(paged, shape.heads, seed)
    output = attend(paged, query)
    assert output.dtype == dtype
    assert errors(output, paged, query).max() < ERROR[dtype], f"seed {seed}"


def test_the_reference_takes_the_same_batches(device: torch.device, seed: int) -> None:
    paged = make_paged(STEPS["mixed"], 2, 32, torch.float32, block_size=16, seed=seed, device=device)
    query = queries(paged, 4, seed)
    output = paged_attention_reference(query, paged.kv, AttentionPlan(paged.batch, 4, query.dtype))
    assert errors(output, paged, query).max() < ERROR[torch.float32], f"seed {seed}"


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("attention", [paged_attention, paged_attention_reference])
def test_a_padded_row_is_zero_and_reads_nothing(
    attention, parts: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_decode, "split_count", lambda *_: parts)
    paged = make_paged([(70, 1), (5, 1)], 2, 32, torch.float32, block_size=16, device=device)
    paged.batch.seq_lens[1] = 0
    if attention is paged_attention:
        paged.batch.block_tables[1] = 10**8  # reading there would be noticed
    query = queries(paged, 4, 0)
    output = attention(query, paged.kv, AttentionPlan(paged.batch, 4, query.dtype))
    assert not output[1].any()
    assert errors(output, paged, query)[0] < ERROR[torch.float32]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("error", ["a stale block", "a slot too few", "a slot too many"])
def test_planted_errors_fail_the_comparison(step: str, error: str, device: torch.device, seed: int) -> None:
    dtype = torch.float32
    paged = make_paged(STEPS[step], 2, 32, dtype, block_size=16, seed=seed, device=device)
    tables, lengths = paged.batch.block_tables.clone(), paged.batch.seq_lens.clone()
    if error == "a stale block":
        tables[-1, 1] = tables[0, 0]
    else:
        lengths[-1] += 1 if error == "a slot too many" else -1
    query = queries(paged, 4, seed)
    output = attend(replace(paged, batch=replace(paged.batch, block_tables=tables, seq_lens=lengths)), query)
    wrong = errors(output, paged, query)
    count = paged.batch.query_lens[-1]
    assert wrong[-count:].max() > 2 * ERROR[dtype], f"seed {seed}"
    assert wrong[:-count].max() < ERROR[dtype], f"seed {seed}"


@pytest.mark.parametrize("parts", [1, 4])
def test_a_captured_launch_serves_other_lengths(
    parts: int, device: torch.device, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type != "cuda":
        pytest.skip("needs a GPU: CUDA graphs")
    monkeypatch.setattr(paged_decode, "split_count", lambda *_: parts)

    def make(lengths: list[int], seed: int) -> Paged:
        rows = [(length - 1, 1) for length in lengths]
        return make_paged(rows, 2, 128, torch.bfloat16, block_size=16, seed=seed, device=device)

    first, second = make([17, 201, 64], seed), make([200, 32, 49], seed + 1)
    query = queries(first, 4, seed)
    attend(first, query)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attend(first, query)
    first.kv.copy_(second.kv)
    first.batch.block_tables.copy_(second.batch.block_tables)
    first.batch.seq_lens.copy_(second.batch.seq_lens)
    graph.replay()
    assert errors(output, second, query).max() < ERROR[torch.bfloat16], f"seed {seed}"


@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper card")
@pytest.mark.parametrize("places", [2, 132])
def test_a_captured_launch_serves_other_rows(places: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles and parts are counted on the card: a graph's launch knows tokens and rows at most."""
    from ppkernels.gpu.hopper import launch

    monkeypatch.setattr(launch, "processors", lambda _: places)

    def make(rows: list[tuple[int, int]], seed: int) -> Paged:
        return make_paged(rows, 2, 128, torch.bfloat16, block_size=16, seed=seed, device=DEVICE)

    steps = [
        make([(600, 50), (0, 70), (1029, 130), (20, 6)], seed),
        make([(1000, 1), (1150, 8), (0, 3), (600, 244)], seed + 1),
        make([(14, 1), (31, 1), (900, 253), (1158, 1)], seed + 2),
    ]
    blocks = max(len(step.kv) for step in steps)
    kv = torch.full((blocks, *steps[0].kv.shape[1:]), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    batch, query = replace(steps[0].batch, decode_only=False), queries(steps[0], 8, seed)
    first = replace(
        steps[0], kv=kv, batch=replace(batch, block_tables=torch.zeros((4, 80), dtype=torch.int64, device=DEVICE))
    )
    attend(first, query)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attend(first, query)
    for step in steps:
        kv.fill_(torch.nan)[: len(step.kv)] = step.kv
        first.batch.block_tables.zero_()[:, : step.batch.block_tables.shape[1]] = step.batch.block_tables
        first.batch.seq_lens.copy_(step.batch.seq_lens)
        first.batch.query_start.copy_(step.batch.query_start)
        graph.replay()
        chunks = torch.tensor([count > 1 for count in step.batch.query_lens for _ in range(count)])
        assert errors(output, step, query)[chunks].max() < ERROR[torch.bfloat16], f"seed {seed}"


def test_a_cache_of_more_elements_than_32_bits_count(device: torch.device, seed: int) -> None:
    if device.type != "cuda":
        pytest.skip("needs a GPU: 4 GiB")
    paged = make_paged(STEPS["mixed"], 8, 128, torch.bfloat16, block_size=16, seed=seed, device=device)
    before = 2**31 // paged.kv[0].numel()
    kv = torch.full((before, *paged.kv.shape[1:]), torch.nan, dtype=paged.kv.dtype, device=device)
    far = replace(paged, kv=torch.cat((kv, paged.kv)))
    far.batch.block_tables.add_(before)
    query = queries(far, 16, seed)
    assert errors(attend(far, query), far, query).max() < ERROR[torch.bfloat16], f"seed {seed}"
