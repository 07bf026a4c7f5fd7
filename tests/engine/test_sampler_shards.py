"""Ranks that share a vocabulary choose the tokens that one rank chooses from all logits, and all of them the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ppengine.checkpoint.model_shard import shard_of
from ppengine.protocol.steps import Adjustments, Register, Sampled
from ppengine.stage.candidates import MOST, best_ids, sample_split
from ppengine.stage.sampler import sample_rows
from ppengine.stage.token_history import TokenHistory
from ppkernels.sampling_inputs import SamplingInputs
from thread_group import ThreadGroup, make_spec, run_ranks
from torch import Tensor

ROWS = 4
POSITIONS = [9, 5, 70, 6]


def row(**fields: Any) -> dict[str, Any]:
    """Return sampling parameters of one request; greedy, if `fields` do not say otherwise."""
    plain = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "logprobs": -1, "banned": [], "adjustments": None}
    return {**plain, **fields}


def draw_logits(seed: int, vocabulary: int, dtype: torch.dtype, levels: float = 0.0) -> Tensor:
    """Return [ROWS, vocabulary]; with `levels`, multiples of its inverse: many are equal."""
    values = torch.randn((ROWS, vocabulary), generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2
    return (values if not levels else (values * levels).round() / levels).to(dtype)


def choose(logits: Tensor, rows: list[dict[str, Any]], seed: int, size: int) -> list[list[Sampled]]:
    """Return what each of `size` ranks samples from its columns of `logits` [R, V]."""
    spec = make_spec(num_kv_heads=12, vocab_size=logits.shape[1])
    requests = {
        slot: Register(
            slot, f"r{slot}", [place % 5 for place in range(POSITIONS[slot])], 4,
            one["temperature"], one["top_p"], one["top_k"], seed, slot,
            3 if one["banned"] else 0, one["banned"], one["logprobs"],
            one["adjustments"],
        )
        for slot, one in enumerate(rows)
    }  # fmt: skip
    slots = list(range(len(rows)))

    def work(group: ThreadGroup) -> list[Sampled]:
        shard = shard_of(spec, group.rank, size)
        part = logits[:, slice(*shard.vocabulary)].clone()
        before, history = part.clone(), TokenHistory()
        history.register(list(requests.values()))
        tokens, sampled = sample_rows(part, requests, history, slots, POSITIONS, shard, group)
        assert torch.equal(part.nan_to_num(), before.nan_to_num()), "logits are not changed"
        assert tokens.tolist() == [each.token for each in sampled]
        return sampled

    return run_ranks(size, work)


def check(logits: Tensor, rows: list[dict[str, Any]], seed: int, size: int) -> None:
    """Compare all ranks with one rank."""
    (whole,) = choose(logits, rows, seed, 1)
    for sampled in choose(logits, rows, seed, size):
        assert sampled == whole


VOCABULARIES = [12, 37, 48, 200]
GREEDY = st.builds(row, banned=st.lists(st.integers(0, 11), max_size=4))
TOP_K = st.builds(
    row,
    temperature=st.sampled_from([1e-3, 0.7, 1.0, 5.0]),
    top_k=st.integers(1, MOST),
    top_p=st.sampled_from([1.0, 0.9, 0.4]),
    banned=st.lists(st.integers(0, 60), max_size=6),
)
ANY = st.builds(
    row,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, -1, 3, MOST + 1]),
    top_p=st.sampled_from([1.0, 0.8]),
    logprobs=st.sampled_from([-1, -1, 0, 3]),
    banned=st.lists(st.integers(0, 60), max_size=6),
)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.sampled_from([GREEDY, GREEDY | TOP_K, TOP_K, ANY]).flatmap(
        lambda kind: st.lists(kind, min_size=ROWS, max_size=ROWS)
    ),
    vocabulary=st.sampled_from(VOCABULARIES),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    levels=st.sampled_from([0.0, 1.0, 4.0]),
    size=st.sampled_from([2, 3, 4]),
    seed=st.integers(0, 2**31),
)
def test_ranks_choose_the_tokens_of_one(
    rows: list[dict[str, Any]], vocabulary: int, dtype: torch.dtype, levels: float, size: int, seed: int
) -> None:
    check(draw_logits(seed, vocabulary, dtype, levels), rows, seed, size)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_adjust_as_one(size: int) -> None:
    """Greedy rows too, which need only the best tokens of each rank otherwise."""
    changes = Adjustments(
        min_p=0.05, presence_penalty=1.0, repetition_penalty=1.3, logit_bias={30: 2.0, 3: 1.0}, bad_words_ids=[[4, 0]]
    )
    rows = [row(adjustments=changes), row(temperature=1.0, top_k=5, adjustments=changes), row(), row(temperature=1.0)]
    for seed in range(10):
        check(draw_logits(seed, 48, torch.float32), rows, seed, size)


def test_a_history_takes_no_position_but_the_next() -> None:
    history = TokenHistory()
    history.register([Register(3, "a", [5, 6], 1, 0.0, 1.0, 0, 1, 0, 0, [], -1, Adjustments(min_p=0.5))])
    history.append(3, 7)
    assert history.before(3, 3).tolist() == [5, 6, 7]
    with pytest.raises(ValueError, match="slot 3: position 4 is sampled, 3 tokens are known"):
        history.before(3, 4)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ties_across_ranks_go_to_the_lowest_id(size: int) -> None:
    logits = torch.zeros(ROWS, 48)
    logits[1, [15, 16, 40]] = 3.0
    logits[2, [47, 24]] = 3.0
    logits[3, [5, 40]] = 3.0
    rows = [row(), row(), row(), row(banned=[5])]
    for sampled in choose(logits, rows, 1, size):
        assert [each.token for each in sampled] == [0, 15, 24, 40]
    check(logits, [row(temperature=1.0, top_k=k) for k in (1, 2, 5, 47)], 3, size)


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_may_have_nothing_that_is_allowed(size: int) -> None:
    logits = draw_logits(5, 48, torch.float32)
    banned = list(range(24))
    check(logits, [row(banned=banned), row(temperature=1.0, top_k=7, banned=banned)] * 2, 3, size)
    check(torch.full((ROWS, 48), -math.inf), [row()] * ROWS, 3, size)


def test_rows_that_are_not_finite_give_a_token() -> None:
    """Their request ends in an error elsewhere; the sampler must not."""
    logits = draw_logits(6, 48, torch.float32)
    logits[1, 20], logits[2], logits[3, 7] = math.nan, math.nan, math.inf
    for rows in ([row()] * ROWS, [row(temperature=1.0, top_k=5)] * ROWS, [row(temperature=1.0)] * ROWS):
        first, *others = choose(logits, rows, 3, 4)
        assert all(0 <= each.token < 48 for each in first)
        assert all(other == first for other in others)
    check(logits, [row()] * ROWS, 3, 4)


@pytest.mark.parametrize(
    ("fields", "width"),
    [
        ({"temperature": [0.0] * ROWS}, 2),
        ({"temperature": [0.0, 1.0, 1.0, 0.0], "top_k": [0, 3, 5, 9]}, 10),
        ({"top_k": [MOST] * ROWS}, 2 * MOST),
        ({"top_k": [MOST, MOST, MOST, MOST + 1]}, 100),
        ({"top_k": [1, 1, 1, 0]}, 100),
        ({"temperature": [0.0] * ROWS, "logprobs": [-1, -1, -1, 0]}, 100),
    ],
)
def test_no_more_is_gathered_than_the_rows_need(fields: dict[str, list[Any]], width: int) -> None:
    """A candidate travels as a value and an id; without candidates all 100 logits of a rank do."""
    plain = {"temperature": [1.0] * ROWS, "top_p": [1.0] * ROWS, "top_k": [0] * ROWS, "sample": [0] * ROWS}
    inputs = SamplingInputs(**{**plain, "seed": [3] * ROWS, "position": POSITIONS, **fields})  # type: ignore[arg-type]
    logits = draw_logits(7, 200, torch.float32)
    widths: list[int] = []

    class Noted(ThreadGroup):
        def all_gather(self, part: Tensor, wanted: list[int], site: int) -> Tensor:
            widths.append(part.shape[1])
            return super().all_gather(part, wanted, site)

    def work(group: ThreadGroup) -> None:
        shard = shard_of(make_spec(vocab_size=200), group.rank, 2)
        sample_split(logits[:, slice(*shard.vocabulary)], inputs, shard, group)

    run_ranks(2, work, Noted)
    assert widths == [width] * 2


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), count=st.integers(1, 14), levels=st.sampled_from([0.0, 0.5, 2.0]))
@example(seed=0, count=3, levels=1e-9)
def test_best_ids_are_those_of_a_stable_sort(seed: int, count: int, levels: float) -> None:
    logits = draw_logits(seed, 12, torch.float32, levels)
    order = logits.sort(stable=True, descending=True).indices[:, :count]
    assert torch.equal(best_ids(logits, count), order.sort().values)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_wrong_first_id_shows(shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that counts its ids from a wrong start chooses other tokens: the comparison above fails."""
    logits = draw_logits(8, 48, torch.float32)
    right = choose(logits, [row()] * ROWS, 3, 2)
    real = best_ids
    monkeypatch.setattr("ppengine.stage.candidates.best_ids", lambda *given: (real(*given) + shift).clamp(0, 23))
    assert choose(logits, [row()] * ROWS, 3, 2) != right
