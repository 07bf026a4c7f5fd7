"""Change logits by what a request asks for and has written, before its token is chosen.

Names, meaning and order are those of vLLM 0.22.1 (V1 sampler): allowed tokens, bad words, bias,
penalties, and after the temperature min-p. Bad words, presence and frequency look at the output
alone, the repetition penalty at the prompt, too. Tokens that are banned stay banned.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ppkernels.sampling_inputs import Adjustment, SamplingInputs


def adjusted(logits: Tensor, inputs: SamplingInputs) -> Tensor:
    """Return new logits [R, V] for `inputs.adjustments`, float64 for float64 and otherwise float32.

    Rows without an adjustment keep their values.
    """
    wide = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32, copy=True)
    for row, adjustment in inputs.adjustments.items():
        values = wide[row]
        _ban(values, adjustment)
        _add_bias(values, adjustment)
        _penalize(values, adjustment)
        if adjustment.min_p > 0.0 and inputs.temperature[row] > 0.0:
            _cut_unlikely(values, adjustment.min_p, inputs.temperature[row])
    return wide


def completed_words(words: list[list[int]], output: list[int]) -> list[int]:
    """Return the tokens that would complete one of `words` behind `output`."""
    return [word[-1] for word in words if len(word) == 1 or output[1 - len(word) :] == word[:-1]]


def _ban(values: Tensor, adjustment: Adjustment) -> None:
    if adjustment.allowed is not None:
        allowed = torch.tensor(adjustment.allowed, device=values.device)
        kept = values[allowed]
        values.fill_(-math.inf)
        values[allowed] = kept
    if adjustment.bad_words:
        longest = max(map(len, adjustment.bad_words))
        output = adjustment.output[-longest:].tolist()
        values[completed_words([list(word) for word in adjustment.bad_words], output)] = -math.inf


def _add_bias(values: Tensor, adjustment: Adjustment) -> None:
    if adjustment.logit_bias:
        tokens = torch.tensor(list(adjustment.logit_bias), device=values.device)
        values[tokens] += torch.tensor(list(adjustment.logit_bias.values()), dtype=values.dtype, device=values.device)


def _penalize(values: Tensor, adjustment: Adjustment) -> None:
    def scalar(value: float) -> Tensor:
        return torch.tensor(value, dtype=values.dtype, device=values.device)

    if adjustment.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.union1d(adjustment.prompt, adjustment.output)).to(values.device)
        penalty, before = scalar(adjustment.repetition_penalty), values[seen]
        values[seen] = torch.where(before > 0, before / penalty, before * penalty)
    if adjustment.frequency_penalty or adjustment.presence_penalty:
        found, times = np.unique(adjustment.output, return_counts=True)
        written, counts = torch.from_numpy(found).to(values.device), torch.from_numpy(times).to(values)
        frequency, presence = scalar(adjustment.frequency_penalty), scalar(adjustment.presence_penalty)
        values[written] = values[written] - counts * frequency - presence


def _cut_unlikely(values: Tensor, min_p: float, temperature: float) -> None:
    """Ban the tokens whose probability is below `min_p` times the best one's."""
    # A temperature above 0 must stay above 0, also if the type is too narrow for it.
    least = max(temperature, torch.finfo(values.dtype).tiny)
    scaled = (values - values.max()) / torch.tensor(least, dtype=values.dtype, device=values.device)
    values.masked_fill_(scaled < torch.tensor(math.log(min_p), dtype=values.dtype, device=values.device), -math.inf)
