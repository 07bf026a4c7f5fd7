"""A CPU as a stage's hardware: the cores and the memory of this host."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from ppengine.checkpoint.model_spec import ModelSpec
from ppengine.common.config import ConfigError, EngineConfig
from ppengine.common.sizes import size_text
from ppengine.common.system_memory import system_memory
from ppengine.models import StageModel
from ppengine.protocol.place import Place
from ppengine.stage.backends.base import KvShape
from ppengine.stage.backends.cpu.cpu_runner import CpuRunner
from ppengine.stage.backends.cpu.host_group import HostGroup
from ppengine.stage.backends.cpu.kv_cache import CpuKvCache, CpuSwapSpace
from ppengine.stage.backends.hardware import Hardware, Room, RunnerResources
from ppengine.stage.edge import Edge
from ppengine.stage.ledger.ledger import Ledger
from ppengine.stage.profile_run import activation_bytes
from ppengine.stage.rank_group import LoneRank, RankGroup
from ppengine.stage.recorder import Recorder
from ppengine.stage.runner import RunnerParts
from ppengine.stage.token_return import HostTokenTable
from ppengine.stage.transport import WireReceiver, WireSender, WireTokenSender

_MIB, _GIB = 2**20, 2**30


class CpuHardware(Hardware):
    """Cores and memory of this host."""

    kind, uuid = "cpu", None
    device = torch.device("cpu")

    def __init__(self, config: EngineConfig, ledger: Ledger | None = None) -> None:
        profile = config.profile
        self._ledger = ledger or Ledger()
        self._places = places = len(config.groups)
        torch.set_num_threads(profile.threads_per_stage or max(1, len(os.sched_getaffinity(0)) // places))
        mib = profile.memory.device_mib
        self.total = system_memory().total // places if mib is None else mib * _MIB
        self.name = _processor()

    @override
    def make_group(
        self, config: EngineConfig, place: Place, ring: Recorder, spec: ModelSpec, dtype: torch.dtype
    ) -> RankGroup:
        if config.groups.tensor == 1:
            return LoneRank()
        return HostGroup(place.stage, place.rank, config.groups.tensor, Path(config.ring_dir), ring)

    @override
    def activations(self, run: Callable[[], None]) -> int:
        return activation_bytes(run)

    @override
    def peak(self, weights: int, activations: int, mapped: int = 0) -> int:
        return weights + activations

    @override
    def quantum_blocks(self, shape: KvShape) -> int:
        return shape.quantum_blocks()

    @override
    def scratch(self, shape: KvShape) -> list[Tensor]:
        return CpuKvCache(shape, 1).layers

    @override
    def make_resources(
        self, config: EngineConfig, model: StageModel, room: Room, progress: Callable[[int, int], None]
    ) -> RunnerResources:
        cache = CpuKvCache(room.shape, room.reserved_blocks)
        swap = self.swap_space(room.shape, room.swap_blocks, shared=bool(config.profile.tiers.backends))
        return CpuResources(config, model, cache, swap, self._ledger)

    def swap_space(self, shape: KvShape, blocks: int, *, shared: bool = False) -> CpuSwapSpace:
        """Return host memory for `blocks` swapped blocks. Raises ConfigError if so much cannot be reserved."""
        try:
            return CpuSwapSpace(shape, blocks, shared=shared)
        except OSError as error:
            host = system_memory()
            gib = host.available // self._places * 90 // _GIB / 100
            raise ConfigError(
                f"{size_text(blocks * shape.block_bytes)} of host memory for {blocks} swapped blocks cannot be "
                f"reserved: {error.strerror}; the host has {size_text(host.total)}, {size_text(host.available)} of it "
                f"available, for {self._places} stages; memory.swap_space_gib of at most {gib:g} would fit"
            ) from None


class CpuResources(RunnerResources):
    """Model, cache and swap space of a CPU stage; its messages go by wire."""

    launches = False

    def __init__(
        self, config: EngineConfig, model: StageModel, cache: CpuKvCache, swap: CpuSwapSpace, ledger: Ledger
    ) -> None:
        self.model, self.cache, self.swap = model, cache, swap
        self._most_tokens = config.profile.scheduler.max_num_batched_tokens
        self._ledger = ledger

    @override
    def receiver(self, edge: Edge) -> WireReceiver:
        return WireReceiver(edge, self._most_tokens, self.model.boundary_size, self.cache.shape.dtype, self._ledger)

    @override
    def sender(self, edge: Edge, ring: Recorder) -> WireSender:
        return WireSender(edge, ring, self._ledger)

    @override
    def token_sender(self, edge: Edge, ring: Recorder) -> WireTokenSender:
        return WireTokenSender(edge, ring, self._ledger)

    @override
    def tokens(self, ring: Recorder, edge: Edge | None) -> HostTokenTable:
        return HostTokenTable(ring, edge, self._ledger)

    @override
    def runner(self, parts: RunnerParts) -> CpuRunner:
        return CpuRunner(parts)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
