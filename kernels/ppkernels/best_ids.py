"""The best values of rows, and of equal ones those with the lowest ids: `topk` takes any of them."""

from __future__ import annotations

import torch
from torch import Tensor


def best_ids(values: Tensor, count: int) -> Tensor:
    """Return the ids [R, count] of the best `values` [R, V] of each row, in any order; count <= V.

    A row with NaN has any ids. The host does not wait for a GPU.
    """
    if count in (0, values.shape[1]):
        return torch.arange(count, device=values.device).expand(len(values), -1)
    return _looked(values, count) if values.is_cpu else launched(values, count)


def _looked(values: Tensor, count: int) -> Tensor:
    """Return `best_ids`: the host looks for the few rows in which the last of the best has equals that are left out."""
    best = values.topk(count + 1, -1)
    ids, least, beyond = best.indices[:, :count], best.values[:, count - 1], best.values[:, count]
    for row in (~(least > beyond)).nonzero().flatten().tolist():
        found = (~(values[row] < least[row])).nonzero().flatten()
        ids[row] = found[values[row, found].argsort(stable=True, descending=True)[:count]]
    return ids


def launched(values: Tensor, count: int) -> Tensor:
    """Return `best_ids`, by operations that look at no result."""
    width = values.shape[1]
    least = values.topk(count, -1).values[:, -1:]
    above, equal = values > least, values == least
    missing = count - above.sum(-1, keepdim=True)
    kept = above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= missing))
    ids = torch.where(kept, torch.arange(width, dtype=torch.int32, device=values.device), width)
    return ids.topk(count, -1, largest=False).values.clamp_(max=width - 1).long()
