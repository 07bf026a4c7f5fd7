"""Which hardware a stage runs on, and the type that it computes in."""

from __future__ import annotations

import torch

from ppengine.common.config import ConfigError, EngineConfig
from ppengine.protocol.place import Place
from ppengine.stage.backends.cpu.cpu_hardware import CpuHardware
from ppengine.stage.backends.hardware import Hardware
from ppengine.stage.ledger.ledger import Ledger


def open_hardware(config: EngineConfig, place: Place, ledger: Ledger | None = None) -> Hardware:
    """Return the device that `parallel.device` names; `auto` is a GPU if there is one and no `memory.device_mib`.

    Its streams are declared to `ledger`. Raises ConfigError for `cuda` on a machine without a GPU.
    """
    wanted, memory = config.profile.parallel.device, config.profile.memory
    if wanted == "cpu" or (wanted == "auto" and (memory.device_mib is not None or not torch.cuda.is_available())):
        return CpuHardware(config, ledger)
    if not torch.cuda.is_available():
        build = torch.version.cuda or "without CUDA"
        raise ConfigError(f"parallel.device is cuda, but torch {torch.__version__} ({build}) sees no GPU here")
    from ppengine.stage.backends.cuda.cuda_hardware import CudaHardware

    return CudaHardware(config, place, ledger)


def resolve_dtype(name: str, stored: str, half: bool = False) -> torch.dtype:
    """Return the type to compute in. `auto` is the `stored` one, with half precision as float32 unless `half`."""
    if name == "auto":
        name = "float32" if stored in ("bfloat16", "float16") and not half else stored
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"model.dtype is {name!r}; it must be float64, float32, bfloat16 or float16")
    return dtype
