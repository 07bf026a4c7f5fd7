"""Attention of decodes that share prefixes against attention written plainly in float64."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from batches import Paged, make_paged, plain_attention, share
from ppkernels import shared_prefixes
from ppkernels.attention_plan import AttentionPlan
from ppkernels.batch import Batch
from ppkernels.gpu import paged_decode, shared_decode
from ppkernels.paged_attention import paged_attention
from ppkernels.shared_prefixes import find_shared, on_device, pad_words, words_of

ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Largest error of a token's output, in parts of its norm."""
LEAST = 32
"""Tokens of the shortest prefix here."""
SHAPES = [(4, 4, 64, 16), (8, 2, 128, 16), (6, 2, 80, 32), (7, 1, 64, 16), (32, 1, 64, 16)]
"""Query heads, key heads, head_dim, block_size."""
PAIRS = list(itertools.product(SHAPES, ERROR))
if not torch.cuda.is_available():  # the interpreter compiles none: each shape has one of the halves, in turn
    HALVES = [torch.float16, torch.bfloat16]
    PAIRS = [pair for n, shape in enumerate(SHAPES) for pair in ((shape, torch.float32), (shape, HALVES[n % 2]))]
OWN = (1, 40, 130, 7, 64, 33)


@pytest.fixture
def seed() -> int:
    return random.SystemRandom().randrange(2**31)


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Fill memory that torch allocates with NaN, so that gaps of a kernel show."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefixes, "LEAST_TOKENS", LEAST)


def make(shape: Any, dtype: torch.dtype, device: torch.device, seed: int, beside: tuple[int, int] = (20, 1)) -> Paged:
    """Return 18 rows of a prefix of 160 tokens, three of one of 64, and rows of their own, `beside` among them."""
    _, kv_heads, head_dim, block_size = shape
    rows = [(160 + OWN[n % len(OWN)], 1) for n in range(18)]
    rows += [(64, 1), (64 + 9, 1), beside, (0, 1), (64 + 40, 1), (300, 1)]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    paged = make_paged([rows[n] for n in order], kv_heads, head_dim, dtype, block_size=block_size, seed=seed,
                       device=device, integers=torch.int32)  # fmt: skip
    for members, tokens in ((range(18), 160), ((18, 19, 22), 64)):
        share(paged, [order.index(n) for n in members], tokens)
    return paged


def words(paged: Paged) -> np.ndarray:
    batch = paged.batch
    tables, ends = (part.cpu().numpy().astype(np.int64) for part in (batch.block_tables, batch.seq_lens))
    found = find_shared(tables, ends, np.array(batch.query_lens), batch.block_size, 1)
    assert found is not None and found[0] == 3
    return found


def errors(paged: Paged, shape: Any, found: np.ndarray, seed: int, batch: Batch | None = None) -> torch.Tensor:
    """Return ||output - plain|| / ||plain|| of each token; NaN is inf."""
    heads, _, head_dim, _ = shape
    query = torch.randn(
        (len(paged.batch.positions), heads + 3, head_dim), generator=torch.Generator().manual_seed(seed)
    )
    query = query.to(paged.kv)
    there = torch.from_numpy(found.astype(np.int32)).to(paged.kv.device)
    batch = batch or paged.batch
    batch = replace(batch, shared=on_device(there, len(batch.query_lens)))
    output = paged_attention(query, paged.kv, AttentionPlan(batch, heads, query.dtype))
    plain = plain_attention(paged, query[:, :heads])
    return ((output.cpu().double() - plain).norm(dim=1) / plain.norm(dim=1)).nan_to_num(torch.inf)


@pytest.mark.parametrize(("parts", "own_parts"), [(1, 1), (8, 1), (2, 3)])
@pytest.mark.parametrize(("shape", "dtype"), PAIRS, ids=str)
def test_rows_that_share(
    shape: Any, dtype: torch.dtype, parts: int, own_parts: int, device: torch.device, seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """More parts of a prefix than it has tiles of slots, and of the rest of a row, too."""
    monkeypatch.setattr(paged_decode, "split_count", lambda *_: own_parts)
    pairs = 3 * shape[1] * shared_prefixes.TILE_ROWS // shared_decode.program_rows(shape[0] // shape[1], dtype.itemsize)
    monkeypatch.setattr(paged_decode, "PROGRAMS_PER_PROCESSOR", 1)
    monkeypatch.setattr(paged_decode, "processors", lambda _: parts * pairs)
    paged = make(shape, dtype, device, seed)
    assert errors(paged, shape, words(paged), seed).max() < ERROR[dtype], f"seed {seed}"


@pytest.mark.parametrize("dtype", ERROR, ids=str)
def test_beside_a_chunk(dtype: torch.dtype, device: torch.device, seed: int) -> None:
    paged = make(SHAPES[1], dtype, device, seed, beside=(250, 9))
    assert errors(paged, SHAPES[1], words(paged), seed).max() < ERROR[dtype], f"seed {seed}"


def test_padded_words(device: torch.device, seed: int) -> None:
    paged = make(SHAPES[1], torch.float32, device, seed)
    rows, wide = len(paged.batch.query_lens), 40
    padded = np.full(words_of(wide), 10**6)
    pad_words(words(paged), rows, padded, wide)
    batch, more = paged.batch, wide - rows
    batch = replace(
        batch,
        query_start=torch.cat([batch.query_start, batch.query_start[-1:].expand(more)]),
        seq_lens=torch.cat([batch.seq_lens, torch.zeros_like(batch.seq_lens[:1]).expand(more)]),
        block_tables=torch.cat([batch.block_tables, batch.block_tables[:1].expand(more, -1)]),
        query_lens=[1] * wide,
    )
    assert errors(paged, SHAPES[1], padded, seed, batch).max() < ERROR[torch.float32], f"seed {seed}"
    pad_words(None, 0, padded, wide)
    assert errors(paged, SHAPES[1], padded, seed, batch).max() < ERROR[torch.float32], f"seed {seed}"


@pytest.mark.parametrize("error", ["a wrong row", "a block too many", "another's place"])
def test_planted_errors_fail_the_comparison(error: str, device: torch.device, seed: int) -> None:
    paged = make(SHAPES[1], torch.float32, device, seed)
    found = words(paged)
    rows = len(paged.batch.query_lens)
    _, lengths, members, places = shared_prefixes.parts_of(found, rows)
    if error == "a wrong row":
        members[1] = np.flatnonzero(places < 0)[0]
    elif error == "a block too many":
        lengths[0] += paged.batch.block_size
    else:
        places[members[0]] = 2 * shared_prefixes.TILE_ROWS
    wrong = errors(paged, SHAPES[1], found, seed)
    assert wrong.max() > 2 * ERROR[torch.float32], f"seed {seed}"
