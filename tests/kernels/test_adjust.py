"""Adjustments of logits: those of transformers' processors where they mean the same, and vLLM's rules elsewhere."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ppkernels.adjust import adjusted
from ppkernels.sampling import sample
from ppkernels.sampling_inputs import Adjustment, SamplingInputs
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
)

VOCABULARY = 24
TOKENS = st.integers(0, VOCABULARY - 1)
LISTS = st.lists(TOKENS, max_size=30)
SEEDS = st.integers(0, 2**31)


def logits(seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((1, VOCABULARY), generator=generator, dtype=torch.float64).mul_(3).to(dtype)


def adjust(
    row: Tensor,
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    temperature: float = 1.0,
    banned: list[int] | None = None,
    **fields: Any,
) -> Tensor:
    """Return one adjusted row."""
    known = [np.array(tokens or [], np.int64) for tokens in (prompt, output)]
    rows = {0: Adjustment(*known, **fields)}
    inputs = SamplingInputs([temperature], [1.0], [0], [0], [0], [0], {0: banned or []}, adjustments=rows)
    before = row.clone()
    after = adjusted(row, inputs)
    assert torch.equal(row, before), "logits are not changed"
    return after


def ids(*parts: list[int]) -> Tensor:
    return torch.tensor([[token for part in parts for token in part]], dtype=torch.int64)


@settings(deadline=None)
@given(seed=SEEDS, prompt=LISTS, output=LISTS, penalty=st.floats(0.1, 3.0))
def test_repetition_penalty_is_that_of_transformers(
    seed: int, prompt: list[int], output: list[int], penalty: float
) -> None:
    row = logits(seed)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids(prompt, output), row.clone())
    torch.testing.assert_close(adjust(row, prompt, output, repetition_penalty=penalty), expected)


@settings(deadline=None)
@given(seed=SEEDS, min_p=st.floats(1e-4, 1.0), temperature=st.floats(0.1, 5.0))
def test_min_p_is_that_of_transformers_after_the_temperature(seed: int, min_p: float, temperature: float) -> None:
    row = logits(seed)
    expected = MinPLogitsWarper(min_p)(ids([]), TemperatureLogitsWarper(temperature)(ids([]), row.clone()))
    kept = adjust(row, min_p=min_p, temperature=temperature)
    assert torch.equal(kept.isfinite(), expected.isfinite())
    assert torch.equal(kept[kept.isfinite()], row[kept.isfinite()])


@settings(deadline=None)
@given(seed=SEEDS, output=st.lists(st.integers(0, 3), max_size=8), data=st.data())
def test_bad_words_are_those_of_transformers(seed: int, output: list[int], data: st.DataObject) -> None:
    """Few token ids, so that sequences are often met."""
    words = data.draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=6))
    row = logits(seed)
    # Its comparison of a sequence that is longer than the text fails.
    fitting = [word for word in words if len(word) <= len(output) + 1]
    expected = NoBadWordsLogitsProcessor(fitting)(ids(output), row.clone()) if fitting else row
    assert torch.equal(adjust(row, output=output, bad_words=words), expected)


@settings(deadline=None)
@given(seed=SEEDS, bias=st.dictionaries(TOKENS, st.floats(-100, 100), max_size=9))
def test_a_bias_is_that_of_transformers(seed: int, bias: dict[int, float]) -> None:
    row = logits(seed)
    expected = row
    if bias:
        expected = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])(ids([0]), row)
    torch.testing.assert_close(adjust(row, logit_bias=bias), expected, check_dtype=False, rtol=1e-6, atol=1e-5)


@settings(deadline=None)
@given(seed=SEEDS, prompt=LISTS, output=LISTS, presence=st.floats(-2, 2), frequency=st.floats(-2, 2))
def test_presence_and_frequency_count_the_output_alone(
    seed: int, prompt: list[int], output: list[int], presence: float, frequency: float
) -> None:
    row = logits(seed)
    expected = row.clone()
    for token in set(output):
        expected[0, token] -= output.count(token) * frequency + presence
    found = adjust(row, prompt, output, presence_penalty=presence, frequency_penalty=frequency)
    torch.testing.assert_close(found, expected)


@settings(deadline=None)
@given(seed=SEEDS, allowed=st.lists(TOKENS, min_size=1, max_size=9))
def test_allowed_tokens_alone_are_kept(seed: int, allowed: list[int]) -> None:
    row = logits(seed)
    found = adjust(row, allowed=allowed)
    assert {token for token in range(VOCABULARY) if found[0, token] > -math.inf} == set(allowed)
    assert torch.equal(found[0, allowed], row[0, allowed])


def test_the_order_is_that_of_vllm() -> None:
    """A bias comes before the penalties, so that it changes signs; bans stay, and min-p judges what is left."""
    row = torch.tensor([[1.0, 4.0, -1.0, 9.0, 2.0]], dtype=torch.float64)
    found = adjust(
        row, [0], [1, 1], logit_bias={0: -3.0, 3: 100.0}, repetition_penalty=2.0, frequency_penalty=0.5,
        presence_penalty=0.25, allowed=[0, 1, 3, 4], bad_words=[[1, 3]], min_p=0.1,
    )  # fmt: skip
    # 4: 2 is the best. 1: 4 / 2 - 2 * 0.5 - 0.25 = 0.75. 0: (1 - 3) * 2 = -4, too unlikely.
    assert found.tolist() == [[-math.inf, 0.75, -math.inf, -math.inf, 2.0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_half_precision_is_adjusted_in_float32(dtype: torch.dtype) -> None:
    row = logits(3, dtype)
    found = adjust(row, [], [5], presence_penalty=1e-4)
    assert found.dtype == torch.float32
    assert found[0, 5] == row[0, 5].float() - torch.tensor(1e-4, dtype=torch.float32)


def rows_of(count: int, **fields: Any) -> SamplingInputs:
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 7, "sample": 0}
    lists = {name: [value] * count for name, value in plain.items()}
    return SamplingInputs(**{**lists, "position": list(range(count)), **fields})  # type: ignore[arg-type]


def test_rows_without_adjustments_are_chosen_as_before() -> None:
    rows = torch.cat([logits(seed, torch.float32) for seed in range(20)])
    nothing = np.array([], np.int64)
    changes = {3: Adjustment(nothing, nothing, allowed=[2]), 9: Adjustment(nothing, nothing, logit_bias={5: 100.0})}
    plain = sample(rows, rows_of(20, logprobs=[1] * 20))
    some = sample(rows, rows_of(20, logprobs=[1] * 20, adjustments=changes))
    others = [row for row in range(20) if row not in changes]
    assert some.tokens[others].tolist() == plain.tokens[others].tolist()
    assert some.tokens[[3, 9]].tolist() == [2, 5]
    # Log-probabilities are of the unmodified distribution.
    assert [some.logprobs[row][1] for row in range(20)] == [plain.logprobs[row][1] for row in range(20)]
    exact = torch.log_softmax(rows.double(), -1)
    assert some.logprobs[9][0] == pytest.approx(float(exact[9, 5]), abs=1e-5)


def test_a_ban_comes_before_min_p() -> None:
    """The best token that may be chosen sets the least probability."""
    nothing = np.array([], np.int64)
    row = torch.tensor([[9.0, 1.0, 0.9, -9.0]])
    changes = {index: Adjustment(nothing, nothing, min_p=0.5) for index in range(200)}
    inputs = rows_of(200, banned={index: [0] for index in range(200)}, adjustments=changes)
    counts = torch.bincount(sample(row.expand(200, -1), inputs).tokens, minlength=4)
    assert (counts > 0).tolist() == [False, True, True, False]


def test_greedy_rows_need_no_temperature() -> None:
    nothing = np.array([], np.int64)
    changes = {0: Adjustment(nothing, np.array([2]), presence_penalty=2.0, min_p=1.0)}
    row = torch.tensor([[0.0, 1.0, 2.5, -9.0]])
    assert sample(row, rows_of(1, temperature=[0.0], adjustments=changes)).tokens.tolist() == [1]
