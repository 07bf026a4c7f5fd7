"""Adjusted logits on a GPU: the tokens of the reference, step by step, and rows that share the batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from ppkernels.adjust import adjusted
from ppkernels.gpu.adjustments import DeviceAdjustments
from ppkernels.gpu.sampling import DeviceSampling, Parameters, choose_adjusted
from ppkernels.sampling import sample, sample_reference
from ppkernels.sampling_inputs import Adjustment, SamplingInputs
from torch import Tensor

# Rows that are not finite are part of the tests; numpy, which interprets, warns of them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
VOCABULARY = 5000
PROMPT, OUTPUT = np.arange(0, 60, 3), np.array([7, 7, 12, 4999, 7, 40, 41])


def logits(rows: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((rows, VOCABULARY), generator=generator).mul_(4).to(dtype)


def change(**fields: Any) -> Adjustment:
    return Adjustment(PROMPT, OUTPUT, **fields)


ALL = {
    "repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.9, "min_p": 0.05,
    "logit_bias": {7: 4.0, 12: -1.5, 4999: 100.0, 0: 3.3}, "bad_words": [[40, 41, 7], [4999], [41, 12], [1, 2, 3]],
}  # fmt: skip
CHANGES = [
    None,
    change(repetition_penalty=1.3),
    change(repetition_penalty=0.7, presence_penalty=-1.1),
    change(frequency_penalty=0.37),
    change(min_p=0.2),
    change(logit_bias={token: token / 7 - 100 for token in range(1, 301)}),
    change(allowed=[*range(3, 4996, 11), 7, 7]),
    change(bad_words=[[41, token] for token in range(250)] + [[5]]),
    change(**ALL),
    change(**ALL, allowed=[0, 7, 12, 40, 41, 4999]),
    change(min_p=1.0),
]  # fmt: skip


def inputs(changes: list[Adjustment | None], **fields: Any) -> SamplingInputs:
    """Return parameters of one row for each of `changes`."""
    count = len(changes)
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 7, "sample": 0, **fields}
    wide = {name: value if isinstance(value, list) else [value] * count for name, value in plain.items()}
    wide["position"] = [len(PROMPT) + len(OUTPUT)] * count
    known = {row: one for row, one in enumerate(changes) if one is not None}
    banned = {row: [40, 3, 9] for row in range(0, count, 2)}
    return SamplingInputs(**wide, banned=banned, adjustments=known)


@dtypes
def test_rows_are_those_of_the_reference(device: torch.device, dtype: torch.dtype) -> None:
    """Bit by bit, so that any token is the same."""
    rows, given = logits(len(CHANGES), dtype), inputs(CHANGES, temperature=0.8)
    table = DeviceSampling(len(CHANGES), device)
    table.set(range(len(CHANGES)), [Parameters(temperature=0.8)] * len(CHANGES))
    records = DeviceAdjustments(len(CHANGES), VOCABULARY, 40, device)
    records.set(range(len(CHANGES)), CHANGES)
    slots = torch.arange(len(CHANGES), device=device)
    positions = torch.tensor(given.position, device=device)
    found = records.adjusted(rows.to(device), table.table, table.banned, slots, positions).cpu()
    expected = adjusted(rows, given)
    assert torch.equal(found, expected)
    assert not torch.equal(expected[8], rows[8].float())


# Rows are adjusted in float32 whatever their type is, so the cuts meet one type.
@pytest.mark.parametrize(
    ("cuts", "dtype"),
    [({"temperature": 0.0}, torch.float32), ({"temperature": 0.0}, torch.bfloat16),
     ({"temperature": 1.3, "top_p": 0.9, "top_k": 70}, torch.float16)],
    ids=str,
)  # fmt: skip
def test_a_seed_gives_the_tokens_of_the_reference(
    device: torch.device, dtype: torch.dtype, cuts: dict[str, Any]
) -> None:
    rows = logits(len(CHANGES), dtype, seed=3)
    given = inputs(CHANGES, **cuts, logprobs=[1] * len(CHANGES))
    kernel, reference = sample(rows.to(device), given), sample_reference(rows, given)
    assert kernel.tokens.tolist() == reference.tokens.tolist()
    for row, (chosen, best) in reference.logprobs.items():
        assert kernel.logprobs[row][0] == pytest.approx(chosen, abs=1e-4)
        assert [token for token, _ in kernel.logprobs[row][1]] == [token for token, _ in best]


def test_the_device_counts_the_tokens_that_it_sampled(device: torch.device) -> None:
    """No step waits for the host: the next one knows the token of the one before. Two rows are adjusted at a time."""
    rows = logits(5, torch.bfloat16, seed=4)
    changes = [change(repetition_penalty=1.4, frequency_penalty=1.0, bad_words=[[3, 4]]), None, change(**ALL)]
    table, records = DeviceSampling(9, device), DeviceAdjustments(9, VOCABULARY, 60, device, rows=2)
    slots, order = [8, 0, 4, 3, 5], [changes[0], changes[1], changes[2], changes[0], None]
    table.set(slots, [Parameters(temperature=0.7, seed=seed) for seed in range(5)])
    records.set(slots, order)
    known = [list(OUTPUT) for _ in slots]
    newest = torch.zeros(9, dtype=torch.int32, device=device)
    tokens: list[Tensor] = []
    for step in range(12):
        positions = torch.full((5,), len(PROMPT) + len(OUTPUT) + step, device=device)
        where = torch.tensor(slots, device=device), positions
        tokens.append(choose_adjusted(rows.to(device), table, records, *where, greedy=False, newest=newest))
    assert newest.tolist() == [int(tokens[-1][slots.index(slot)]) if slot in slots else 0 for slot in range(9)]
    for step, found in enumerate(tokens):
        moved = {
            row: Adjustment(
                PROMPT, np.array(known[row]), one.min_p, one.presence_penalty, one.frequency_penalty,
                one.repetition_penalty, one.logit_bias, one.bad_words, one.allowed,
            )
            for row, one in enumerate(order) if one is not None
        }  # fmt: skip
        position = [len(PROMPT) + len(OUTPUT) + step] * 5
        given = SamplingInputs([0.7] * 5, [1.0] * 5, [0] * 5, list(range(5)), [0] * 5, position, adjustments=moved)
        assert found.tolist() == sample_reference(rows, given).tokens.tolist(), step
        for row, token in enumerate(found.tolist()):
            known[row].append(token)
    assert any(len(set(outputs[7:])) > 3 for outputs in known)


def test_a_slot_of_another_request_has_no_adjustments(device: torch.device) -> None:
    rows = torch.zeros((2, 64), device=device)
    rows[:, 5] = 1.0
    table, records = DeviceSampling(4, device), DeviceAdjustments(4, 64, 8, device)
    nothing = np.array([], np.int64)
    slots, positions = torch.tensor([1, 2], device=device), torch.zeros(2, dtype=torch.int64, device=device)
    records.set([1, 2], [Adjustment(nothing, nothing, allowed=[9])] * 2)
    assert choose_adjusted(rows, table, records, slots, positions, greedy=True).tolist() == [9, 9]
    records.set([2, 3], [None, None])
    assert choose_adjusted(rows, table, records, slots, positions, greedy=True).tolist() == [9, 5]


def test_records_have_room_for_so_much(device: torch.device) -> None:
    records = DeviceAdjustments(4, 64, 8, device)
    with pytest.raises(ValueError, match="27 tokens and 0 bad words; there is room for 8 and 256"):
        records.set([1], [change(min_p=0.5)])


def test_a_row_that_is_not_finite_still_gives_a_token_of_the_vocabulary(device: torch.device) -> None:
    for bad in (math.nan, math.inf, -math.inf):
        rows = torch.full((2, VOCABULARY), bad, device=device)
        given = inputs([change(**ALL), change(allowed=[3], bad_words=[[3]])], temperature=[0.0, 1.0])
        assert all(0 <= token < VOCABULARY for token in sample(rows, given).tokens.tolist())
