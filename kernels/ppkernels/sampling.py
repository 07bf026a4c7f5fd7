"""Choose one token for each row of logits.

A random row takes exactly one number, from a generator without state: `uniform(seed, sample,
position)`. So a seed gives the same tokens in any batch and step, on any stage cut, and after any
preemption.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ppkernels import cpu
from ppkernels.adjust import adjusted
from ppkernels.best_ids import best_ids
from ppkernels.dispatch import choose
from ppkernels.sampling_inputs import SamplingInputs, SamplingOutput
from ppkernels.token_masks import masked

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, sample: int, position: int) -> float:
    """Return a number in [0, 1), a multiple of 2**-52, that depends only on the three keys of 64
    bits.

    Each key is mixed into the state by one round of splitmix64 (Steele, Lea and Flood, OOPSLA
    2014).
    """
    state = 0
    for key in (seed, sample, position):
        state = _mix((state ^ (key & _MASK)) + _GOLDEN & _MASK)
    return (state >> 12) * 2.0**-52


def sample(logits: Tensor, inputs: SamplingInputs) -> SamplingOutput:
    """Return one token for each row of `logits` [R, V]. Greedy ties go to the lowest id; `logits`
    is not changed.
    """
    return choose("sample", sample_reference, logits)(logits, inputs)


def sample_reference(logits: Tensor, inputs: SamplingInputs) -> SamplingOutput:
    """Return `sample`, computed by torch."""
    allowed = masked(logits, inputs.masks) if inputs.masks else logits
    allowed = _without_banned(allowed, inputs.banned) if inputs.banned else allowed
    if inputs.adjustments:
        allowed = adjusted(allowed, inputs)
    random = [row for row, temperature in enumerate(inputs.temperature) if temperature > 0.0]
    if len(random) == len(inputs.temperature) and random:
        tokens = _draw(allowed, inputs, random)
    else:
        tokens = _best(allowed)
        if random:
            rows = torch.tensor(random, device=logits.device)
            tokens[rows] = _draw(allowed[rows], inputs, random)
    return SamplingOutput(tokens, _logprobs(logits, tokens, inputs.logprobs))


def _best(logits: Tensor) -> Tensor:
    """Return the token of each row's largest logit, the lowest of equal ones.

    On a CPU numpy computes it: its argmax is vector code and takes 0.1 ms for 16 rows of 50,000,
    torch's 1.4 ms.
    """
    if cpu.serves(logits):
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


def _draw(logits: Tensor, inputs: SamplingInputs, rows: list[int]) -> Tensor:
    """Return tokens by inverse transform: the first whose cumulative probability, in id order,
    exceeds the number.
    """
    device = logits.device

    def column(values: list[float]) -> Tensor:
        # A value above 0 must stay above 0, also if the type is too narrow for it.
        column = torch.tensor([values[row] for row in rows], dtype=scaled.dtype, device=device)
        return column.clamp_(min=torch.finfo(scaled.dtype).tiny).unsqueeze(1)

    scaled = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    # The best token's logit becomes 0 first, so that no temperature can overflow.
    scaled = (scaled - scaled.amax(-1, keepdim=True)).div_(column(inputs.temperature))
    if any(inputs.top_k[row] > 0 or inputs.top_p[row] < 1.0 for row in rows):
        keep = _keep(scaled, [inputs.top_k[row] for row in rows], column(inputs.top_p))
        scaled.masked_fill_(~keep, float("-inf"))
    cumulative = torch.softmax(scaled, -1).cumsum(-1, dtype=torch.float64)
    numbers = [uniform(inputs.seed[row], inputs.sample[row], inputs.position[row]) for row in rows]
    target = torch.tensor(numbers, dtype=torch.float64, device=device).unsqueeze(1) * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    # A row that is not finite gives V, which is no token id.
    return chosen.clamp_(max=logits.shape[1] - 1)


def _keep(scaled: Tensor, top_k: list[int], top_p: Tensor) -> Tensor:
    """Return [R, V], true for tokens kept by top-k, and then by top-p of the rest; ties go to the
    lowest id.
    """
    vocabulary = scaled.shape[1]
    ordered, index = scaled.sort(stable=True, dim=-1, descending=True)
    counts = [k if 0 < k < vocabulary else vocabulary for k in top_k]
    limits = torch.tensor(counts, device=scaled.device).unsqueeze(1)
    ordered.masked_fill_(torch.arange(vocabulary, device=scaled.device) >= limits, float("-inf"))
    probabilities = torch.softmax(ordered, -1)
    # A token is kept while the mass of the better ones is below top_p, so at least one is kept.
    better = probabilities.cumsum(-1, dtype=torch.float64) - probabilities
    kept = ((better < top_p) | (top_p >= 1.0)) & (ordered > float("-inf"))
    return torch.zeros_like(kept).scatter_(-1, index, kept)


def _without_banned(logits: Tensor, banned: dict[int, list[int]]) -> Tensor:
    allowed = logits.clone()
    for row, tokens in banned.items():
        inside = [token for token in tokens if token < logits.shape[1]]
        allowed[row, inside] = float("-inf")
    return allowed


def _logprobs(logits: Tensor, tokens: Tensor, wanted: list[int]) -> dict[int, tuple[float, list[tuple[int, float]]]]:
    rows = [row for row, count in enumerate(wanted) if count >= 0]
    if not rows:
        return {}
    index = torch.tensor(rows, device=logits.device)
    picked = logits[index]
    values = torch.log_softmax(picked if picked.dtype == torch.float64 else picked.float(), -1)
    chosen = values.gather(1, tokens[index].unsqueeze(1)).squeeze(1).tolist()
    ids = best_ids(values, min(max(wanted), logits.shape[1]))
    best = values.gather(1, ids)
    result = {}
    for place, row in enumerate(rows):
        pairs: list[tuple[int, float]] = []
        if wanted[row]:
            both = zip(ids[place].tolist(), best[place].tolist(), strict=True)
            pairs = sorted(both, key=lambda pair: (-pair[1], pair[0]))[: wanted[row]]
        result[row] = (chosen[place], pairs)
    return result


def _mix(value: int) -> int:
    """Return splitmix64's finaliser of `value`."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31
