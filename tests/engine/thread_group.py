"""Groups of ranks that are threads of this process, `run_ranks` runs a function on every rank; and a spec to split."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from ppengine.checkpoint.model_spec import ModelSpec
from ppengine.common.groups import site_text
from ppengine.models.group import LateSum
from ppkernels.norms import Norm
from torch import Tensor

T = TypeVar("T")
_LIMIT_S = 60.0


class Meeting:
    """The place where the ranks of one group exchange tensors.

    One rank runs at a time, until it waits for the others: Triton's interpreter knows no threads.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.turn = threading.Lock()
        self.barrier = threading.Barrier(size, timeout=_LIMIT_S)
        self.parts: list[tuple[int, Tensor] | None] = [None] * size

    def exchange(self, rank: int, site: int, part: Tensor) -> list[Tensor]:
        """Return the parts of all ranks. Raises AssertionError if a rank brings one of another call site."""
        assert part.dim() == 2 and part.is_contiguous()
        self.parts[rank] = (site, part.clone())
        self._wait()
        brought = [part for part in self.parts if part is not None]
        self._wait()
        sites = [site_text(number) for number, _ in brought]
        assert len(set(sites)) == 1, f"ranks are at {sites}"
        return [part for _, part in brought]

    def _wait(self) -> None:
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()


class ThreadGroup:
    """One rank's side of a meeting. It notes its call sites, and spoils what a model may no longer read."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self.size = rank, meeting.size
        self.sites: list[int] = []
        self._meeting = meeting

    def all_reduce(self, part: Tensor, site: int) -> Tensor:
        """Return the sum of all ranks' `part`, in rank order."""
        self.sites.append(site)
        parts = self._meeting.exchange(self.rank, site, part)
        part.fill_(float("nan"))
        total = parts[0].clone()
        for more in parts[1:]:
            total.add_(more)
        return total

    def reduce_norm(self, part: Tensor, residual: Tensor, norm: Norm, site: int) -> Tensor:
        """Add the sum to `residual`, and return the norm of that."""
        return norm.of_sum(residual, self.all_reduce(part, site))

    def pieces(self, rows: int, row_bytes: int) -> list[slice]:
        """Return one piece."""
        return [slice(0, rows)]

    def send(self, part: Tensor, site: int) -> LateSum:
        """Begin the sum of one of several pieces."""
        return LateSum(self, part, site)

    def all_gather(self, part: Tensor, widths: list[int], site: int) -> Tensor:
        """Return all ranks' `part` [R, w] side by side."""
        self.sites.append(site)
        parts = self._meeting.exchange(self.rank, site, part)
        assert [each.shape[1] for each in parts] == widths
        return torch.cat(parts, 1)


def run_ranks(size: int, work: Callable[[ThreadGroup], T], kind: type[ThreadGroup] = ThreadGroup) -> list[T]:
    """Return what `work` gives on each rank. Raises the first error of a rank."""
    meeting = Meeting(size)

    def run(rank: int) -> T:
        done = False
        meeting.turn.acquire()
        try:
            result = work(kind(meeting, rank))
            done = True
            return result
        finally:
            meeting.turn.release()
            if not done:
                meeting.barrier.abort()

    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(run, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return [future.result() for future in futures]


def make_spec(**fields: int) -> ModelSpec:
    """Return a Llama with 12 query heads, 4 KV heads, an MLP of 96 and 48 tokens, or with other `fields`."""
    sizes = {"num_heads": 12, "num_kv_heads": 4, "intermediate_size": 96, "vocab_size": 48, **fields}
    return ModelSpec(
        model_type="llama", architecture="LlamaForCausalLM", num_layers=1, hidden_size=24, head_dim=2,
        max_position=64, dtype="float32", tie_word_embeddings=False, norm_eps=1e-5, activation="silu",
        eos_token_ids=[2], **sizes,
    )  # fmt: skip
