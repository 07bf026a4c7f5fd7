"""Ranks whose kernels Triton's interpreter runs, each in a process of its own, over memory that all of them share."""

from __future__ import annotations

import mmap
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton.language as tl
from ppkernels.gpu import collectives, greedy_ranks, rank_memory, top_k_ranks
from ppkernels.gpu.sampling import DeviceSampling
from ppkernels.norms import Norm
from triton.runtime.interpreter import InterpreterBuilder

PART_BYTES = 64 * 1024
Rank = Callable[["Member"], None]


class Member:
    """One rank of an interpreted group: its table and counters, over memory that all ranks share."""

    def __init__(self, rank: int, size: int, addresses: list[int], word: int, base: int = 0) -> None:
        self.rank, self.size = rank, size
        self.table = torch.tensor([1, word, *addresses])
        self.counters = torch.full((collectives.PROGRAMS,), base)

    def reduce(self, part: torch.Tensor) -> torch.Tensor:
        collectives.all_reduce(part, self.table, self.counters, self.rank, self.size, PART_BYTES)
        return part

    def add_norm(self, part: torch.Tensor, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
        output = torch.full_like(part, float("nan"))
        parameters = collectives.NormOf(norm.weight, norm.bias, norm.eps, norm.centred)
        collectives.reduce_norm(
            part, residual, parameters, output, self.table, self.counters, self.rank, self.size, PART_BYTES
        )  # fmt: skip
        return output

    def gather(self, part: torch.Tensor, widths: list[int]) -> torch.Tensor:
        starts = torch.tensor([0, *widths]).cumsum(0)
        result = torch.full((len(part), sum(widths)), -1, dtype=part.dtype)
        collectives.all_gather(
            part, result, starts, max(widths), self.table, self.counters, self.rank, self.size, PART_BYTES
        )  # fmt: skip
        return result

    def choose(
        self, logits: torch.Tensor, columns: greedy_ranks.Columns, sampling: DeviceSampling, slots: torch.Tensor,
        positions: torch.Tensor, newest: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        return greedy_ranks.choose_greedy(logits, columns, sampling, slots, positions, newest, *self._place)

    def choose_below(
        self, logits: torch.Tensor, columns: greedy_ranks.Columns, sampling: DeviceSampling, slots: torch.Tensor,
        positions: torch.Tensor, most: int, newest: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        return top_k_ranks.choose_below(logits, columns, sampling, slots, positions, most, newest, *self._place)

    @property
    def _place(self) -> tuple[torch.Tensor, torch.Tensor, int, int, int]:
        return self.table, self.counters, self.rank, self.size, PART_BYTES


def interpret_few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make calls of few programs, and waits that leave a core to other ranks.

    The interpreter runs one program after the other: those of two ranks take turns all the same.
    """
    monkeypatch.setattr(collectives, "PROGRAMS", 2)
    monkeypatch.setattr(collectives, "TILE", 64)
    monkeypatch.setattr(collectives, "WORD_BYTES", 512)
    # A look at a flag takes the interpreter a third of a millisecond, so 8192 of them are seconds.
    monkeypatch.setattr(rank_memory, "_LOOKS", tl.constexpr(8))
    load = InterpreterBuilder.create_masked_load

    def patient(*arguments: Any) -> Any:
        """A rank that looks at a flag leaves its core to the rank that raises it."""
        if arguments[-1]:  # volatile
            time.sleep(0.01)
        return load(*arguments)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", patient)


def together(size: int, live: Rank, base: int = 0, word_value: int = 0) -> None:
    """Run `live` as each rank, in processes; fail if one does."""
    one = collectives.memory_bytes(size, PART_BYTES)
    memory = mmap.mmap(-1, size * one + 4096)
    shared = torch.frombuffer(memory, dtype=torch.uint8)
    addresses = [shared.data_ptr() + rank * one for rank in range(size)]
    word = shared.data_ptr() + size * one
    shared[size * one :].view(torch.int64)[0] = word_value
    fork(size, lambda rank: live(Member(rank, size, addresses, word, base)))


def fork(size: int, live: Callable[[int], None]) -> None:
    """Run `live(rank)` for each rank, in processes; fail if one does, without a wait for the others."""
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                live(rank)
                code = 0
            except Exception:  # noqa: BLE001 - printed, and seen by its exit code
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    running, failed = list(pids), False
    while running:
        time.sleep(0.002)
        for pid, status in [os.waitpid(pid, os.WNOHANG) for pid in running]:
            if pid:
                running.remove(pid)
                failed = failed or status != 0
        if failed:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
    assert not failed
