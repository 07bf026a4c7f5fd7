"""The use of a card's memory: parts of one stage that add up to NVML's figure of the card.

Some parts are known: weights, mapped KV cache, torch's allocator, graph pools within it. The driver
and NCCL report no figures, so theirs are measured: `Account.close` books the growth of the process
since the mark before, less the known parts, under the name of the phase. The remainder is shown as
`unexplained`, never spread over the others.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Reading:
    """One moment, in bytes."""

    used: int
    """Memory of the card in use by all processes (NVML, without the driver's own reserve)."""
    own: int | None
    """Memory of this process (NVML); None: unknown, as in a container with process numbers of its own."""
    torch: int = 0
    """Reserved by torch's allocator, graph pools included."""
    graph_pools: int = 0
    kv_mapped: int = 0


@dataclass(frozen=True, slots=True)
class Parts:
    """Bytes on one card. The driver's own reserve is not among them, and not in its total either."""

    weights: int
    kv_mapped: int
    activations: int
    """Memory of torch's allocator beside weights and graphs: activations, buffers, and its reserve for them."""
    graphs: int
    communicator: int
    context: int
    """The CUDA context, with kernels and libraries' workspaces."""
    other_processes: int
    unexplained: int

    @property
    def used(self) -> int:
        """NVML's figure of the card: the sum of all parts."""
        return self.kv_mapped + self.beside_kv + self.other_processes + self.unexplained

    @property
    def beside_kv(self) -> int:
        """Memory that this process needs before it has a block."""
        return self.weights + self.activations + self.graphs + self.communicator + self.context


class Account:
    """Books of one stage, opened before its first CUDA call. Phases are `context`, `communicator` and `graphs`."""

    def __init__(self, opening: Reading) -> None:
        self._before = opening.used
        self._last = opening
        self._driver = {"context": 0, "communicator": 0, "graphs": 0}

    def close(self, phase: str, reading: Reading) -> None:
        """Book the growth since the last call, beside known parts, under `phase`. Raises KeyError for another."""
        self._driver[phase] += self._hidden(reading) - self._hidden(self._last)
        self._last = reading

    def parts(self, reading: Reading, weights: int) -> Parts:
        """Return the parts now; `weights` are the bytes of the model's tensors."""
        driver = sum(self._driver.values())
        return Parts(
            weights=weights,
            kv_mapped=reading.kv_mapped,
            activations=reading.torch - reading.graph_pools - weights,
            graphs=self._driver["graphs"] + reading.graph_pools,
            communicator=self._driver["communicator"],
            context=self._driver["context"],
            other_processes=self._others(reading),
            unexplained=self._hidden(reading) - driver,
        )

    def _others(self, reading: Reading) -> int:
        """Return the memory of other processes; if NVML gives none, their memory before this one started."""
        return self._before if reading.own is None else reading.used - reading.own

    def _hidden(self, reading: Reading) -> int:
        """Return the memory of this process that neither torch nor the KV cache knows of."""
        return reading.used - self._others(reading) - reading.torch - reading.kv_mapped


class Card:
    """One card as NVML reports it, and this process's memory on it."""

    def __init__(self, uuid: str) -> None:
        """Open the card. Raises pynvml.NVMLError if there is none of that UUID."""
        import pynvml

        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)

    @property
    def total(self) -> int:
        """Bytes that processes can have."""
        memory = self._memory()
        return int(memory.total - memory.reserved)

    def read(self, kv_mapped: int = 0) -> Reading:
        """Return this moment. Before the first CUDA call it makes none."""
        torch_bytes = pools = 0
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch_bytes, pools = torch.cuda.memory_reserved(), _graph_pools()
        return Reading(int(self._memory().used), self._own(), torch_bytes, pools, kv_mapped)

    def _memory(self) -> Any:
        return self._nvml.nvmlDeviceGetMemoryInfo(self._handle, version=self._nvml.nvmlMemory_v2)

    def _own(self) -> int | None:
        processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        held = next((process.usedGpuMemory for process in processes if process.pid == os.getpid()), None)
        if held is not None:
            return int(held)
        # Not listed: nothing yet, or listed by a number of the host's.
        return None if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]


def _graph_pools() -> int:
    """Return the bytes of the allocator's pools that belong to graphs."""
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return sum(int(one["total_size"]) for one in segments if tuple(one["segment_pool_id"]) != (0, 0))
