"""Programmatic dependent launch: a kernel's programs start while the kernel before it drains.

What waits for nothing (indices, weights) is done while the one before still runs; `follow` then waits until it is over
and all it has written can be read. In a graph of a decode step this hides most of what lies between two small kernels.

Attention is not chained: the product behind it would take memory bandwidth and places on the multiprocessors from it
(a decode step of OPT-6.7B with one row then takes 3.77 ms and not 3.51).

Every program of a chained kernel must call `follow`, also one that then finds no work, and may before that neither
write nor read what a kernel of the same step writes: being over then means that all kernels before it are over too.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@functools.cache
def chains(device: torch.device) -> bool:
    """Return whether kernels on `device` can be chained: from Hopper on. Pass it as `CHAIN` and as `launch_pdl`."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def let_follow(CHAIN: tl.constexpr) -> None:
    """Let the next kernel's programs start as soon as all of this one's have."""
    if CHAIN:
        gdc_launch_dependents()


@triton.jit
def follow(CHAIN: tl.constexpr) -> None:
    """Wait for the kernel before this one."""
    if CHAIN:
        gdc_wait()
