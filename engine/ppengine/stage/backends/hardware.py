"""What a stage runs on: where tensors live, how much memory there is, and what its cache and pools are made of.

`CpuHardware` is here; `cuda/cuda_hardware` is a GPU. Boot asks one of them and knows of no other difference.
"""

from __future__ import annotations

import os
import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from ppkernels.batch import Batch
from torch import Tensor

from ppengine.common.config import ConfigError, EngineConfig
from ppengine.common.ring import Kind
from ppengine.models import StageModel
from ppengine.stage.backends.cpu.kv_cache import CpuKvCache, HostPool, KvCache, KvShape, SwapPool, size_text
from ppengine.stage.backends.cpu.system_memory import system_memory
from ppengine.stage.ledger.ledger import Ledger
from ppengine.stage.profile_run import activation_bytes
from ppengine.stage.recorder import Recorder
from ppengine.stage.runner import Runner
from ppengine.stage.token_return import TokenTable

_MIB, _GIB = 2**20, 2**30


class Furniture(NamedTuple):
    """What `Hardware.furnish` is given. `told(done, all)` hears of what takes long."""

    cache: KvCache
    host: Any
    told: Callable[[int, int], None]


class Hardware(ABC):
    """One stage's device. Sizes in bytes."""

    kind: str
    name: str
    uuid: str | None
    device: torch.device
    total: int
    """Memory that this stage may count as its own: a utilization of 1."""
    half = False
    """Whether half precision is computed in half precision where the profile leaves the type to the checkpoint."""
    pinned = False
    """Whether messages from other stages are received into pinned memory."""

    def batch(self, batch: Batch) -> Batch:
        """Return a step's batch with its tensors where the kernels want them."""
        return batch

    @contextmanager
    def recording(self, ring: Recorder, tokens: int) -> Iterator[None]:
        """Return a block in which boot tries how long `tokens` tokens take: written down as work of no step."""
        with ring.operation(Kind.FORWARD, size=tokens):
            yield

    @abstractmethod
    def activations(self, run: Callable[[], None]) -> int:
        """Return what `run` needs for a while beside what is there before and after."""

    @abstractmethod
    def peak(self, weights: int, activations: int, cache: KvCache | None = None) -> int:
        """Return what this stage needs before it has a block: weights, the largest activations and all else.

        `cache` is there already when what was made behind it (graphs) is to count.
        """

    @abstractmethod
    def quantum_blocks(self, shape: KvShape) -> int:
        """Return the smallest number of blocks by which a cache changes."""

    @abstractmethod
    def cache(self, shape: KvShape, blocks: int) -> KvCache:
        """Return a cache with addresses for `blocks` blocks, the null block mapped."""

    @abstractmethod
    def scratch(self, shape: KvShape) -> list[Tensor]:
        """Return the layers of a cache of one block, for the profile run."""

    @abstractmethod
    def pool(self, shape: KvShape, blocks: int) -> SwapPool:
        """Return the host pool of swapped blocks."""

    def furnish(self, config: EngineConfig, model: StageModel, loaded: Furniture) -> Any:
        """Return what runners of this hardware keep for life beside model, cache and pool; None where nothing."""
        return None

    def ends(self, card: Any) -> Any:
        """Return what makes ends of edges that a device serves (`cuda/device_edges`); None: the wire serves all."""
        return None

    def own_tokens(self, ring: Recorder) -> Any:
        """Return the table of sampled tokens of a stage that has no other."""
        return TokenTable(ring)

    def runner(self, **parts: Any) -> Runner:
        """Return a runner for one generation."""
        return Runner(**parts)


class CpuHardware(Hardware):
    """Cores and memory of this host."""

    kind, uuid = "cpu", None
    device = torch.device("cpu")

    def __init__(self, config: EngineConfig) -> None:
        profile = config.profile
        self._stages = config.stages
        torch.set_num_threads(profile.threads_per_stage or max(1, len(os.sched_getaffinity(0)) // config.stages))
        mib = profile.memory.device_mib
        self.total = system_memory().total // config.stages if mib is None else mib * _MIB
        self.name = _processor()

    def activations(self, run: Callable[[], None]) -> int:
        """See `Hardware`."""
        return activation_bytes(run)

    def peak(self, weights: int, activations: int, cache: KvCache | None = None) -> int:
        """See `Hardware`."""
        return weights + activations

    def quantum_blocks(self, shape: KvShape) -> int:
        """See `Hardware`."""
        return shape.quantum_blocks()

    def cache(self, shape: KvShape, blocks: int) -> KvCache:
        """See `Hardware`."""
        return CpuKvCache(shape, blocks)

    def scratch(self, shape: KvShape) -> list[Tensor]:
        """See `Hardware`."""
        return CpuKvCache(shape, 1).layers

    def pool(self, shape: KvShape, blocks: int) -> SwapPool:
        """See `Hardware`. Raises ConfigError where so much cannot be reserved."""
        try:
            return HostPool(shape, blocks)
        except OSError as error:
            host = system_memory()
            gib = host.available // self._stages * 90 // _GIB / 100
            raise ConfigError(
                f"{size_text(blocks * shape.block_bytes)} of host memory for {blocks} swapped blocks cannot be "
                f"reserved: {error.strerror}; the host has {size_text(host.total)}, {size_text(host.available)} of it "
                f"available, for {self._stages} stages; memory.swap_space_gib of at most {gib:g} would fit"
            ) from None


def resolve_dtype(name: str, stored: str, half: bool = False) -> torch.dtype:
    """Return the type to compute in. `auto` is the `stored` one, with half precision as float32 unless `half`."""
    if name == "auto":
        name = "float32" if stored in ("bfloat16", "float16") and not half else stored
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"model.dtype is {name!r}; it must be float64, float32, bfloat16 or float16")
    return dtype


def open_hardware(config: EngineConfig, stage: int, ledger: Ledger | None = None) -> Hardware:
    """Return what `parallel.device` says; `auto` is a GPU where there is one and no `memory.device_mib` is set.

    Its streams are declared to `ledger`. Raises ConfigError for `cuda` on a machine without a GPU.
    """
    wanted, memory = config.profile.parallel.device, config.profile.memory
    if wanted == "cpu" or (wanted == "auto" and (memory.device_mib is not None or not torch.cuda.is_available())):
        return CpuHardware(config)
    if not torch.cuda.is_available():
        build = torch.version.cuda or "without CUDA"
        raise ConfigError(f"parallel.device is cuda, but torch {torch.__version__} ({build}) sees no GPU here")
    from ppengine.stage.backends.cuda.cuda_hardware import CudaHardware

    return CudaHardware(config, stage, ledger)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
