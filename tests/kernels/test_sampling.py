"""Sampling: every parameter, the distribution, and independence of what shares the batch."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from ppkernels.best_ids import best_ids, launched
from ppkernels.sampling import sample, uniform
from ppkernels.sampling_inputs import SamplingInputs
from torch import Tensor

VOCABULARY = 24


def inputs(rows: int, **fields: object) -> SamplingInputs:
    """Parameters of `rows` rows; a single value stands for all of them."""
    values: dict[str, object] = {
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 7, "sample": 0, "position": list(range(rows)), **fields
    }  # fmt: skip
    per_row = ("temperature", "top_p", "top_k", "seed", "sample", "position", "logprobs")
    wide = {
        key: [value] * rows if key in per_row and not isinstance(value, list) else value
        for key, value in values.items()
    }
    return SamplingInputs(**wide)  # type: ignore[arg-type]


def logits(rows: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((rows, VOCABULARY), generator=generator, dtype=torch.float64).mul_(2).to(dtype)


def draws(row: Tensor, count: int = 8000, **fields: object) -> Tensor:
    """Return how often each token came in `count` draws from one row of logits."""
    tokens = sample(row.expand(count, -1), inputs(count, **fields)).tokens
    return torch.bincount(tokens, minlength=len(row)).double()


def check_distribution(counts: Tensor, probabilities: Tensor) -> None:
    """Chi-square with a bound far out in its tail (the draws are fixed by seed, so this never flickers)."""
    assert counts[probabilities == 0].sum() == 0
    likely = probabilities > 0
    expected = probabilities[likely].double() * counts.sum()
    freedom = int(likely.sum()) - 1
    statistic = float(((counts[likely] - expected) ** 2 / expected).sum())
    assert statistic < freedom + 4 * math.sqrt(2 * freedom) + 4, (statistic, freedom)


def test_greedy_takes_the_best_and_the_lowest_of_equals() -> None:
    rows = logits(5)
    rows[2, [3, 9, 20]] = 50.0
    before = rows.clone()
    tokens = sample(rows, inputs(5, temperature=0.0)).tokens
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == [max(range(VOCABULARY), key=lambda t, r=row: (r[t], -t)) for row in rows.tolist()]
    assert tokens[2] == 3
    assert torch.equal(rows, before)


def test_greedy_draws_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ppkernels.sampling.uniform", lambda *_: pytest.fail("a number was drawn"))
    assert len(sample(logits(4), inputs(4, temperature=0.0, top_p=0.5, top_k=3)).tokens) == 4


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_distribution_is_softmax_at_the_temperature(temperature: float, dtype: torch.dtype) -> None:
    row = logits(1, dtype=dtype)[0]
    check_distribution(draws(row, temperature=temperature), torch.softmax(row.double() / temperature, -1))


@pytest.mark.parametrize("top_k", [1, 2, 5, VOCABULARY, 1000, 0, -1])
def test_top_k_keeps_that_many(top_k: int) -> None:
    row = logits(1, seed=3)[0]
    kept = row.double().clone()
    if 0 < top_k < VOCABULARY:
        kept[row.argsort(descending=True)[top_k:]] = float("-inf")
    check_distribution(draws(row, top_k=top_k), torch.softmax(kept, -1))


@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.75, 0.99])
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float) -> None:
    row = logits(1, seed=4)[0]
    probabilities = torch.softmax(row.double(), -1)
    mass, kept = 0.0, torch.zeros(VOCABULARY, dtype=torch.float64)
    for token in probabilities.argsort(descending=True).tolist():
        if mass >= top_p:
            break
        kept[token] = probabilities[token]
        mass += float(probabilities[token])
    check_distribution(draws(row, top_p=top_p), kept / kept.sum())


def test_top_p_is_of_what_top_k_left() -> None:
    row = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    counts = draws(row, top_k=2, top_p=0.55)
    assert counts.tolist()[1:] == [0, 0, 0], "of the two left the first has 4/7"
    assert draws(row, top_p=0.55)[1] > 0


def test_ties_at_the_edge_of_top_k_go_to_the_lowest_ids() -> None:
    counts = draws(torch.zeros(6), count=600, top_k=2)
    assert (counts > 0).tolist() == [True, True, False, False, False, False]


def test_temperature_near_zero_is_greedy_and_does_not_overflow() -> None:
    rows = logits(6) * 1000
    assert torch.equal(sample(rows, inputs(6, temperature=1e-40)).tokens, rows.argmax(-1))


def test_a_token_depends_on_seed_sample_and_position_alone() -> None:
    row = logits(1, seed=5)[0]
    base = sample(row.expand(200, -1), inputs(200)).tokens
    assert torch.equal(base, sample(row.expand(200, -1), inputs(200)).tokens)
    for other in ({"seed": 8}, {"sample": 1}, {"position": list(range(1, 201))}):
        assert not torch.equal(base, sample(row.expand(200, -1), inputs(200, **other)).tokens)
    shifted = sample(row.expand(200, -1), inputs(200, position=list(range(1, 201)))).tokens
    assert torch.equal(base[1:], shifted[:-1])


def test_a_row_does_not_depend_on_what_shares_the_batch() -> None:
    rows = logits(40, seed=6)
    fields = {
        "temperature": [0.0 if row % 5 == 0 else 0.5 + row / 20 for row in range(40)],
        "top_p": [1.0 if row % 3 else 0.7 for row in range(40)],
        "top_k": [0 if row % 4 else 6 for row in range(40)],
        "seed": [row * 77 for row in range(40)],
        "logprobs": [row % 4 - 1 for row in range(40)],
    }
    whole = sample(rows, inputs(40, banned={3: [1, 2], 10: [5]}, **fields))
    for row in range(40):
        own = {key: [values[row]] for key, values in fields.items()}
        banned = {0: {3: [1, 2], 10: [5]}[row]} if row in (3, 10) else {}
        alone = sample(rows[row : row + 1], inputs(1, position=[row], banned=banned, **own))
        assert alone.tokens[0] == whole.tokens[row]
        assert alone.logprobs.get(0) == whole.logprobs.get(row)


def test_banned_tokens_do_not_come() -> None:
    rows = logits(3, seed=7)
    best = rows.argmax(-1).tolist()
    banned = {0: [best[0]], 2: [best[2], 10**6]}
    tokens = sample(rows, inputs(3, temperature=0.0, banned=banned)).tokens.tolist()
    assert tokens[0] != best[0]
    assert tokens[1] == best[1]
    assert tokens[2] != best[2]
    counts = torch.bincount(
        sample(rows[:1].expand(500, -1), inputs(500, banned={row: [best[0]] for row in range(500)})).tokens,
        minlength=VOCABULARY,
    )
    assert counts[best[0]] == 0


def test_logprobs_are_of_the_unmodified_distribution() -> None:
    rows = logits(4, seed=8)
    output = sample(
        rows, inputs(4, temperature=[0.0, 0.4, 3.0, 1.0], top_k=2, banned={0: [1]}, logprobs=[0, 3, 30, -1])
    )
    expected = torch.log_softmax(rows.double(), -1)
    assert sorted(output.logprobs) == [0, 1, 2]
    for row, (chosen, top) in output.logprobs.items():
        assert chosen == pytest.approx(float(expected[row, output.tokens[row]]), abs=1e-5)
        order = expected[row].argsort(descending=True).tolist()
        assert [token for token, _ in top] == order[: {0: 0, 1: 3, 2: VOCABULARY}[row]]
        assert all(value == pytest.approx(float(expected[row, token]), abs=1e-5) for token, value in top)
    assert sample(rows, inputs(4)).logprobs == {}


def test_equal_logprobs_are_listed_by_id() -> None:
    output = sample(torch.zeros((1, 5)), inputs(1, temperature=0.0, logprobs=5))
    assert [token for token, _ in output.logprobs[0][1]] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("find", [best_ids, launched])
def test_the_best_values_of_a_row_are_those_with_the_lowest_ids(find: Callable[[Tensor, int], Tensor]) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn((60, 3000), generator=generator).mul_(2).bfloat16().float()
    rows[-2], rows[-1] = -math.inf, 0.0
    for count in (1, 2, 20):
        found = find(rows, count).sort(-1).values
        assert torch.equal(found, rows.sort(dim=-1, descending=True, stable=True).indices[:, :count].sort(-1).values)
        chosen = find(torch.full((2, 3000), math.nan), count)
        assert chosen.shape == (2, count) and 0 <= chosen.min() <= chosen.max() < 3000


def test_equal_logprobs_do_not_depend_on_what_shares_the_batch() -> None:
    rows = torch.randn((40, 3000), generator=torch.Generator().manual_seed(4)).bfloat16().float()
    alone = sample(rows, inputs(40, temperature=0.0, logprobs=5)).logprobs
    whole = sample(rows, inputs(40, temperature=0.0, logprobs=[5] * 39 + [20])).logprobs
    assert [whole[row] for row in range(39)] == [alone[row] for row in range(39)]


def test_a_row_that_is_not_finite_still_gives_a_token_of_the_vocabulary() -> None:
    rows = torch.full((2, VOCABULARY), float("nan"))
    assert all(0 <= token < VOCABULARY for token in sample(rows, inputs(2, temperature=[0.0, 1.0])).tokens.tolist())


def test_uniform_is_even_and_below_one() -> None:
    values = [
        uniform(seed, sample_index, position)
        for seed in range(40)
        for sample_index in range(5)
        for position in range(50)
    ]
    assert all(0.0 <= value < 1.0 for value in values)
    assert len(set(values)) == len(values)
    counts = torch.histc(torch.tensor(values, dtype=torch.float64), bins=20, min=0, max=1)
    check_distribution(counts, torch.full((20,), 1 / 20))
    neighbours = torch.tensor(values, dtype=torch.float64)
    correlation = torch.corrcoef(torch.stack((neighbours[:-1], neighbours[1:])))[0, 1]
    assert abs(float(correlation)) < 0.04
    assert uniform(2**63 - 1, 63, 2**31) != uniform(2**63 - 2, 63, 2**31)


def test_the_generator_stays_what_it_is() -> None:
    """A seed that a user wrote down has to give the same text next year."""
    assert [uniform(*keys) for keys in ((0, 0, 0), (1, 2, 3), (2**63 - 1, 0, 4096))] == PINNED


PINNED = [0.13870941014555416, 0.814259011529328, 0.9141473123759118]


@pytest.mark.parametrize("field", ["temperature", "top_p"])
def test_values_too_small_for_the_type_take_the_best_token(field: str) -> None:
    rows = logits(3)
    assert sample(rows, inputs(3, **{field: 1e-50})).tokens.tolist() == rows.argmax(-1).tolist()
