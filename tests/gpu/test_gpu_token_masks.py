"""Masks of tokens on a GPU: the logits and the tokens of the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ppengine.protocol.token_mask import TokenMask
from ppkernels import token_masks
from ppkernels.gpu.token_masks import masked
from ppkernels.sampling import sample, sample_reference
from ppkernels.sampling_inputs import Adjustment, SamplingInputs

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


def masks(vocabulary: int, rows: list[int], seed: int = 0) -> dict[int, TokenMask]:
    """Return masks with all words in even rows, and with some in the others."""
    source = np.random.default_rng(seed)
    count = -(-vocabulary // 32)
    made = {}
    for row in rows:
        words, places = source.integers(0, 2**32, count, np.uint64).astype("<u4"), b""
        if row % 2:
            chosen = np.sort(source.choice(count, -(-count // 3), replace=False)).astype("<i4")
            words, places = words[chosen], chosen.tobytes()
        made[row] = TokenMask(words.tobytes(), places)
    return made


@dtypes
@pytest.mark.parametrize("vocabulary", [5000, 4097, 31, 64])
def test_banned_tokens_are_those_of_the_reference(device: torch.device, dtype: torch.dtype, vocabulary: int) -> None:
    wide = torch.randn(5, vocabulary + 3).to(dtype)
    logits, given = wide[:, :vocabulary], masks(vocabulary, [4, 3, 0, 2])
    found = masked(logits.to(device), given).cpu()
    assert torch.equal(found, token_masks.masked(logits, given))
    assert torch.equal(found[1], logits[1]) and not torch.equal(found[0], logits[0])


def test_tokens_behind_the_last_word_are_banned(device: torch.device) -> None:
    found = masked(torch.zeros(1, 100).to(device), {0: TokenMask(b"\xff" * 4)}).cpu()
    assert torch.isfinite(found[0]).nonzero().flatten().tolist() == list(range(32))


def test_rows_may_lie_behind_the_first_two_billion_logits(device: torch.device) -> None:
    wide = torch.empty(2**31 + 64, dtype=torch.bfloat16, device=device)  # A CPU has pages for the few that are used.
    logits = wide.as_strided((3, 64), (2**30, 1))
    logits.copy_(torch.randn(3, 64))
    found = masked(logits, {0: TokenMask(b"\xff" * 8), 2: TokenMask(b"\x06" + b"\0" * 7)})
    assert torch.equal(found[:2], logits[:2]) and found[2, 1:3].tolist() == logits[2, 1:3].tolist()
    assert torch.isinf(found[2]).sum() == 62


@dtypes
def test_a_seed_gives_the_tokens_of_the_reference(device: torch.device, dtype: torch.dtype) -> None:
    rows = torch.randn(4, 3000).mul(4).to(dtype)
    change = Adjustment(np.array([1, 2]), np.array([3]), repetition_penalty=1.3, min_p=0.05)
    given = SamplingInputs(
        [0.0, 0.8, 1.0, 0.7], [1.0, 0.9, 1.0, 1.0], [0, 50, 0, 0], [7] * 4, [0] * 4, [3] * 4, logprobs=[1] * 4,
        adjustments={2: change}, masks=masks(3000, [0, 1, 2]),
    )  # fmt: skip
    kernel, reference = sample(rows.to(device), given), sample_reference(rows, given)
    assert kernel.tokens.tolist() == reference.tokens.tolist()
    for row, (chosen, _) in reference.logprobs.items():
        assert kernel.logprobs[row][0] == pytest.approx(chosen, abs=1e-4)
