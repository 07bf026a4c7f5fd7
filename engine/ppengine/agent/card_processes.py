"""The processes on one card: the memory that each holds, and its share of the SMs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from ppengine.common.procfs import program
from ppengine.diagnosis.budgets import NEIGHBOUR_USES
from ppengine.protocol.gpu import GpuProcess

MOST = 8
ROUNDS = 5
"""Rounds of the poller over which use is averaged: a sample of one second is too noisy to name a process."""


class CardProcesses:
    """Remembers the use of the SMs over the last rounds."""

    def __init__(self) -> None:
        self._rounds: deque[dict[int, float]] = deque(maxlen=ROUNDS)
        self._newest_us = 0

    def use(self, nvml: Any, handle: Any) -> dict[int, float]:
        """Read the samples since the last call; return each process's mean share over the last rounds."""
        try:
            samples = nvml.nvmlDeviceGetProcessUtilization(handle, self._newest_us)
        except nvml.NVMLError as error:
            # The driver has no sample where no process computed: an error, which pynvml may call a success.
            if error.value not in (nvml.NVML_SUCCESS, nvml.NVML_ERROR_NOT_FOUND):
                raise
            samples = []
        found: dict[int, list[int]] = {}
        for sample in samples:
            # Entries without a process are padding, and some drivers repeat old samples.
            if sample.pid and sample.timeStamp > self._newest_us:
                found.setdefault(sample.pid, []).append(min(sample.smUtil, 100))
        self._newest_us = max([self._newest_us, *(sample.timeStamp for sample in samples)])
        self._rounds.append({pid: sum(shares) / len(shares) / 100 for pid, shares in found.items()})
        pids = {pid for each in self._rounds for pid in each}
        return {pid: sum(each.get(pid, 0.0) for each in self._rounds) / len(self._rounds) for pid in pids}


def held(processes: Iterable[Any]) -> dict[int, int | None]:
    """Return the bytes that each process of NVML's answer holds; None where the driver does not report them."""
    return {process.pid: process.usedGpuMemory for process in processes}


def listed(
    compute: Mapping[int, int | None] | None, graphics: Mapping[int, int | None] | None, use: Mapping[int, float] | None
) -> list[GpuProcess] | None:
    """Return the processes that compute or draw; None if the driver lists neither."""
    if compute is None and graphics is None:
        return None
    # A process that does both is in both lists, with all of its memory.
    holders = {**(graphics or {}), **(compute or {})}
    processes = [
        GpuProcess(
            pid=pid, name=program(pid), bytes=size, sm=None if use is None else round(use.get(pid, 0.0), 3)
        )
        for pid, size in holders.items()
    ]  # fmt: skip
    return sorted(processes, key=lambda each: ((each.sm or 0.0) < NEIGHBOUR_USES, -(each.bytes or 0)))[:MOST]
