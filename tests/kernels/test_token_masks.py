"""Masks of tokens: allowed ones keep their logits, and sampling chooses among them."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from ppkernels.sampling import sample
from ppkernels.sampling_inputs import Adjustment, SamplingInputs
from ppkernels.token_masks import masked


class Bits(NamedTuple):
    """A mask, as `TokenMask` has it."""

    words: bytes
    places: bytes = b""


def mask_of(vocabulary: int, allowed: list[int], *, folded: bool = False) -> Bits:
    """Return a mask with all words, or `folded` with those alone that are not zero."""
    words = np.zeros(-(-vocabulary // 32), "<u4")
    for token in allowed:
        words[token // 32] |= np.uint32(1 << token % 32)
    if folded:
        places = np.flatnonzero(words)
        return Bits(words[places].tobytes(), places.astype("<i4").tobytes())
    return Bits(words.tobytes())


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_tokens_without_a_bit_are_banned(dtype: torch.dtype, folded: bool) -> None:
    logits = torch.randn(3, 70).to(dtype)
    before = logits.clone()
    found = masked(logits, {1: mask_of(70, [0, 31, 32, 69], folded=folded)})
    assert torch.equal(logits, before) and torch.equal(found[0], logits[0]) and torch.equal(found[2], logits[2])
    assert [token for token in range(70) if found[1, token] > -math.inf] == [0, 31, 32, 69]
    assert torch.equal(found[1, [0, 31, 32, 69]], logits[1, [0, 31, 32, 69]])


def test_tokens_behind_the_last_word_are_banned() -> None:
    found = masked(torch.zeros(2, 100), {0: Bits(b"\xff" * 4), 1: Bits(b"\x01" * 4)})
    assert torch.isfinite(found[0]).nonzero().flatten().tolist() == list(range(32))
    assert torch.isfinite(found[1]).nonzero().flatten().tolist() == [0, 8, 16, 24]


def test_words_outside_of_a_mask_are_left_out() -> None:
    """A table of masks has them side by side: they must not reach another row."""
    places = np.array([-1, 1, 3, 4, 99], "<i4").tobytes()
    found = masked(torch.zeros(2, 100), {0: Bits(b"\x02\0\0\0" * 5, places), 1: mask_of(100, [5])})
    allowed = [torch.isfinite(row).nonzero().flatten().tolist() for row in found]
    assert allowed == [[33, 97], [5]]


def test_rows_with_one_mask_and_rows_with_another() -> None:
    masks = {row: mask_of(40, [3] if row % 2 else [9, 33], folded=row > 2) for row in (4, 1, 3, 2)}
    found = masked(torch.zeros(5, 40), masks)
    allowed = [torch.isfinite(row).nonzero().flatten().tolist() for row in found]
    assert allowed == [list(range(40)), [3], [9, 33], [3], [9, 33]]


def test_a_mask_comes_before_everything_else() -> None:
    logits = torch.zeros(4, 40)
    logits[:, 7] = 50.0
    masks = {row: mask_of(40, [3, 9]) for row in (1, 2, 3)}
    change = Adjustment(np.array([1]), np.array([2]), min_p=0.9, logit_bias={7: 100.0, 9: 1.0})
    inputs = SamplingInputs(
        [0.0, 0.0, 1.0, 0.0], [1.0] * 4, [0] * 4, [1] * 4, [0] * 4, [5] * 4, banned={3: [3]}, logprobs=[0] * 4,
        adjustments={2: change}, masks=masks,
    )  # fmt: skip
    found = sample(logits, inputs)
    assert found.tokens.tolist() == [7, 3, 9, 9]
    # Log-probabilities are of the logits before any change.
    assert found.logprobs[1][0] == pytest.approx(-50.0, abs=1e-3)
