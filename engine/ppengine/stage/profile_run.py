"""The profile run: the memory that the largest batch needs beside the weights, measured and not estimated."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from pathlib import Path

from ppengine.protocol.steps import Row

_RESET_PEAK = "5"
"""To /proc/self/clear_refs: set VmHWM to the present resident memory (proc(5))."""


CONTEXTS = (1, 256, 4_096, 16_384)
"""Contexts of which attention is split into parts in ways that differ, each by kernels of its own."""


def small_steps(max_tokens: int, max_model_len: int) -> list[list[Row]]:
    """Return steps of one or two tokens that launch all kernels that a small step may need, in slot 0.

    Graphs see the longest context alone. A step that is too large for them, or is looked into, has the context of its
    own rows.
    """
    ends = [*(end for end in CONTEXTS if end < max_model_len), max_model_len]
    counts = [count for count in (1, 2) if count <= max_tokens]
    return [[Row(0, end - count, count, True, 0)] for count in counts for end in ends if end >= count]


def largest_batches(max_tokens: int, max_seqs: int, max_model_len: int) -> list[list[Row]]:
    """Return the largest steps that there may be, all in slot 0 and all sampled.

    The token budget over as many sequences as allowed, and one chunk of it at the end of the
    longest context.
    """
    sequences = min(max_seqs, max_tokens)
    even, more = divmod(max_tokens, sequences)
    counts = [min(even + (index < more), max_model_len) for index in range(sequences)]
    chunk = min(max_tokens, max_model_len)
    return [[Row(0, 0, count, True, 0) for count in counts], [Row(0, max_model_len - chunk, chunk, True, 0)]]


def activation_bytes(run: Callable[[], None]) -> int:
    """Return by how much `run` raises this process's resident memory above its level before and after.

    `run` is called once before, so that lazily loaded code and libraries' own buffers are not
    counted. Then the allocator's free memory is given back and the high-water mark (VmHWM) reset.
    If the system does not allow that, the mark of the process's whole life is used: too much maybe,
    never too little.
    """
    run()
    ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    before = _status_bytes("VmRSS")
    run()
    return max(0, _status_bytes("VmHWM") - before)


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text(errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise OSError(f"/proc/self/status has no {name} line; a Linux kernel is needed")
