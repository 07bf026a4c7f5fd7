"""The weighted sum of a tensor's bits, made where the tensor lies: the checksum of what a device computes.

The bits are taken as numbers of 16 bits, so that half precision with an odd number of values is
whole, too. Each is multiplied by an odd number that depends on its place, and the products are
added modulo 2**63. One value that differs always changes the sum, since an odd factor is
invertible. Integers give the same sum in any order of adding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ppkernels.dispatch import choose
from ppkernels.sum_constants import GOLDEN, LOW, MARK


def weighted_sum(values: Tensor, result: Tensor, scratch: Tensor) -> None:
    """Write the sum of contiguous `values` into `result[0]`, int64, on their device or in pinned memory.

    `scratch` [2] int64 is zero before and after; sums that share it must follow each other.
    """
    choose("weighted_sum", weighted_sum_reference, values)(values, result, scratch)


def weighted_sum_reference(values: Tensor, result: Tensor, scratch: Tensor) -> None:
    """Write `weighted_sum`, computed by torch."""
    halves = values.view(torch.int16).view(-1).to(torch.int64) & 0xFFFF
    weights = (2 * torch.arange(len(halves), device=values.device) + 1) * GOLDEN
    weights ^= (weights >> 32) & 0xFFFFFFFF
    low = (halves * (weights | 1)).sum() & LOW
    result[:1].copy_((torch.where(low == 0, 1, low) | MARK).view(1), non_blocking=True)
